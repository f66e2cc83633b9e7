"""Untrusted Python in a process of its own; see `runner.Sandbox`."""

from nemo_rl_core.environments.sandbox.runner import Sandbox
from nemo_rl_core.environments.sandbox.running import Finished, Limits, Running

__all__ = ["Finished", "Limits", "Running", "Sandbox"]
