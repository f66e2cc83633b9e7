"""Settings of a trainer that declares none of its own."""

from typing import Any

from pydantic import PositiveInt, create_model

from nemo_rl_core.config.trainer import LoopConfig, TrainerSettings


class PlainLoop(LoopConfig):
    """`num_steps` steps of `global_batch_size` rows each."""

    num_steps: PositiveInt = 100
    global_batch_size: PositiveInt = 32


class PlainSettings(TrainerSettings):
    """A loop, and whatever the trainer's own section holds, which the trainer reads itself."""

    loop: PlainLoop = PlainLoop()


def plain_settings(algorithm: str) -> type[PlainSettings]:
    """Settings with an open section of that name.

    Example:
        >>> plain_settings("myalgo")(myalgo={"my_param": 2.0}).myalgo
        {'my_param': 2.0}
    """
    section: Any = (dict[str, Any], {})
    return create_model(f"{algorithm}_settings", __base__=PlainSettings, **{algorithm: section})
