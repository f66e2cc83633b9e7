"""Recipes, one module per workflow, and the fields that each stage reads.

A recipe is plain pydantic: reading one imports neither flytekit nor Ray. `tasks/plan_tasks` has the
tasks that split a recipe into the configs of its stages.

Each stage takes a config with exactly the fields that it reads, so that Flyte's cache key is
exactly its true input: another learning rate for GRPO leaves data and supervised checkpoint as they
are. The configs of one algorithm are in a separate module, because its source is part of the
cache key of its stages.
"""
