"""Runs of workflows on this machine: checks before the start, recording, display and the end."""
