"""Completions of prompts, sampled from an engine and scored by an environment."""
