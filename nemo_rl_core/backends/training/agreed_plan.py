"""Agreement of the data ranks on their plans of micro-batches."""

from collections.abc import Callable

from nemo_rl_core.distributed.packing.plan import Microbatch
from nemo_rl_core.errors import DataError

_REFUSED = 2**62


def agreed_plan(
    plan: Callable[[], list[Microbatch]], largest: Callable[[int], int]
) -> tuple[list[Microbatch], int]:
    """Returns this rank's micro-batches and the largest number of them on any data rank.

    Raises `DataError` on all ranks if the rows of one do not fit, since the others would wait.
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
