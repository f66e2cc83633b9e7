"""Placement of engines and scorers: on the trainer's bundles, or on dedicated bundles."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat, zip_longest
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, PositiveInt, Tag

from nemo_rl_core.config.base import FrozenConfig


class OwnPlacement(FrozenConfig):
    """Dedicated GPUs or processes, which the trainer does not use.

    Attributes:
        own: Number of dedicated bundles, each with one GPU, or without GPUs one process. For
            engines it is the number of engines times the workers of one; without `num_engines`,
            there are as many engines as fit. For a judge or a reward model it is the number of
            copies, which share the work.
    """

    own: PositiveInt


def _kind_of_placement(value: Any) -> str:
    return "own" if isinstance(value, dict | OwnPlacement) else "colocated"


def _refuse_other_words(value: Any) -> Any:
    if value != "colocated":
        raise ValueError("expected colocated, or {own: 4} for four dedicated GPUs")
    return value


Placement = Annotated[
    Annotated[Literal["colocated"], BeforeValidator(_refuse_other_words), Tag("colocated")]
    | Annotated[OwnPlacement, Tag("own")],
    Discriminator(_kind_of_placement),
]


@dataclass(frozen=True)
class DedicatedBundles:
    """Bundles that are dedicated to one group of workers.

    Attributes:
        ranks_per_engine: Number of bundles that stay on one machine if it has as many.
    """

    name: str
    number: int
    ranks_per_engine: int = 1
    path: str = field(default="", compare=False)


def dedicated_bundles(
    placement: Placement, name: str, path: str, *, ranks_per_engine: int = 1
) -> tuple[DedicatedBundles, ...]:
    """Returns the dedicated bundles of a placement; empty if it is colocated.

    Example:
        >>> [each.path for each in dedicated_bundles(OwnPlacement(own=2), "judge", "judge")]
        ['judge.placement.own']
    """
    if not isinstance(placement, OwnPlacement):
        return ()
    return (DedicatedBundles(name, placement.own, ranks_per_engine, f"{path}.placement.own"),)


def dedicated_bundles_per_node(
    taken: Sequence[int], bundles: DedicatedBundles, *, num_gpus_per_node: int | None
) -> list[int]:
    """Returns the number of dedicated bundles on each machine.

    They fill the free bundles of used machines first, then further machines. The ranks of an engine
    stay on one machine if it has as many bundles.

    Args:
        num_gpus_per_node: Bundles per machine; None for one machine with any number.

    Example:
        >>> engine = DedicatedBundles("generation", 12)
        >>> dedicated_bundles_per_node([8, 4], engine, num_gpus_per_node=8)
        [0, 4, 8]
        >>> engine = DedicatedBundles("generation", 4, ranks_per_engine=4)
        >>> dedicated_bundles_per_node([8, 5], engine, num_gpus_per_node=8)
        [0, 0, 4]
    """
    if num_gpus_per_node is None:
        return [bundles.number]
    ranks = bundles.ranks_per_engine
    ranks_together = ranks if ranks <= num_gpus_per_node else 1
    free_gpus = chain(
        (max(num_gpus_per_node - each, 0) for each in taken), repeat(num_gpus_per_node)
    )
    counts: list[int] = []
    while sum(counts) < bundles.number or len(counts) < len(taken):
        counts.append(
            min(bundles.number - sum(counts), next(free_gpus) // ranks_together * ranks_together)
        )
    return counts


def with_dedicated_bundles(
    taken: Sequence[int], bundles: Iterable[DedicatedBundles], *, num_gpus_per_node: int | None
) -> list[int]:
    """Returns the number of bundles on each machine: the trainer's plus all dedicated ones.

    Example:
        >>> engine = DedicatedBundles("generation", 4, ranks_per_engine=4)
        >>> judge = DedicatedBundles("judge", 4)
        >>> with_dedicated_bundles([8, 5], [engine, judge], num_gpus_per_node=8)
        [8, 8, 5]
    """
    counts = list(taken)
    for each in bundles:
        added = dedicated_bundles_per_node(counts, each, num_gpus_per_node=num_gpus_per_node)
        counts = [used + new for used, new in zip_longest(counts, added, fillvalue=0)]
    return counts
