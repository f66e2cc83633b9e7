"""Frozen pydantic models that every layer reads; imports no torch."""
