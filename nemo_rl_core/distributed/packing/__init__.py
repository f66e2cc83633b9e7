"""Packing of sequences into micro-batches, and of micro-batches on data-parallel ranks."""
