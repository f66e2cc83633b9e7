"""Scorers, one file per kind of reward."""
