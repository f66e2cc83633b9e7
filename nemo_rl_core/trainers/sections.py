"""What trainers read of an algorithm's section besides the fields of `LoopConfig`.

A section is matched by its fields, so that a config of one's own need not inherit from these.
"""

from typing import Protocol, runtime_checkable

from nemo_rl_core.config.trainer import GateConfig, LoopConfig
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
    """Steps on `num_generations_per_prompt` completions of each of `num_prompts_per_step`."""

    num_prompts_per_step: int
    num_generations_per_prompt: int


@runtime_checkable
class Gated(Protocol):
    """Steps that compare the engine's logprobs with the trainer's, which may be `gate` apart."""

    gate: GateConfig


def steps_of(config: LoopConfig, iteration: int) -> StepRange:
    """The steps of a run, or of one iteration, counted over the whole run.

    Args:
        config: The algorithm's section.
        iteration: 1-based; of no account where a run is one stage.

    Raises:
        ConfigError: If the section has neither number.
    """
    if isinstance(config, StepsOfRun):
        return StepRange(1, config.num_steps)
    if isinstance(config, StepsOfIteration):
        per_iteration = config.num_steps_per_iteration
        return StepRange((iteration - 1) * per_iteration + 1, iteration * per_iteration)
    raise _lacks(config, "num_steps or num_steps_per_iteration")


def rows_per_step(config: LoopConfig) -> RowsPerStep:
    """The section, which has `global_batch_size`.

    Raises:
        ConfigError: If it has not.
    """
    if isinstance(config, RowsPerStep):
        return config
    raise _lacks(config, "global_batch_size")


def samples_per_step(config: LoopConfig) -> SamplesPerStep:
    """The section, which has `num_prompts_per_step` and `num_generations_per_prompt`.

    Raises:
        ConfigError: If it has not.
    """
    if isinstance(config, SamplesPerStep):
        return config
    raise _lacks(config, "num_prompts_per_step and num_generations_per_prompt")


def _lacks(config: LoopConfig, fields: str) -> ConfigError:
    """The error for a section without fields that its trainer reads."""
    name = type(config).__name__
    return ConfigError(
        f"the section {name} lacks what its trainer reads",
        expected=f"the fields {fields}",
        got=", ".join(type(config).model_fields),
        fix=f"add them to {name}, or override the method of the trainer that reads them",
    )
