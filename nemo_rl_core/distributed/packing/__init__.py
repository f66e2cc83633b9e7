"""Packing of sequences into micro-batches.

- `plan.py`: which sequences share a row and a micro-batch, from their lengths alone, and the tokens
  of a planned micro-batch in its rows.
- `ranks.py`: which data-parallel rank computes which micro-batch, balanced by cost.
"""
