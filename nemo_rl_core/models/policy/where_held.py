"""What a policy's ranks do with rows that lie elsewhere: they read their own, and keep results.

The functions run in the workers, with the rank's backend as their first argument.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.distributed.held_rows import Block, HeldRows, as_block, from_block
from nemo_rl_core.distributed.packing.ranks import Shards
from nemo_rl_core.models.columns import training_columns

T = TypeVar("T")


def sent(shards: Shards) -> list[Block]:
    """The ranks' rows as they are sent: to pickle small tensors takes long, arrays not."""
    return [as_block(shard.data) for shard in shards]


def _read(batch: Block) -> BatchedDataDict:
    """A rank's rows with the values of all columns that training reads."""
    return training_columns(BatchedDataDict(from_block(batch)).fetched())


def compute(
    backend: Any, *, batch: Block, what: str, names: Sequence[str], **options: Any
) -> tuple[None, Block]:
    """A method of the backend that returns a tensor, or several, of the rows."""
    found = getattr(backend, what)(batch=_read(batch), **options)
    return None, as_block(dict(zip(names, found if len(names) > 1 else (found,), strict=True)))


def train_step(backend: Any, *, batch: Block, **options: Any) -> Any:
    """An optimizer step."""
    return backend.train_step(batch=_read(batch), **options)


def forward_backward(backend: Any, *, batch: Block, **options: Any) -> tuple[dict[str, Any], Block]:
    """Gradients; the metrics, and the logprobs of the forward pass."""
    columns = _read(batch)
    metrics, logprobs = backend.forward_backward(batch=columns, **options)
    return metrics, as_block({"logprobs": logprobs})


def evaluate(_: Any, *, batch: Block, function: Callable[[BatchedDataDict], T]) -> T:
    """Any function of the rows."""
    return function(_read(batch))


def joined(references: Sequence[Any], shards: Shards, name: str) -> HeldRows:
    """One column of what the ranks have computed of their shards, in the order of the batch.

    Args:
        references: Of the ranks' blocks.
        shards: Their rows.
        name: Of the column in the blocks.
    """
    sizes = [len(indices) for indices in shards.indices]
    return HeldRows.of_blocks(references, sizes).reordered(shards.order).of_column(name)
