"""Runs untrusted Python in isolated processes; see `runner.Sandbox`."""

from nemo_rl_core.environments.sandbox.runner import Finished, Limits, Running, Sandbox

__all__ = ["Finished", "Limits", "Running", "Sandbox"]
