"""What a stage's settings are where its recipe leaves them to the plan (`auto`).

One arithmetic chooses for `nemo-rl plan`, for the check before a run, and for the workers when they
start, so that all three agree on GPUs of equal memory.
"""

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
"""Of a GPU's memory, what a plan may fill: the rest is for what torch's allocator cannot use."""
HOST_GIB = 96.0
"""Of a machine's memory for each GPU, what offloaded weights may fill: the shapes of
`tasks/platform/resources.py` have 120."""
_FRUGAL = {"gradient_sync": "every_microbatch", "activation_checkpointing": True}


def fits(load: StageLoad, memory_gib: float) -> bool:
    """Whether a stage can run on GPUs of so much memory."""
    if layout_problem(load) or scorer_problem(load, memory_gib):
        return False
    load = chosen(load, memory_gib)
    plan = plan_memory(load, memory_gib)
    return _is_held(plan, plan.peak, memory_gib) and not missing_cache(load, plan)


def _is_held(plan: MemoryPlan, gib: float, memory_gib: float) -> bool:
    return gib <= HEADROOM * memory_gib and plan.host <= HOST_GIB


def chosen(load: StageLoad, memory_gib: float | None) -> StageLoad:
    """The stage with a value for every setting of its training that is `auto`.

    In this order: copies on every machine, if a copy's states fit one; then the fastest of what
    fits while training: neither recomputation nor a reduction a micro-batch, the latter, the
    former, both.

    Args:
        load: The stage.
        memory_gib: Of each GPU; None on CPUs, where every setting has its plain value.
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
        if _is_held(plan, plan.training, memory_gib):
            return tried
    return _with(load, config)  # the one that takes the least, which is refused


def _with(load: StageLoad, config: TrainingConfig) -> StageLoad:
    assert load.training is not None
    return replace(load, training=replace(load.training, config=config))


def _with_copies(load: StageLoad, memory_gib: float) -> StageLoad:
    """HSDP with a copy a machine where that fits, else one copy."""
    assert load.training is not None
    config = load.training.config
    if "data_parallel_replicas" not in open_choices(config):
        return load
    found = 1
    machines = load.cluster.bundles_per_node
    data = config.data_parallel_size(load.cluster.num_workers)
    if len(machines) > 1 and len(set(machines)) == 1 and data % len(machines) == 0:
        frugal = {name: _FRUGAL[name] for name in open_choices(config) if name in _FRUGAL}
        tried = _with(load, config.replace(data_parallel_replicas=len(machines), **frugal))
        plan = plan_memory(tried, memory_gib)
        found = len(machines) if _is_held(plan, plan.peak, memory_gib) else 1
    return _with(load, config.replace(data_parallel_replicas=found))


def _candidates(load: StageLoad) -> Iterator[TrainingConfig]:
    """Sections without `auto`, the fastest first."""
    assert load.training is not None
    config = load.training.config
    layout = layout_of(config, load.cluster.num_workers)
    levels: dict[str, list[Any]] = {name: [CHOSEN_BY_PLAN[name]] for name in open_choices(config)}
    if "activation_checkpointing" in levels:
        levels["activation_checkpointing"] = [False, True]
    is_sent = layout.is_wrapped and layout.shards > 1
    is_exact = isinstance(config, DTensorTraining) and config.reduce_dtype == "float32"
    if "gradient_sync" in levels and is_sent and is_exact:
        levels["gradient_sync"] = ["last_microbatch", "every_microbatch"]
    # The last of the names changes fastest: recomputation costs more than a reduction.
    names = sorted(levels)
    for values in product(*(levels[name] for name in names)):
        yield config.replace(**dict(zip(names, values, strict=True)))


def resolved(before: TrainingConfig, after: TrainingConfig) -> dict[str, str]:
    """What was chosen, by path in a recipe, in the words of YAML."""
    return {f"training.{name}": str(getattr(after, name)).lower() for name in open_choices(before)}
