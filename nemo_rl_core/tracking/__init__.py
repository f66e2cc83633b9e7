"""Metrics on their way out: files and tracking services, told of a run, never able to stop it."""

from nemo_rl_core.tracking.facade import LoggerFacade, Tracker
from nemo_rl_core.tracking.machine import MachineSampler, read_machine
from nemo_rl_core.tracking.run import tracked

__all__ = ["LoggerFacade", "MachineSampler", "Tracker", "read_machine", "tracked"]
