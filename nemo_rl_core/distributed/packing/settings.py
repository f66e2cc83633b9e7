"""The ways in which a batch can be divided into micro-batches of differing size."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from nemo_rl_core.distributed.packing.bins import Algorithm


@dataclass(frozen=True)
class DynamicBatching:
    """Micro-batches of rows of nearly equal length: as many as the budget holds, padding included.

    Attributes:
        max_tokens_per_microbatch: Rows times row length.
        sequence_length_round: Rows are a multiple of this many tokens long.
        input_lengths_key: The column with the length of each row.
    """

    max_tokens_per_microbatch: int
    sequence_length_round: int = 1
    input_lengths_key: str = "input_lengths"


@dataclass(frozen=True)
class SequencePacking:
    """Micro-batches of one row each, into which sequences are packed one after the other.

    Attributes:
        max_tokens_per_microbatch: What the row holds.
        algorithm: How sequences are packed into rows.
        sequence_length_pad_multiple: Each sequence is given room for a multiple of this many
            tokens, for backends that divide it over ranks.
        input_lengths_key: The column with the length of each row.
    """

    max_tokens_per_microbatch: int
    algorithm: Algorithm = "first_fit_decreasing"
    sequence_length_pad_multiple: int = 1
    input_lengths_key: str = "input_lengths"


Batching = TypeVar("Batching", DynamicBatching, SequencePacking)


def as_record(kind: type[Batching], settings: Batching | Mapping[str, Any]) -> Batching:
    """The settings as a record; of a mapping with its fields, `input_key` is not needed.

    Raises:
        ValueError: If a field is missing or unknown.
    """
    if not isinstance(settings, Mapping):
        return settings
    names = [field.name for field in fields(kind)]
    given = {name: value for name, value in settings.items() if name != "input_key"}
    if "max_tokens_per_microbatch" not in given or not given.keys() <= set(names):
        raise ValueError(
            f"{kind.__name__} needs max_tokens_per_microbatch, of the fields {', '.join(names)}; "
            f"got {', '.join(given) or 'none'}"
        )
    return kind(**given)
