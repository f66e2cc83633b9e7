"""Conversion of models between formats."""
