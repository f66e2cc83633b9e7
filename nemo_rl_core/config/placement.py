"""Where engines and models that score run: on the trainer's bundles, or on bundles of their own."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat, zip_longest
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, PositiveInt, Tag

from nemo_rl_core.config.base import FrozenConfig


class OwnPlacement(FrozenConfig):
    """Workers beside the trainer, on GPUs or processes that it does not use.

    Attributes:
        own: Bundles that nothing else uses, a GPU each, or without GPUs a process each. Of engines:
            their number times the workers of one; where `num_engines` is left out, there are as
            many engines as they hold. Of a judge or a reward model: the copies that share what is
            to be scored.
    """

    own: PositiveInt


def _kind_of_placement(value: Any) -> str:
    return "own" if isinstance(value, dict | OwnPlacement) else "colocated"


def _refuse_other_words(value: Any) -> Any:
    if value != "colocated":
        raise ValueError("expected colocated, or {own: 4} for four GPUs of their own")
    return value


Placement = Annotated[
    Annotated[Literal["colocated"], BeforeValidator(_refuse_other_words), Tag("colocated")]
    | Annotated[OwnPlacement, Tag("own")],
    Discriminator(_kind_of_placement),
]


@dataclass(frozen=True)
class OwnBundles:
    """Bundles that one group of workers has for itself.

    Attributes:
        name: Of the workers.
        number: How many.
        ranks_per_engine: Bundles that stay on one machine, where one holds as many.
        path: Of the setting in a recipe.
    """

    name: str
    number: int
    ranks_per_engine: int = 1
    path: str = field(default="", compare=False)


def own_bundles(
    placement: Placement, name: str, path: str, *, ranks_per_engine: int = 1
) -> tuple[OwnBundles, ...]:
    """The bundles of a placement; none where it is colocated.

    Args:
        placement: The setting.
        name: Of the workers.
        path: Of the section in a recipe.
        ranks_per_engine: Bundles that stay on one machine.

    Example:
        >>> [each.path for each in own_bundles(OwnPlacement(own=2), "judge", "environment.judge")]
        ['environment.judge.placement.own']
    """
    if not isinstance(placement, OwnPlacement):
        return ()
    return (OwnBundles(name, placement.own, ranks_per_engine, f"{path}.placement.own"),)


def own_bundles_per_node(
    taken: Sequence[int], own: OwnBundles, *, num_gpus_per_node: int | None
) -> list[int]:
    """Own bundles on each machine, in the order of the machines that others use.

    They fill what the others leave of their machines, and further machines then. The ranks of an
    engine stay on one machine where a machine holds as many.

    Args:
        taken: The others' bundles on each machine: the trainer's, and those placed before.
        own: What to place.
        num_gpus_per_node: Bundles of a machine; None for one machine that holds any number.

    Returns:
        One number a machine, 0 where the others have it for themselves.

    Example:
        >>> own_bundles_per_node([8, 4], OwnBundles("generation", 12), num_gpus_per_node=8)
        [0, 4, 8]
        >>> own_bundles_per_node([8, 5], OwnBundles("generation", 4, 4), num_gpus_per_node=8)
        [0, 0, 4]
    """
    if num_gpus_per_node is None:
        return [own.number]
    ranks = own.ranks_per_engine
    together = ranks if ranks <= num_gpus_per_node else 1
    rooms = chain((max(num_gpus_per_node - each, 0) for each in taken), repeat(num_gpus_per_node))
    found: list[int] = []
    while sum(found) < own.number or len(found) < len(taken):
        found.append(min(own.number - sum(found), next(rooms) // together * together))
    return found


def with_own_bundles(
    taken: Sequence[int], own: Iterable[OwnBundles], *, num_gpus_per_node: int | None
) -> list[int]:
    """Bundles on each machine, the trainer's and all that are placed after them, in this order.

    Args:
        taken: The trainer's bundles on each machine.
        own: What to place.
        num_gpus_per_node: Bundles of a machine; None for one machine that holds any number.

    Example:
        >>> engine, judge = OwnBundles("generation", 4, ranks_per_engine=4), OwnBundles("judge", 4)
        >>> with_own_bundles([8, 5], [engine, judge], num_gpus_per_node=8)
        [8, 8, 5]
    """
    found = list(taken)
    for each in own:
        placed = own_bundles_per_node(found, each, num_gpus_per_node=num_gpus_per_node)
        found = [mine + theirs for mine, theirs in zip_longest(found, placed, fillvalue=0)]
    return found
