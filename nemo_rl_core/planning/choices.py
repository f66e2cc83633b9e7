"""Chooses values for settings of a stage that its recipe leaves to the plan (`auto`)."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from nemo_rl_core.config.training import (
    CHOSEN_BY_PLAN,
    DTensorTraining,
    TrainingConfig,
    open_choices,
    without_plan,
)
from nemo_rl_core.planning.load import StageLoad, layout_of, layout_problem
from nemo_rl_core.planning.memory import MemoryPlan, missing_cache, plan_memory
from nemo_rl_core.planning.scorers import scorer_problem

HEADROOM = 0.93
"""Fraction of a GPU's memory that a plan may fill; the rest allows for fragmentation."""
HOST_GIB = 96.0
"""Host memory per GPU that offloaded weights may fill; the pods of `tasks/pods/shapes.py`
have 120 per GPU."""
_FRUGAL = {"gradient_sync": "every_microbatch", "activation_checkpointing": True}


def fits(load: StageLoad, memory_gib: float) -> bool:
    """Whether a stage can run on GPUs with this memory."""
    if layout_problem(load) or scorer_problem(load, memory_gib):
        return False
    load = chosen(load, memory_gib)
    plan = plan_memory(load, memory_gib)
    return _has_room(plan, plan.peak, memory_gib) and not missing_cache(load, plan)


def _has_room(plan: MemoryPlan, needed_gib: float, memory_gib: float) -> bool:
    return needed_gib <= HEADROOM * memory_gib and plan.host <= HOST_GIB


def chosen(load: StageLoad, memory_gib: float | None) -> StageLoad:
    """Returns the stage with values for all `auto` settings of its training.

    First chooses one copy of the model per machine if a machine can hold its states. Then chooses
    the first of four options that fits during training, fastest first: no saving of memory, a
    gradient reduction per micro-batch, recomputation, or both.
    """
    if load.training is None or not open_choices(load.training.config):
        return load
    if memory_gib is None or not load.cluster.num_gpus:
        return _with(load, without_plan(load.training.config))
    load = _with_copies(load, memory_gib)
    assert load.training is not None
    config = load.training.config
    for candidate in _candidates(load):
        config = candidate
        tried = _with(load, candidate)
        plan = plan_memory(tried, memory_gib)
        if _has_room(plan, plan.training, memory_gib):
            return tried
    return _with(load, config)  # the smallest candidate, which will be refused


def _with(load: StageLoad, config: TrainingConfig) -> StageLoad:
    assert load.training is not None
    return replace(load, training=replace(load.training, config=config))


def _with_copies(load: StageLoad, memory_gib: float) -> StageLoad:
    assert load.training is not None
    config = load.training.config
    if "data_parallel_replicas" not in open_choices(config):
        return load
    num_copies = 1
    machines = load.cluster.bundles_per_node
    data = config.data_parallel_size(load.cluster.num_workers)
    if len(machines) > 1 and len(set(machines)) == 1 and data % len(machines) == 0:
        frugal = {name: _FRUGAL[name] for name in open_choices(config) if name in _FRUGAL}
        tried = _with(load, config.replace(data_parallel_replicas=len(machines), **frugal))
        plan = plan_memory(tried, memory_gib)
        num_copies = len(machines) if _has_room(plan, plan.peak, memory_gib) else 1
    return _with(load, config.replace(data_parallel_replicas=num_copies))


def _candidates(load: StageLoad) -> Iterator[TrainingConfig]:
    """Yields training sections without `auto`, the fastest first."""
    assert load.training is not None
    config = load.training.config
    layout = layout_of(config, load.cluster.num_workers)
    levels: dict[str, list[Any]] = {name: [CHOSEN_BY_PLAN[name]] for name in open_choices(config)}
    if "activation_checkpointing" in levels:
        levels["activation_checkpointing"] = [False, True]
    has_reduction = layout.is_wrapped and layout.shards > 1
    is_exact = isinstance(config, DTensorTraining) and config.reduce_dtype == "float32"
    if "gradient_sync" in levels and has_reduction and is_exact:
        levels["gradient_sync"] = ["last_microbatch", "every_microbatch"]
    # The last of the names changes fastest: recomputation costs more than a reduction.
    names = sorted(levels)
    for values in product(*(levels[name] for name in names)):
        yield config.replace(**dict(zip(names, values, strict=True)))


def resolved(before: TrainingConfig, after: TrainingConfig) -> dict[str, str]:
    """Returns the chosen values as YAML texts, by path in the recipe."""
    return {f"training.{name}": str(getattr(after, name)).lower() for name in open_choices(before)}
