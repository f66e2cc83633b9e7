"""Environments that answer, so that the policy has another turn."""
