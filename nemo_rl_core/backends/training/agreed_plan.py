"""A plan of micro-batches that no data rank carries out unless all have one."""

from collections.abc import Callable

from nemo_rl_core.distributed.packing.plan import Microbatch
from nemo_rl_core.errors import DataError

_REFUSED = 2**62


def agreed_plan(
    plan: Callable[[], list[Microbatch]], largest: Callable[[int], int]
) -> tuple[list[Microbatch], int]:
    """This rank's micro-batches, and the largest number on any data rank.

    Args:
        plan: Returns those of this rank's rows.
        largest: Returns the largest of the numbers that the data ranks pass; a collective.

    Raises:
        DataError: If the rows of any data rank do not fit; on all ranks, since the others would
            wait.
    """
    try:
        microbatches = plan()
    except DataError:
        largest(_REFUSED)
        raise
    most = largest(len(microbatches))
    if most == _REFUSED:
        raise DataError(
            "the rows of another data rank do not fit into its micro-batches",
            fix="see that rank's message",
        )
    return microbatches, most
