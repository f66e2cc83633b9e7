"""Fields of an algorithm's section that trainers read besides those of `LoopConfig`.

A section is matched by its fields, so a custom config need not inherit from these protocols.
"""

from typing import Any, Protocol, runtime_checkable

from pydantic import PositiveInt, create_model

from nemo_rl_core.config.trainer import GateConfig, LoopConfig, TrainerSettings
from nemo_rl_core.errors import ConfigError
from nemo_rl_core.trainers.loop import StepRange


@runtime_checkable
class StepsOfRun(Protocol):
    """A run of `num_steps` steps, all in one stage."""

    num_steps: int


@runtime_checkable
class StepsOfIteration(Protocol):
    """A run of several stages, each with `num_steps_per_iteration` steps."""

    num_steps_per_iteration: int


@runtime_checkable
class RowsPerStep(Protocol):
    """Steps on `global_batch_size` rows of the data set, over all ranks."""

    global_batch_size: int


@runtime_checkable
class SamplesPerStep(Protocol):
    """Steps on `num_prompts_per_step` prompts, `num_generations_per_prompt` completions each."""

    num_prompts_per_step: int
    num_generations_per_prompt: int


@runtime_checkable
class Gated(Protocol):
    """Steps with a `gate` on the difference between the engine's and the trainer's logprobs."""

    gate: GateConfig


class PlainLoop(LoopConfig):
    """`num_steps` steps of `global_batch_size` rows each."""

    num_steps: PositiveInt = 100
    global_batch_size: PositiveInt = 32


class PlainSettings(TrainerSettings):
    """Settings of trainers without a settings class: a loop, and a section with any keys."""

    loop: PlainLoop = PlainLoop()


def plain_settings(algorithm: str) -> type[PlainSettings]:
    """Creates a settings class with a section of that name, which may have any keys.

    Example:
        >>> plain_settings("myalgo")(myalgo={"my_param": 2.0}).myalgo
        {'my_param': 2.0}
    """
    section: Any = (dict[str, Any], {})
    return create_model(f"{algorithm}_settings", __base__=PlainSettings, **{algorithm: section})


def steps_of(config: LoopConfig, iteration: int) -> StepRange:
    """Returns the steps of a run or of one iteration (from 1), numbered over the full run."""
    if isinstance(config, StepsOfRun):
        return StepRange(1, config.num_steps)
    if isinstance(config, StepsOfIteration):
        per_iteration = config.num_steps_per_iteration
        return StepRange((iteration - 1) * per_iteration + 1, iteration * per_iteration)
    raise _lacks(config, "num_steps or num_steps_per_iteration")


def rows_per_step(config: LoopConfig) -> RowsPerStep:
    """Returns the section; raises `ConfigError` if it lacks `global_batch_size`."""
    if isinstance(config, RowsPerStep):
        return config
    raise _lacks(config, "global_batch_size")


def samples_per_step(config: LoopConfig) -> SamplesPerStep:
    """Returns the section; raises `ConfigError` if it lacks the fields of `SamplesPerStep`."""
    if isinstance(config, SamplesPerStep):
        return config
    raise _lacks(config, "num_prompts_per_step and num_generations_per_prompt")


def _lacks(config: LoopConfig, fields: str) -> ConfigError:
    name = type(config).__name__
    return ConfigError(
        f"the section {name} lacks fields that its trainer reads",
        expected=f"the fields {fields}",
        got=", ".join(type(config).model_fields),
        fix=f"add them to {name}, or override the method of the trainer that reads them",
    )
