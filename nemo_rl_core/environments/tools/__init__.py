"""Conversations in which the policy calls tools; see `environment.ToolEnvironment`."""
