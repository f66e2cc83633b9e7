"""Packing of sequences into micro-batches.

- `plan.py`: which sequences share a row and a micro-batch, from their lengths alone.
- `ranks.py`: which data-parallel rank computes which micro-batch, balanced by `flops.py`.
- `layout.py`: the tokens of a planned micro-batch in its rows.
"""
