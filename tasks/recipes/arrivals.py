"""What a schedule that starts on new rows looks at, and what it starts."""

from pydantic import NonNegativeFloat, PositiveInt

from nemo_rl_core.config.base import FrozenConfig
from nemo_rl_core.config.data import DataConfig


class WatchedRows(FrozenConfig):
    """The rows of a recipe, and the launch plan that runs it.

    Attributes:
        schedule: Name of the launch plan.
        version: Of the launch plan.
        data: Where the recipe's rows come from.
        settled_minutes: No object may be younger when a run starts: what writes it may go on.
        num_tries: How often a run may fail on the same rows before other rows must arrive.
        endpoint: Of Flyte, as who made the schedule reached it; `FLYTE_PLATFORM_URL` in the pod
            takes its place.
        insecure: Whether it is reached without TLS.
    """

    schedule: str
    version: str
    data: tuple[DataConfig, ...]
    settled_minutes: NonNegativeFloat = 10.0
    num_tries: PositiveInt = 1
    endpoint: str
    insecure: bool = False
