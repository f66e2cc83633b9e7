"""The smallest change of a recipe that fits its GPUs, found by search.

Each knob has levels in the order of what they cost: first what costs speed alone, then what needs
more GPUs, last what trains something else. Combinations of up to four are tried in the order of
their cost, each by the arithmetic that refused the recipe.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any

from pydantic import ValidationError

from nemo_rl_core.config.defaults import OWN_GPU_SHARE
from nemo_rl_core.config.generation import SplitEngine, VllmGenerationConfig
from nemo_rl_core.config.placement import OwnBundles
from nemo_rl_core.config.training import DTensorTraining, LoRAConfig
from nemo_rl_core.errors import ConfigError
from nemo_rl_core.planning.choices import fits
from nemo_rl_core.planning.load import SamplingLoad, ScorerLoad, StageLoad, TrainingLoad

_MOST_CHANGES, _MOST_TRIED = 4, 20_000
"""A recipe that needs more is another recipe. The second bounds the seconds of a search."""
_NODE = 8
_SHARES = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
_FACTORS = (2, 4, 8, 16)


@dataclass(frozen=True)
class Setting:
    """One key of a recipe with a new value.

    Attributes:
        path: Sections and key, with dots.
        value: As YAML has it.
    """

    path: str
    value: Any

    def __str__(self) -> str:
        shown = str(self.value).lower() if isinstance(self.value, bool) else self.value
        return f"{self.path}={shown}"


_Apply = Callable[[StageLoad], StageLoad]


@dataclass(frozen=True)
class _Level:
    """One position of a knob: what it costs, what it sets, and how."""

    cost: float
    settings: tuple[Setting, ...]
    apply: _Apply


def smallest_change(loads: Sequence[StageLoad], memory_gib: float) -> tuple[Setting, ...] | None:
    """The settings of least cost with which all stages fit; None if no known ones do.

    Args:
        loads: The stages of a recipe.
        memory_gib: Of each of its GPUs.
    """
    refused = [load for load in loads if not fits(load, memory_gib)]
    knobs = [levels for levels in _knobs(refused) if levels]
    choices = [
        chosen
        for number in range(1, _MOST_CHANGES + 1)
        for turned in combinations(knobs, number)
        for chosen in product(*turned)
    ]
    choices.sort(key=lambda chosen: sum(level.cost for level in chosen))
    for chosen in choices[:_MOST_TRIED]:
        changed = _applied(chosen, loads)
        if changed is not None and all(fits(load, memory_gib) for load in changed):
            return tuple(setting for level in chosen for setting in level.settings)
    return None


def _applied(chosen: Sequence[_Level], loads: Sequence[StageLoad]) -> list[StageLoad] | None:
    """The stages with all changes; None for changes that contradict one another."""
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
    """What may be changed for stages that do not fit."""
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
        setting = Setting("training.activation_checkpointing", True)
        yield [_Level(1, (setting,), _of_training(activation_checkpointing=True))]
    if getattr(config, "gradient_sync", None) == "last_microbatch":
        setting = Setting("training.gradient_sync", "every_microbatch")
        yield [_Level(0.5, (setting,), _of_training(gradient_sync="every_microbatch"))]
    if getattr(config, "offload_for_generation", None) == "none" and any(
        load.training and load.sampling and not load.has_own_engines for load in loads
    ):
        yield [
            _Level(
                cost,
                (Setting("training.offload_for_generation", part),),
                _of_training(offload_for_generation=part),
            )
            for part, cost in (("optimizer", 3.5), ("all", 5.5))
        ]
    for path in dict.fromkeys(load.training.path for load in loads if load.training):
        yield list(_smaller_microbatches(path, loads))


def _smaller_microbatches(path: str, loads: Sequence[StageLoad]) -> Iterator[_Level]:
    mine = [load for load in loads if load.training and load.training.path == path]
    longest = max(load.longest for load in mine)
    tokens = max(load.training.max_tokens_per_microbatch for load in mine if load.training)
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
        own = config.gpu_memory_utilization
        yield [
            _Level(
                1.2 + 5 * abs(share - own),
                (Setting(f"{path}.gpu_memory_utilization", share),),
                _of_engine(path, gpu_memory_utilization=share),
            )
            for share in _SHARES
            if share != own
        ]
    if isinstance(config, SplitEngine):
        yield list(_wider_engines(path, config, loads[0].cluster.num_workers))


def _shares_of_judge(scorer: ScorerLoad) -> Iterator[_Level]:
    own = scorer.share
    for share in _SHARES if own is not None else ():
        if share != own:
            setting = Setting(f"{scorer.path}.gpu_memory_utilization", share)
            cost = 1.1 + 5 * abs(share - (own or 0.0))
            yield _Level(cost, (setting,), _of_scorer(scorer.path, share=share))


def _own_gpus(scorer: ScorerLoad, load: StageLoad) -> Iterator[_Level]:
    """GPUs for what scores alone: one, or those over which a copy of a judge is spread."""
    path = f"{scorer.path}.placement.own"
    number = next((own.number for own in load.own_scorers if own.path == path), 1)
    copies = max(number // scorer.ranks, 1)
    for step, ranks in enumerate((1, 2, 4, 8)):
        if ranks == 1 and scorer.has_own_gpus:
            continue
        if ranks == 1 or (scorer.share is not None and ranks > scorer.ranks):
            own = OwnBundles(scorer.path, copies * ranks, ranks, path)
            yield _on_own_gpus(scorer, own, load, cost=14 + step)


def _on_own_gpus(scorer: ScorerLoad, own: OwnBundles, load: StageLoad, *, cost: float) -> _Level:
    """A judge then takes most of them, as in a recipe."""
    ranks = own.ranks_per_engine
    settings = [Setting(own.path, own.number)]
    settings += [Setting(f"{scorer.path}.tensor_parallel_size", ranks)] if ranks > 1 else []
    widened: dict[str, Any] = {}
    try:
        load.cluster.refuse_unplaced((*_without(load, own.path).own_bundles, own))
    except ConfigError:
        widened = {"shape": "cluster"}
        settings.insert(0, Setting("cluster.shape", "cluster"))
    share = scorer.share if scorer.has_own_gpus else scorer.share and OWN_GPU_SHARE
    place = _of_scorer(scorer.path, share=share, has_own_gpus=True, ranks=ranks)

    def apply(load: StageLoad) -> StageLoad:
        load = _of_cluster(widened)(load)
        if all(each.path != scorer.path for each in load.scorers):
            return load
        others = _without(place(load), own.path)
        return replace(others, own_scorers=(*others.own_scorers, own))

    return _Level(cost, tuple(settings), apply)


def _without(load: StageLoad, path: str) -> StageLoad:
    return replace(load, own_scorers=tuple(own for own in load.own_scorers if own.path != path))


def _of_scorer(path: str, **changes: Any) -> _Apply:
    def apply(load: StageLoad) -> StageLoad:
        changed = (replace(each, **changes) if each.path == path else each for each in load.scorers)
        return replace(load, scorers=tuple(changed))

    return apply


def _wider_engines(path: str, config: SplitEngine, num_workers: int) -> Iterator[_Level]:
    for step, factor in enumerate((2, 4, 8)):
        size = config.tensor_parallel_size * factor
        ranks = size * config.pipeline_parallel_size
        if config.num_own_bundles and size <= _NODE:
            yield _wider_own(path, config, ranks, size, 12 + step)
        elif size <= _NODE and ranks <= num_workers:
            engines = max(min(config.num_engines, num_workers // ranks), 1)
            settings = [Setting(f"{path}.tensor_parallel_size", size)]
            if engines != config.num_engines:
                settings.append(Setting(f"{path}.num_engines", engines))
            change = _of_engine(path, tensor_parallel_size=size, num_engines=engines)
            yield _Level(12 + step, tuple(settings), change)


def _wider_own(path: str, config: SplitEngine, ranks: int, size: int, cost: float) -> _Level:
    """As many engines as before on more GPUs of their own."""
    own = config.num_engines * ranks
    settings = (
        Setting(f"{path}.tensor_parallel_size", size),
        Setting(f"{path}.placement.own", own),
    )
    return _Level(
        cost, settings, _of_engine(path, tensor_parallel_size=size, placement={"own": own})
    )


def _more_ranks(loads: Sequence[StageLoad]) -> list[_Level]:
    cluster = loads[0].cluster
    num_own = max(sum(own.number for own in load.own_bundles) for load in loads)
    levels = []
    for step, factor in enumerate(_FACTORS):
        num_workers = cluster.num_workers * factor
        settings = [Setting("cluster.num_workers", num_workers)]
        values: dict[str, Any] = {"num_workers": num_workers}
        room = {"one_gpu": 1, "node_8gpu": _NODE}.get(cluster.shape, num_workers + num_own)
        if num_workers + num_own > room:
            values["shape"] = "cluster"
            settings.insert(0, Setting("cluster.shape", "cluster"))
        levels.append(_Level(20 + 8 * step, tuple(settings), _of_cluster(values)))
    return levels


def _last_resorts(config: DTensorTraining) -> list[_Level]:
    levels = []
    if not config.cpu_offload:
        setting = Setting("training.cpu_offload", True)
        levels.append(_Level(16, (setting,), _of_training(cpu_offload=True)))
    if config.lora is None and config.tensor_parallel_size == 1:
        setting = Setting("training.lora", {})
        levels.append(_Level(60, (setting,), _of_training(lora=LoRAConfig().model_dump())))
    return levels


def _of_training(**changes: Any) -> _Apply:
    def apply(load: StageLoad) -> StageLoad:
        if load.training is None:
            return load
        config = load.training.config.replace(**changes)
        return replace(load, training=replace(load.training, config=config))

    return apply


def _of_engine(path: str, **changes: Any) -> _Apply:
    def apply(load: StageLoad) -> StageLoad:
        sampling = load.sampling
        if sampling is None or sampling.path != path:
            return load
        config = sampling.config.replace(**changes)
        changed: SamplingLoad = replace(sampling, config=config)
        return replace(load, sampling=changed)

    return apply


def _of_cluster(changes: dict[str, Any]) -> _Apply:
    return lambda load: replace(load, cluster=load.cluster.replace(**changes))
