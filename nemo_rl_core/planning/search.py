"""Searches for the smallest change of a recipe that fits its GPUs.

Knobs that only cost speed are tried first, then those that need more GPUs, last those that change
what is trained.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any

from pydantic import ValidationError

from nemo_rl_core.config.defaults import OWN_GPU_SHARE
from nemo_rl_core.config.generation import SplitEngine, VllmGenerationConfig
from nemo_rl_core.config.placement import DedicatedBundles
from nemo_rl_core.config.training import DTensorTraining, LoRAConfig
from nemo_rl_core.errors import ConfigError
from nemo_rl_core.planning.choices import fits
from nemo_rl_core.planning.load import SamplingLoad, ScorerLoad, StageLoad, TrainingLoad

_MAX_CHANGES, _MAX_TRIES = 4, 20_000
"""More changes would make a different recipe; the second limit bounds the search's duration."""
_NODE = 8
_SHARES = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
_FACTORS = (2, 4, 8, 16)


@dataclass(frozen=True)
class Setting:
    """One key of a recipe with a new value."""

    path: str
    value: Any

    def __str__(self) -> str:
        shown = str(self.value).lower() if isinstance(self.value, bool) else self.value
        return f"{self.path}={shown}"


_Apply = Callable[[StageLoad], StageLoad]


@dataclass(frozen=True)
class _Level:
    """One level of a knob: its cost, its settings, and a function that applies them."""

    cost: float
    settings: tuple[Setting, ...]
    apply: _Apply


def smallest_change(loads: Sequence[StageLoad], memory_gib: float) -> tuple[Setting, ...] | None:
    """Returns the cheapest settings with which all stages fit, else None."""
    refused = [load for load in loads if not fits(load, memory_gib)]
    knobs = [levels for levels in _knobs(refused) if levels]
    choices = [
        chosen
        for number in range(1, _MAX_CHANGES + 1)
        for turned in combinations(knobs, number)
        for chosen in product(*turned)
    ]
    choices.sort(key=lambda chosen: sum(level.cost for level in chosen))
    for chosen in choices[:_MAX_TRIES]:
        changed = _applied(chosen, loads)
        if changed is not None and all(fits(load, memory_gib) for load in changed):
            return tuple(setting for level in chosen for setting in level.settings)
    return None


def _applied(chosen: Sequence[_Level], loads: Sequence[StageLoad]) -> list[StageLoad] | None:
    """Applies changes to the stages; None if the changes contradict each other."""
    changed = []
    try:
        for load in loads:
            for level in chosen:
                load = level.apply(load)  # noqa: PLW2901
            changed.append(load)
    except (ConfigError, ValidationError):
        return None
    return changed


def _knobs(loads: Sequence[StageLoad]) -> Iterator[list[_Level]]:
    training = next((load.training for load in loads if load.training), None)
    if training is not None:
        yield from _training_knobs(training, loads)
    for path in dict.fromkeys(load.sampling.path for load in loads if load.sampling):
        yield from _engine_knobs(path, loads)
    scorers = {each.path: (each, load) for load in loads for each in load.scorers}
    for scorer, load in scorers.values():
        yield [*_shares_of_judge(scorer), *_own_gpus(scorer, load)]
    yield _more_ranks(loads) if loads else []
    if training is not None and isinstance(training.config, DTensorTraining):
        yield _last_resorts(training.config)


def _training_knobs(training: TrainingLoad, loads: Sequence[StageLoad]) -> Iterator[list[_Level]]:
    config = training.config
    if getattr(config, "activation_checkpointing", None) is False:
        yield [_training_level(1, "activation_checkpointing", True)]
    if getattr(config, "gradient_sync", None) == "last_microbatch":
        yield [_training_level(0.5, "gradient_sync", "every_microbatch")]
    if getattr(config, "offload_for_generation", None) == "none" and any(
        load.training and load.sampling and not load.has_own_engines for load in loads
    ):
        yield [
            _training_level(cost, "offload_for_generation", part)
            for part, cost in (("optimizer", 3.5), ("all", 5.5))
        ]
    for path in dict.fromkeys(load.training.path for load in loads if load.training):
        yield list(_smaller_microbatches(path, loads))


def _smaller_microbatches(path: str, loads: Sequence[StageLoad]) -> Iterator[_Level]:
    affected = [load for load in loads if load.training and load.training.path == path]
    longest = max(load.longest for load in affected)
    tokens = max(load.training.max_tokens_per_microbatch for load in affected if load.training)
    for halvings in (1, 2, 3):
        smaller = tokens >> halvings
        if smaller >= longest:
            yield _Level(2 * halvings, (Setting(path, smaller),), _microbatch(path, smaller))


def _microbatch(path: str, tokens: int) -> _Apply:
    def apply(load: StageLoad) -> StageLoad:
        if load.training is None or load.training.path != path:
            return load
        return replace(load, training=replace(load.training, max_tokens_per_microbatch=tokens))

    return apply


def _engine_knobs(path: str, loads: Sequence[StageLoad]) -> Iterator[list[_Level]]:
    sampling = next(s for load in loads if (s := load.sampling) is not None and s.path == path)
    config = sampling.config
    if isinstance(config, VllmGenerationConfig):
        current = config.gpu_memory_utilization
        yield [
            _Level(
                1.2 + 5 * abs(share - current),
                (Setting(f"{path}.gpu_memory_utilization", share),),
                _change_engine(path, gpu_memory_utilization=share),
            )
            for share in _SHARES
            if share != current
        ]
    if isinstance(config, SplitEngine):
        yield list(_wider_engines(path, config, loads[0].cluster.num_workers))


def _shares_of_judge(scorer: ScorerLoad) -> Iterator[_Level]:
    current = scorer.share
    for share in _SHARES if current is not None else ():
        if share != current:
            setting = Setting(f"{scorer.path}.gpu_memory_utilization", share)
            cost = 1.1 + 5 * abs(share - (current or 0.0))
            yield _Level(cost, (setting,), _change_scorer(scorer.path, share=share))


def _own_gpus(scorer: ScorerLoad, load: StageLoad) -> Iterator[_Level]:
    """Yields levels with dedicated GPUs for a scorer: one, or several per copy of a judge."""
    path = f"{scorer.path}.placement.own"
    number = next((own.number for own in load.own_scorers if own.path == path), 1)
    copies = max(number // scorer.ranks, 1)
    for step, ranks in enumerate((1, 2, 4, 8)):
        if ranks == 1 and scorer.has_own_gpus:
            continue
        if ranks == 1 or (scorer.share is not None and ranks > scorer.ranks):
            bundles = DedicatedBundles(scorer.path, copies * ranks, ranks, path)
            yield _on_own_gpus(scorer, bundles, load, cost=14 + step)


def _on_own_gpus(
    scorer: ScorerLoad, bundles: DedicatedBundles, load: StageLoad, *, cost: float
) -> _Level:
    """Gives a scorer dedicated GPUs; a judge gets a recipe's default memory fraction there."""
    ranks = bundles.ranks_per_engine
    settings = [Setting(bundles.path, bundles.number)]
    settings += [Setting(f"{scorer.path}.tensor_parallel_size", ranks)] if ranks > 1 else []
    widened: dict[str, Any] = {}
    try:
        load.cluster.refuse_unplaced((*_without(load, bundles.path).dedicated_bundles, bundles))
    except ConfigError:
        widened = {"shape": "cluster"}
        settings.insert(0, Setting("cluster.shape", "cluster"))
    share = scorer.share if scorer.has_own_gpus else scorer.share and OWN_GPU_SHARE
    change = _change_scorer(scorer.path, share=share, has_own_gpus=True, ranks=ranks)

    def apply(load: StageLoad) -> StageLoad:
        load = _change_cluster(widened)(load)
        if all(each.path != scorer.path for each in load.scorers):
            return load
        others = _without(change(load), bundles.path)
        return replace(others, own_scorers=(*others.own_scorers, bundles))

    return _Level(cost, tuple(settings), apply)


def _without(load: StageLoad, path: str) -> StageLoad:
    return replace(load, own_scorers=tuple(own for own in load.own_scorers if own.path != path))


def _change_scorer(path: str, **changes: Any) -> _Apply:
    def apply(load: StageLoad) -> StageLoad:
        changed = (replace(each, **changes) if each.path == path else each for each in load.scorers)
        return replace(load, scorers=tuple(changed))

    return apply


def _wider_engines(path: str, config: SplitEngine, num_workers: int) -> Iterator[_Level]:
    for step, factor in enumerate((2, 4, 8)):
        size = config.tensor_parallel_size * factor
        ranks = size * config.pipeline_parallel_size
        if config.num_dedicated_bundles and size <= _NODE:
            yield _wider_own(path, config, ranks, size, 12 + step)
        elif size <= _NODE and ranks <= num_workers:
            engines = max(min(config.num_engines, num_workers // ranks), 1)
            settings = [Setting(f"{path}.tensor_parallel_size", size)]
            if engines != config.num_engines:
                settings.append(Setting(f"{path}.num_engines", engines))
            change = _change_engine(path, tensor_parallel_size=size, num_engines=engines)
            yield _Level(12 + step, tuple(settings), change)


def _wider_own(path: str, config: SplitEngine, ranks: int, size: int, cost: float) -> _Level:
    num_gpus = config.num_engines * ranks
    settings = (
        Setting(f"{path}.tensor_parallel_size", size),
        Setting(f"{path}.placement.own", num_gpus),
    )
    return _Level(
        cost, settings, _change_engine(path, tensor_parallel_size=size, placement={"own": num_gpus})
    )


def _more_ranks(loads: Sequence[StageLoad]) -> list[_Level]:
    cluster = loads[0].cluster
    num_own = max(sum(own.number for own in load.dedicated_bundles) for load in loads)
    levels = []
    for step, factor in enumerate(_FACTORS):
        num_workers = cluster.num_workers * factor
        settings = [Setting("cluster.num_workers", num_workers)]
        values: dict[str, Any] = {"num_workers": num_workers}
        room = {"one_gpu": 1, "node_8gpu": _NODE}.get(cluster.shape, num_workers + num_own)
        if num_workers + num_own > room:
            values["shape"] = "cluster"
            settings.insert(0, Setting("cluster.shape", "cluster"))
        levels.append(_Level(20 + 8 * step, tuple(settings), _change_cluster(values)))
    return levels


def _last_resorts(config: DTensorTraining) -> list[_Level]:
    levels = []
    if not config.cpu_offload:
        levels.append(_training_level(16, "cpu_offload", True))
    if config.lora is None and config.tensor_parallel_size == 1:
        setting = Setting("training.lora", {})
        levels.append(_Level(60, (setting,), _change_training(lora=LoRAConfig().model_dump())))
    return levels


def _training_level(cost: float, name: str, value: Any) -> _Level:
    return _Level(cost, (Setting(f"training.{name}", value),), _change_training(**{name: value}))


def _change_training(**changes: Any) -> _Apply:
    def apply(load: StageLoad) -> StageLoad:
        if load.training is None:
            return load
        config = load.training.config.replace(**changes)
        return replace(load, training=replace(load.training, config=config))

    return apply


def _change_engine(path: str, **changes: Any) -> _Apply:
    def apply(load: StageLoad) -> StageLoad:
        sampling = load.sampling
        if sampling is None or sampling.path != path:
            return load
        config = sampling.config.replace(**changes)
        changed: SamplingLoad = replace(sampling, config=config)
        return replace(load, sampling=changed)

    return apply


def _change_cluster(changes: dict[str, Any]) -> _Apply:
    return lambda load: replace(load, cluster=load.cluster.replace(**changes))
