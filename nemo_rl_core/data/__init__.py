"""Rows, their checks, and how they become tokens and batches."""
