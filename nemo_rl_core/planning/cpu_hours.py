"""Rough training time on CPUs, to warn about runs that take hours."""

import os
from typing import Final

from nemo_rl_core.planning.load import StageLoad

_CORE_FLOPS: Final = 20e9
"""FLOP/s of a core in float32. SmolLM2-135M with 2 cores: 209 tokens/s from vLLM (docs/results.md),
which is 28e9 per core."""
_SHORTEST_HOURS: Final = 1.0
_CHARACTERS_PER_TOKEN: Final = 4


def cpu_hours(load: StageLoad, num_steps: int, *, row_tokens: float | None = None) -> float:
    """Returns the hours of a stage on this machine's cores, for rows of this or maximum length."""
    if load.sampling is not None:
        length = min(row_tokens or load.prompt_tokens, load.prompt_tokens) + load.mean_completion
    else:
        length = min(row_tokens or load.mean_length, load.mean_length)
    flops, num_sequences = load.sizes.flops, 0
    total = 0.0
    if load.training is not None:
        num_sequences = load.training.num_sequences
        if load.sampling is not None:
            num_sequences = load.sampling.num_sequences
        total += load.training.num_epochs * flops.flops("training", [round(length)])
        total += load.training.num_scorings * flops.flops("scoring", [round(length)])
    if load.sampling is not None:
        total += flops.flops("generation", [round(length)])
    cores = len(os.sched_getaffinity(0))
    return num_steps * num_sequences * total / (_CORE_FLOPS * cores) / 3600


def hours_warning(
    load: StageLoad, num_steps: int, *, row_characters: float | None = None
) -> str | None:
    """Returns a warning if a stage takes an hour or more on CPUs, else None."""
    if load.training is None or (load.sampling is None and row_characters is None):
        return None
    row_tokens = None if row_characters is None else row_characters / _CHARACTERS_PER_TOKEN
    hours = cpu_hours(load, num_steps, row_tokens=row_tokens)
    if hours < _SHORTEST_HOURS:
        return None
    if load.sampling is not None:
        count = num_steps * load.sampling.num_sequences
        work = f"{count:,} completions of up to {load.completion_tokens} tokens"
    else:
        work = f"{num_steps * load.training.num_sequences:,} rows of about {row_tokens:.0f} tokens"
    return (
        f"{load.name} may take about {hours:,.0f} hours on this machine's "
        f"{len(os.sched_getaffinity(0))} CPU cores: {work} and "
        f"{load.sizes.num_parameters / 1e6:,.1f} M parameters; fewer steps, prompts or tokens "
        "take less"
    )
