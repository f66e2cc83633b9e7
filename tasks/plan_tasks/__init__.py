"""Flyte tasks at the ends of a workflow: one splits the recipe, another records a failure."""
