"""What a run may cost."""

from pydantic import PositiveFloat

from nemo_rl_core.config.base import FrozenConfig


class BudgetConfig(FrozenConfig):
    """The limit of a run, and what its expectation needs; it changes no result: no stage reads it.

    Attributes:
        max_gpu_hours: GPU-hours of the run, after which the stage that computes saves and the run
            ends; None for no limit. The variable `NEMO_RL_MAX_GPU_HOURS` takes its place.
        mean_completion_tokens: Of a completion on average, as far as that is known, for the
            expected hours; None expects every completion at its longest.
    """

    max_gpu_hours: PositiveFloat | None = None
    mean_completion_tokens: PositiveFloat | None = None
