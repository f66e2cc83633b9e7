"""Batches: columns with one row per sequence, whose values are local or remote.

A block is the output of one worker: columns of its rows, as arrays. It stays in Ray's object store,
on the worker's machine, until no row refers to it. Code that computes on rows reads them with
`fetched`. Selecting rows, or joining those of several workers, reads nothing.
"""

from collections import UserDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from nemo_rl_core.distributed.host_copy import move_together
from nemo_rl_core.distributed.packing.plan import Microbatch
from nemo_rl_core.errors import MissingColumnError

Block = Mapping[str, Any]
"""Columns of equal length: arrays whose first dimension is the rows, or lists."""


@dataclass(frozen=True)
class InProcess:
    """A reference to a block in this process."""

    block: Block


class RemoteRow(NamedTuple):
    """A row of a block: the reference to the block, and the index of the row in it."""

    reference: Any
    number: int


def as_block(columns: Mapping[str, Any]) -> Block:
    """Returns columns as arrays, which processes of one machine share without copying."""
    return {
        name: value.detach().numpy() if isinstance(value, torch.Tensor) else value
        for name, value in columns.items()
    }


def from_block(block: Block) -> dict[str, Any]:
    """Returns columns as tensors; arrays are copied, since those of the store are read-only."""
    return {
        name: torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else value
        for name, value in block.items()
    }


def read_blocks(references: Sequence[Any]) -> list[Block]:
    """Returns the blocks of references, in order."""
    others = [each for each in references if not isinstance(each, InProcess)]
    fetched = iter(())
    if others:
        import ray

        fetched = iter(ray.get(others))
    return [each.block if isinstance(each, InProcess) else next(fetched) for each in references]


@dataclass(frozen=True, eq=False)
class RemoteRows:
    """`B` rows of remote blocks; in a batch, one column that replaces all columns of the blocks.

    Attributes:
        block: `[B]` int, the index of each row's block.
        row: `[B]` int, the index of each row in its block.
        column: Name of a single column of the blocks; None for all columns.

    Example:
        >>> first = InProcess({"x": np.array([[1, 2], [3, 4]])})
        >>> second = InProcess({"x": np.array([[5]])})
        >>> rows = RemoteRows.of_blocks([first, second], [2, 1])[[2, 0]]
        >>> rows.fetched()["x"]
        tensor([[5, 0],
                [1, 2]])
    """

    references: tuple[Any, ...]
    block: np.ndarray[Any, np.dtype[np.int64]]
    row: np.ndarray[Any, np.dtype[np.int64]]
    column: str | None = None

    @classmethod
    def of_blocks(
        cls, references: Sequence[Any], sizes: "Sequence[int] | np.ndarray[Any, np.dtype[np.int64]]"
    ) -> Self:
        """Returns all rows of the blocks, in order."""
        counts = np.asarray(sizes, np.int64)
        block = np.repeat(np.arange(len(counts)), counts)
        starts = np.cumsum(counts) - counts
        return cls(tuple(references), block, np.arange(len(block)) - starts[block])

    @classmethod
    def of_each(cls, rows: Sequence[RemoteRow]) -> Self:
        """Returns single rows, in order."""
        blocks = {id(each.reference): each.reference for each in rows}
        indices = dict(zip(blocks, range(len(blocks)), strict=True))
        block = np.array([indices[id(each.reference)] for each in rows], np.int64)
        return cls(
            tuple(blocks.values()), block, np.array([each.number for each in rows], np.int64)
        )

    def each(self) -> list[RemoteRow]:
        """Returns the rows one by one, in the form of `of_each`."""
        rows = zip(self.block.tolist(), self.row.tolist(), strict=True)
        return [RemoteRow(self.references[block], number) for block, number in rows]

    @classmethod
    def concatenated(cls, parts: "Sequence[RemoteRows]") -> "RemoteRows":
        """Concatenates rows of the same columns."""
        counts = [len(part.references) for part in parts]
        starts = np.cumsum(counts) - counts
        return cls(
            tuple(reference for part in parts for reference in part.references),
            np.concatenate([part.block + start for part, start in zip(parts, starts, strict=True)]),
            np.concatenate([part.row for part in parts]),
            parts[0].column,
        )

    def __len__(self) -> int:
        return len(self.row)

    def __getitem__(self, rows: "slice | np.ndarray[Any, np.dtype[np.int64]]") -> "RemoteRows":
        """Returns the rows of a slice, or at indices; nothing is read."""
        return RemoteRows(self.references, self.block[rows], self.row[rows], self.column)

    def reordered(self, order: "np.ndarray[Any, np.dtype[np.int64]]") -> "RemoteRows":
        """Moves row `i` to index `order[i]`, like `BatchedDataDict.reorder_data`."""
        rows = np.empty(len(order), np.int64)
        rows[order] = np.arange(len(order))
        return replace(self, block=self.block[rows], row=self.row[rows])

    def of_column(self, column: str) -> "RemoteRows":
        """Returns the same rows with only one column."""
        return replace(self, column=column)

    def compact(self) -> "RemoteRows":
        """Drops references to blocks without any of the rows.

        Without rows, one reference is kept, since it determines the columns.
        """
        if not len(self):
            return replace(self, references=self.references[:1])
        is_used = np.zeros(len(self.references), np.bool_)
        is_used[self.block] = True
        references = tuple(self.references[i] for i in np.flatnonzero(is_used).tolist())
        block = (np.cumsum(is_used) - 1)[self.block]
        return RemoteRows(references, block, self.row, self.column)

    def __reduce__(self) -> Any:
        rows = self.compact()  # a reader must not keep blocks that it does not read
        return RemoteRows, (rows.references, rows.block, rows.row, rows.column)

    def fetched(self) -> dict[str, Any]:
        """Reads the rows: tensors padded on the right with 0, and lists, by column.

        `weight_versions` is left out if some blocks lack it: failed rollouts always have it.
        """
        rows = self.compact()
        blocks = read_blocks(rows.references)
        names = list(blocks[0]) if self.column is None else [self.column]
        if not all("weight_versions" in each for each in blocks):
            names = [name for name in names if name != "weight_versions"]
        return {name: _joined([each[name] for each in blocks], rows) for name in names}


def _joined(values: Sequence[Any], rows: RemoteRows) -> Any:
    if not isinstance(values[0], np.ndarray):
        pairs = zip(rows.block.tolist(), rows.row.tolist(), strict=True)
        return [values[block][row] for block, row in pairs]
    if len(values) == 1:
        return torch.from_numpy(values[0][rows.row])  # a copy: blocks are read-only
    sizes = [max(size) for size in zip(*(each.shape[1:] for each in values), strict=True)]
    gathered = np.zeros((len(rows), *sizes), values[0].dtype)
    for number, value in enumerate(values):
        rows_of_block = np.flatnonzero(rows.block == number)
        inner: tuple[Any, ...] = tuple(slice(size) for size in value.shape[1:])
        gathered[(rows_of_block, *inner)] = value[rows.row[rows_of_block]]
    return torch.from_numpy(gathered)


MULTIMODAL_COLUMNS = frozenset(
    {
        "pixel_values",
        "image_grid_thw",
        "image_sizes",
        "pixel_attention_mask",
        "mm_token_type_ids",
    }
)
"""Columns that are arguments of vision-language models in transformers."""

_OF_ALL_TOKENS = frozenset({"input_ids", "values"})
"""Columns `[B, T]`; others with one value per token are `[B, T-1]`."""

_MEANINGS = {
    "input_ids": "[B, T] token ids, padded on the right",
    "attention_mask": "[B, T], 1 on the tokens of a row, or input_lengths [B] instead",
    "input_lengths": "[B] tokens of each row",
    "token_mask": "[B, T-1], 1 where the next token is trained on",
    "sample_mask": "[B], 1 for a row that is trained on",
    "advantages": "[B, T-1], or [B] for all tokens of a row",
    "prev_logprobs": "[B, T-1] under the policy that sampled: policy.get_logprobs(batch)",
    "generation_logprobs": "[B, T-1] as the engine reported them",
    "reference_logprobs": "[B, T-1]: policy.get_reference_logprobs(batch)",
    "is_chosen": "[B], True for the chosen completion of a pair",
    "pair_ids": "[B], the same number for both completions of a pair",
    "kl_baseline": "[B], the estimate that KTO compares with",
    "topk_logprobs": "[B, T-1, K] of the teacher: policy.get_reference_topk_logprobs(batch, k)",
}
"""Descriptions of the columns of the losses, for messages."""


class BatchedDataDict(UserDict[str, Any]):
    """Columns of equal length: tensors whose first dimension is the batch, or plain lists.

    `RemoteRows` are columns whose values are in the object store; `fetched` reads them.

    Example:
        >>> batch = BatchedDataDict({"input_ids": torch.tensor([[1, 2], [3, 4]]), "id": ["a", "b"]})
        >>> batch.select_indices([1])["id"]
        ['b']
    """

    microbatches: list[Microbatch] | None = None
    """Plan of the micro-batches, or None; its indices count within this batch.

    Copies, moves and pickles keep it; a batch with other rows has none."""

    def __missing__(self, name: str) -> Any:
        self.require([name])

    def get(self, name: str, default: Any = None) -> Any:
        """Returns a column, or the default without building an error first."""
        return self.data.get(name, default)

    def require(self, names: Iterable[str]) -> None:
        """Refuses a batch that lacks columns."""
        missing = [name for name in names if name not in self.data]
        if not missing:
            return
        meanings = [f"{name} {_MEANINGS[name]}" for name in missing if name in _MEANINGS]
        raise MissingColumnError(
            f"the batch has no column {', '.join(map(repr, missing))}",
            expected="; ".join(meanings) or None,
            got=f"the columns {', '.join(sorted(self.data))}" if self.data else "no columns",
            fix="add it to the batch" if len(missing) == 1 else "add them to the batch",
        )

    @classmethod
    def from_batches(
        cls, batches: Sequence[Mapping[str, Any]], pad_values: Mapping[str, float] | None = None
    ) -> Self:
        """Joins batches; tensors are padded on the right to the widest, in every dimension.

        Args:
            batches: Batches with the same columns; of none, the result has no columns.
            pad_values: Padding value of each column, 0 by default.
        """
        columns = {frozenset(batch) for batch in batches}
        if len(columns) > 1:
            raise ValueError(
                f"batches need the same columns, got {sorted(sorted(keys) for keys in columns)}"
            )
        joined: dict[str, Any] = {}
        for key, first in batches[0].items() if batches else ():
            values = [batch[key] for batch in batches]
            if isinstance(first, torch.Tensor):
                joined[key] = _cat_padded(values, (pad_values or {}).get(key, 0))
            else:
                joined[key] = [item for value in values for item in value]
        return cls(joined)

    @property
    def size(self) -> int:
        """Number of rows; 0 without columns."""
        lengths = {key: len(value) for key, value in self.data.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"columns of one batch must have equal lengths, got {lengths}")
        return next(iter(lengths.values()), 0)

    def get_multimodal_dict(self) -> dict[str, Any]:
        """Returns further arguments of a multimodal model, by name; empty for text.

        Images differ in size, so such a column is a list with one tensor per row, or None for a row
        without images, and the tensors are joined over the rows; `mm_token_type_ids [B, T]`, which
        marks image tokens, is a tensor already.
        """
        arguments: dict[str, Any] = {}
        for key in MULTIMODAL_COLUMNS & self.data.keys():
            value = self.data[key]
            if isinstance(value, torch.Tensor):
                arguments[key] = value
            elif tensors := [item for item in value if item is not None]:
                arguments[key] = torch.cat(tensors)
        return arguments

    def reorder_data(self, indices: Sequence[int]) -> Self:
        """Moves row `i` to index `indices[i]`; undoes `select_indices` of a permutation."""
        if sorted(indices) != list(range(self.size)):
            raise ValueError(f"expected a permutation of {self.size} rows, got {list(indices)}")
        return self.select_indices(sorted(range(len(indices)), key=lambda row: indices[row]))

    def select_indices(
        self, indices: "Sequence[int] | np.ndarray[Any, np.dtype[np.int64]]"
    ) -> Self:
        """Returns the rows at `indices`, in that order."""
        index = torch.as_tensor(indices, dtype=torch.long)
        return type(self)({key: _selected(value, index) for key, value in self.data.items()})

    def slice(self, start: int, end: int) -> Self:
        """Returns the rows from `start` up to, not including, `end`."""
        return type(self)({key: value[start:end] for key, value in self.data.items()})

    @property
    def is_remote(self) -> bool:
        """Whether the values of some columns are remote."""
        return any(isinstance(value, RemoteRows) for value in self.data.values())

    def fetched(self) -> Self:
        """Returns a copy with local values; a batch without remote columns is returned unchanged.

        `input_ids [B, T]` has the width of the longest row, and columns of next tokens one less.
        """
        if not self.is_remote:
            return self
        width = int(max(self["input_lengths"], default=0))
        local: dict[str, Any] = {}
        for key, value in self.data.items():
            if isinstance(value, RemoteRows):
                columns = value.fetched()
                local_columns = columns if value.column is None else {key: columns[value.column]}
                local |= {
                    name: _as_wide(column, width - (name not in _OF_ALL_TOKENS))
                    for name, column in local_columns.items()
                }
            else:
                local[key] = value
        return type(self)(local)

    def chunk(self, rank: int, chunks: int) -> Self:
        """Returns part `rank` of `chunks` consecutive parts; the first may have one more row.

        Raises:
            ValueError: If `rank` is not below `chunks`. A part may have no rows.

        Example:
            >>> batch = BatchedDataDict({"x": [1, 2, 3, 4, 5]})
            >>> [batch.chunk(rank, 3)["x"] for rank in range(3)]
            [[1, 2], [3, 4], [5]]
        """
        if not 0 <= rank < chunks:
            raise ValueError(f"expected a rank from 0 to {chunks - 1}, got {rank}")
        rows, left_over = divmod(self.size, chunks)
        start = rank * rows + min(rank, left_over)
        return self.slice(start, start + rows + (rank < left_over))

    def to(self, device: torch.device | str) -> Self:
        """Returns the same batch with its tensors on `device`."""
        return self.moved_with([], torch.device(device))[0]

    def moved_with(self, others: Any, device: torch.device) -> tuple[Self, Any]:
        """Moves the batch, and tensors in a list or dict, to a device; to a GPU in one copy."""
        leaves, structure = tree_flatten((others, self.data))
        positions = [
            position for position, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)
        ]
        tensors = move_together([leaves[position] for position in positions], device)
        for position, tensor in zip(positions, tensors, strict=True):
            leaves[position] = tensor
        moved_others, columns = tree_unflatten(leaves, structure)
        moved = self.copy()
        moved.update(columns)
        return moved, moved_others


def _selected(column: Any, index: torch.Tensor) -> Any:
    if isinstance(column, torch.Tensor):
        return column[index]
    if isinstance(column, RemoteRows):
        return column[index.numpy()]
    return [column[row] for row in index.tolist()]


def _as_wide(column: Any, width: int) -> Any:
    """Cuts or pads a column with one value per token to a width; padding is 0."""
    if not isinstance(column, torch.Tensor) or column.dim() < 2:
        return column
    cut = column[:, : max(width, 0)]
    return _padded(cut, [max(width, 0), *cut.shape[2:]], 0.0)


def _cat_padded(tensors: Sequence[torch.Tensor], pad_value: float) -> torch.Tensor:
    shapes = [tuple(tensor.shape[1:]) for tensor in tensors]
    if len({len(shape) for shape in shapes}) > 1:
        raise ValueError(f"rows of one column need the same number of dimensions, got {shapes}")
    widest = [max(sizes) for sizes in zip(*shapes, strict=True)]
    return torch.cat([_padded(tensor, widest, pad_value) for tensor in tensors])


def _padded(tensor: torch.Tensor, sizes: Sequence[int], pad_value: float) -> torch.Tensor:
    missing = [size - have for size, have in zip(sizes, tensor.shape[1:], strict=True)]
    # `pad` counts from the last dimension, with the padding before and after each.
    pads = [amount for after in reversed(missing) for amount in (0, after)]
    return torch.nn.functional.pad(tensor, pads, value=pad_value) if any(missing) else tensor


def collate(
    sequences: Sequence[Sequence[int]], loss_masks: Sequence[Sequence[bool]]
) -> BatchedDataDict:
    """Pads sequences on the right and shifts their masks to next-token positions.

    Args:
        loss_masks: For each token, True if it is trained on; the first token never is.

    Returns:
        `input_ids [B, T]`, `input_lengths [B]`, `token_mask [B, T-1]` (index t is for token t+1),
        `sample_mask [B]` of ones.

    Example:
        >>> collate([[5, 6, 7]], [[False, False, True]])["token_mask"]
        tensor([[False,  True]])
    """
    for row, (sequence, mask) in enumerate(zip(sequences, loss_masks, strict=True)):
        if len(sequence) != len(mask):
            raise ValueError(f"sequence {row}: {len(sequence)} tokens but {len(mask)} mask values")
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    is_token = torch.arange(int(lengths.max())) < lengths[:, None]
    loss_mask = torch.zeros(is_token.shape, dtype=torch.bool)
    loss_mask[is_token] = flat_tensor(loss_masks, np.bool_)
    return _collated(flat_tensor(sequences, np.int64), lengths, is_token, loss_mask)


def collate_completions(
    prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]
) -> BatchedDataDict:
    """Collates prompts and their completions, all of whose tokens are trained on.

    Example:
        >>> collate_completions([[5, 6]], [[7]])["token_mask"]
        tensor([[False,  True]])
    """
    starts = torch.tensor([len(prompt) for prompt in prompts], dtype=torch.long)
    lengths = starts + torch.tensor([len(each) for each in completions], dtype=torch.long)
    position = torch.arange(max(lengths.tolist(), default=0))
    is_token = position < lengths[:, None]
    pairs = zip(prompts, completions, strict=True)
    ids = flat_tensor((part for pair in pairs for part in pair), np.int64)
    return _collated(ids, lengths, is_token, is_token & (position >= starts[:, None]))


def _collated(
    ids: torch.Tensor, lengths: torch.Tensor, is_token: torch.Tensor, loss_mask: torch.Tensor
) -> BatchedDataDict:
    input_ids = torch.zeros(is_token.shape, dtype=torch.long)
    input_ids[is_token] = ids
    return BatchedDataDict(
        {
            "input_ids": input_ids,
            "input_lengths": lengths,
            "token_mask": loss_mask[:, 1:].contiguous(),
            "sample_mask": torch.ones(len(lengths)),
        }
    )


def flat_tensor(rows: Iterable[Iterable[Any]], dtype: type[np.generic]) -> torch.Tensor:
    """Concatenates the values of all rows, without one tensor per row."""
    return torch.from_numpy(np.fromiter(chain.from_iterable(rows), dtype=dtype))
