"""Data from any source, read and validated before a run starts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nemo_rl_core.config.row_format import RowFormat
from nemo_rl_core.config.row_policy import RowPolicy
from nemo_rl_core.data.datasets import sources
from nemo_rl_core.data.datasets.parts import Parts, held_out_mask
from nemo_rl_core.data.frames import RowKind, row_kind
from nemo_rl_core.data.schemas import check_disjoint, checked_rows
from nemo_rl_core.data.tables import TableRows, rows_of_frame, select_table
from nemo_rl_core.errors import DataError
from nemo_rl_core.types import Row

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa


_OPTIONS = ("validation", "validation_fraction", "tokenizer", "max_prompt_tokens", "policy", "seed")


@dataclass(frozen=True)
class DataModule:
    """Checked rows to train on and to validate on, all of one kind.

    Attributes:
        kind: Kind of the rows: prompts, conversations, text or preferences.
        train: Frame of the training rows, which `loader.save_frame` stores and trainers read.
        validation: Frame of the rows that are never trained on.
        read_as: Description of the recognized format; empty for generated rows.
        policy: Rules by which the rows were checked; trainers use the same.

    Example:
        >>> rows = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(10)]
        >>> data = DataModule.of(rows, validation_fraction=0.2)
        >>> data.kind, len(data.train), len(data.validation)
        ('prompts', 8, 2)
    """

    kind: RowKind
    train: "pd.DataFrame"
    validation: "pd.DataFrame"
    read_as: str = ""
    policy: RowPolicy | None = None

    @classmethod
    def of(
        cls,
        source: Any,
        *,
        validation: Any | None = None,
        validation_fraction: float = 0.05,
        tokenizer: Any | None = None,
        max_prompt_tokens: int | None = None,
        policy: RowPolicy | None = None,
        seed: int = 0,
        **row_format: Any,
    ) -> "DataModule":
        """Reads a source, recognizes the format of its rows, and checks them.

        The recognized format and rows that are held out, dropped or cut are logged as warnings.

        Args:
            source: A hub name (`organization/name`, `organization/name:subset`), a file or folder,
                a list of dicts, a `datasets.Dataset` or `DatasetDict`, `reasoning_gym:TASK`,
                `arithmetic`, a data config of a recipe, or a DataModule, whose rows are checked
                again by these rules.
            validation: A source whose training split is used for validation; None uses the
                validation split of `source`, or holds out rows if it has none.
            validation_fraction: Fraction of held-out rows, in (0, 1).
            tokenizer: Tokenizer that measures lengths and masks; None skips those checks.
            max_prompt_tokens: Maximum length of a prompt to sample from; None uses the limit of
                the data config, if any.
            policy: Maximum row length, handling of longer and duplicate rows, and which turns are
                trained on; None uses the policy of the data config, or the defaults.
            seed: Seed of generated rows and held-out rows.
            **row_format: How columns are read: `columns`, `answer_pattern`, `format`,
                `system_prompt`, `prompt_template`, `drop_columns`, `task` (see `RowFormat`).

        Raises:
            ConfigError: For a misspelt or contradictory option of `row_format`.
            DataError: When the source cannot be read or its rows fail a check (names the rows,
                counted from 0), or the two sets differ in kind or share rows.
        """
        if isinstance(source, DataModule):
            policy = policy or source.policy
        if isinstance(source, RowPolicy):
            policy = policy or source
            # Every data config has this field; a bare policy does not.
            max_prompt_tokens = max_prompt_tokens or getattr(source, "max_prompt_tokens", None)
        form = RowFormat.of(row_format, other_names=_OPTIONS) if row_format else None
        drops = policy is not None and policy.drops_invalid
        parts = _parts(source, seed, form, drops)
        other = parts.validation
        if validation is not None:
            other = _parts(validation, seed, form, drops).train

        def checked(rows: Sequence[Row], name: str) -> "pa.Table":
            return checked_rows(
                rows,
                tokenizer=tokenizer,
                max_prompt_tokens=max_prompt_tokens,
                name=name,
                policy=policy,
            )

        if other is None:
            # Checked before the split, so that messages name row numbers of the source.
            rows = checked(parts.train, "given")
            mask = held_out_mask(
                TableRows(rows), fraction=validation_fraction, seed=seed, where="the data set"
            )
            checked_parts = (select_table(rows, ~mask), select_table(rows, mask))
        else:
            checked_parts = (checked(parts.train, "train"), checked(other, "validation"))
            _refuse_mixed_kinds(*checked_parts)
            check_disjoint(parts.train, other)
        train, validation = (part.to_pandas() for part in checked_parts)
        return cls(row_kind([*train]), train, validation, parts.read_as, policy)


def _parts(source: Any, seed: int, form: RowFormat | None, drops_invalid: bool) -> Parts:
    if not isinstance(source, DataModule):
        return sources.read(source, seed=seed, form=form, drops_invalid=drops_invalid)
    if form is not None:
        raise DataError(
            "the columns of a DataModule have already been read",
            got=f"a DataModule with {', '.join(sorted(form.model_fields_set))}",
            fix="pass them to DataModule.of",
        )
    return Parts(rows_of_frame(source.train), rows_of_frame(source.validation), source.read_as)


def _refuse_mixed_kinds(train: "pa.Table", validation: "pa.Table") -> None:
    kinds = [row_kind(rows.column_names) for rows in (train, validation)]
    if kinds[0] != kinds[1]:
        raise DataError(
            "the rows to train on and to validate on are of different kinds",
            expected=f"{kinds[0]} in both",
            got=f"{kinds[1]} to validate on",
            fix="convert both to the same format",
        )
