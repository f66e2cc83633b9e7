"""Formats a plan as a table, and as a mapping for JSON."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from tasks.planning.gpu_hours import over_budget
from tasks.planning.gpu_plan import RecipePlan, StagePlan, fix_of
from tasks.planning.weights_pod import pod_problems

_PARTS = (
    "weights",
    "gradients",
    "moments",
    "reference",
    "critic",
    "whole gradients",
    "gathered weights",
    "gathered gradients",
    "activations",
    "logits",
    "transfer",
    "engine weights",
    "engine workspace",
    "KV cache",
    "scorer",
    "scorer on its own",
    "contexts",
)
_Figure = Callable[[StagePlan], float | None]


def as_mapping(plan: RecipePlan) -> dict[str, Any]:
    """Returns the plan as a mapping for JSON."""
    return {
        "accelerator": asdict(plan.gpu),
        "stages": [
            {
                "name": stage.load.name,
                "num_parameters": stage.load.sizes.num_parameters,
                "choices": dict(stage.choices),
                "gib": dict(stage.memory.parts),
                "training_gib": stage.memory.training,
                "sampling_gib": stage.memory.sampling,
                "scoring_gib": stage.memory.scoring,
                "kv_cache_tokens": stage.memory.kv_tokens,
                "speed": asdict(stage.speed) if stage.speed else None,
            }
            for stage in plan.stages
        ],
        "gpu_hours": plan.gpu_hours,
        "over_budget": over_budget(plan),
        "is_exact": plan.is_exact,
        "unplanned": list(plan.unplanned),
        "never_run": plan.untried,
        "fits": not plan.problems,
        "problems": list(plan.problems),
        "pod_problems": pod_problems(plan),
        "change": None
        if plan.change is None
        else {setting.path: setting.value for setting in plan.change},
    }


def as_table(plan: RecipePlan) -> str:
    """Returns the plan as text."""
    if not plan.stages:
        return "no stage of this recipe computes on a GPU"
    lines = [_heading(plan), "", *_rows(plan), "", *_choices(plan)]
    if plan.estimates:
        lines.append(f"activations are an estimate for {', '.join(plan.estimates)}")
    if plan.unplanned:
        lines.append(f"not counted: {', '.join(plan.unplanned)}")
    if plan.untried:
        lines.append(f"never run so far: {', '.join(plan.untried)}")
    lines += _hours(plan)
    pods = pod_problems(plan)
    if plan.problems:
        lines += [*plan.problems, fix_of(plan.change)]
    else:
        lines.append("fits the GPUs" if pods else "fits")
    lines += pods
    return "\n".join(lines)


def _hours(plan: RecipePlan) -> Iterator[str]:
    if hours := plan.gpu_hours:
        parts = ", ".join(f"{name} {value:,.1f}" for name, value in hours.items())
        bound = "" if plan.has_mean_length else "at most "
        yield f"GPU-hours of training: {bound}{sum(hours.values()):,.1f} ({parts})"
    if problem := over_budget(plan):
        yield f"over the budget: {problem}"


def _heading(plan: RecipePlan) -> str:
    load = plan.stages[0].load
    count = max(stage.load.num_gpus for stage in plan.stages)
    return (
        f"{load.sizes.model_type}, {load.sizes.num_parameters / 1e9:.2f} B parameters, {load.dtype}"
        f" on {count} x {plan.gpu.name} of {plan.gpu.memory_gib:.1f} GiB"
    )


def _choices(plan: RecipePlan) -> Iterator[str]:
    for stage in plan.stages:
        if stage.choices:
            settings = ", ".join(f"{path} {value}" for path, value in stage.choices.items())
            yield f"chosen for {stage.load.name}: {settings}"


def _rows(plan: RecipePlan) -> Iterator[str]:
    names = [stage.load.name for stage in plan.stages]
    yield _line("GiB per GPU", names)
    for part in _PARTS:
        yield from _row(plan, part, lambda stage, part=part: stage.memory.parts.get(part), ".1f")  # type: ignore[misc]
    yield from _row(plan, "peak while training", lambda stage: stage.memory.training or None, ".1f")
    yield from _row(plan, "peak while sampling", lambda stage: stage.memory.sampling or None, ".1f")
    yield from _row(plan, "peak while scoring", lambda stage: stage.memory.scoring or None, ".1f")
    yield ""
    yield _line("expected", names)
    yield from _row(plan, "tokens in the KV cache", lambda stage: stage.memory.kv_tokens or None)
    yield from _row(plan, "trained tokens/s", _speed("trained"))
    yield from _row(plan, "MFU, %", _percent)
    yield from _row(plan, "scored tokens/s", _speed("scored"))
    yield from _row(plan, "sampled tokens/s", _speed("sampled"))
    is_mean = any(stage.load.mean_length < stage.load.longest for stage in plan.stages)
    heading = "seconds/step" if is_mean else "seconds/step, at most"
    yield from _row(plan, heading, _step, ".0f")
    yield from _row(plan, "of them rollouts", _rollouts, ".0f")
    for stage in plan.stages:
        if stage.speed and (transfer := stage.speed.transfer):
            yield (
                f"weights to the engine: {transfer.seconds:.1f} s by {transfer.transport}; goal "
                f"{transfer.goal_seconds:.1f} s, bound of the links {transfer.least_seconds:.2f} s"
            )


def _percent(stage: StagePlan) -> float | None:
    share = stage.speed.utilization if stage.speed else None
    return None if share is None else 100 * share


def _step(stage: StagePlan) -> float | None:
    is_trained = stage.load.training is not None
    return stage.speed.step_seconds if stage.speed and is_trained else None


def _rollouts(stage: StagePlan) -> float | None:
    is_step = stage.load.training is not None and stage.load.sampling is not None
    return stage.speed.rollout_seconds if stage.speed and is_step else None


def _speed(name: str) -> _Figure:
    return lambda stage: getattr(stage.speed, name) if stage.speed else None


def _row(plan: RecipePlan, name: str, figure: _Figure, form: str = ",.0f") -> Iterator[str]:
    """Yields a line, unless no stage has the figure."""
    figures = [figure(stage) for stage in plan.stages]
    if any(value is not None for value in figures):
        yield _line(name, ["" if value is None else format(value, form) for value in figures])


def _line(name: str, values: Sequence[str]) -> str:
    return f"{name:<24}" + "".join(f"{value:>20}" for value in values).rstrip()
