"""Typed, cached Flyte tasks: each connects, calls the core, and returns an artifact.

The modules here are the stages and what they exchange (`artifacts`); `recipes` has what users
write, `platform` how a stage is cached, recorded and placed, `cli` the command `nemo-rl`.
Importing this package alone costs nothing, so that `nemo-rl` is quick; `tasks.platform.stage`,
which every task needs, moves flytekit's files into the store.
"""
