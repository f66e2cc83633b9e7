"""Runs the stages of an earlier artifact again, and compares the results."""
