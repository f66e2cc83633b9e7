"""Reward models trained on preference pairs."""
