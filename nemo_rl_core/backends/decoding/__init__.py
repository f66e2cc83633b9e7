"""Requests, draws and completions: what generation backends share, whatever their model."""
