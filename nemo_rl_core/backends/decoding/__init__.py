"""Requests, sampling and completions, shared by the generation backends."""
