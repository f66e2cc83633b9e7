"""Agents that call the policy through an endpoint."""
