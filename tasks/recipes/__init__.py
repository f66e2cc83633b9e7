"""Recipes, one module a workflow, and which stage reads what of them.

Each stage takes a record with exactly the fields it reads, so that Flyte's cache key is exactly
its true input: another learning rate for GRPO leaves data and supervised checkpoint as they are.
The records of one algorithm stand apart from the others', because they are source that its stages
reach.
"""
