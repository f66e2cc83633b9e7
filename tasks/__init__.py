"""Typed, cached Flyte tasks: each connects, calls the core, and returns an artifact."""

from tasks import local

local.use_store()
