"""Text view of a data set row with the trained tokens marked."""

import itertools
from collections.abc import Mapping
from typing import Any

from nemo_rl_core.config.row_format import RowFormat
from nemo_rl_core.config.row_policy import RowPolicy
from nemo_rl_core.data.chat import tokenize_row
from nemo_rl_core.data.datasets.sources import read
from nemo_rl_core.data.loss_masks import SupervisedExample
from nemo_rl_core.data.schemas import validate_rows
from nemo_rl_core.errors import DataError

_GREEN, _PLAIN = "\x1b[32m", "\x1b[0m"

LEGEND = "⟦trained on⟧, and ⏹ behind each end-of-sequence token"
"""The marks that `preview` uses."""


def preview(row: Mapping[str, Any], tokenizer: Any, *, colour: bool = False) -> str:
    """Formats a row as the model receives it, with trained tokens between ⟦ and ⟧.

    Args:
        row: A row of any kind, as `schemas.validate_rows` returns it.
        tokenizer: The model's tokenizer.
        colour: Whether to print trained tokens in green, for terminals.

    Returns:
        A line of counts and the text; both for the chosen and the rejected answer of a pair.

    Raises:
        DataError: When the turns of the row cannot be separated.

    Example:
        >>> from nemo_rl_core.data.tokenizer import build_arithmetic_tokenizer
        >>> print(preview({"prompt": "1+2=", "completion": "3"}, build_arithmetic_tokenizer()))
        row: 7 tokens, 2 trained on, 1 end-of-sequence
        <bos>1+2=⟦3<eos>⏹⟧
    """
    blocks = [
        f"{name}: {_counts(example, tokenizer)}\n{_marked(example, tokenizer, colour=colour)}"
        for name, example in tokenize_row(tokenizer, row).items()
    ]
    return "\n\n".join(blocks)


def _counts(example: SupervisedExample, tokenizer: Any) -> str:
    num_ends = example.token_ids.count(tokenizer.eos_token_id)
    return (
        f"{len(example.token_ids)} tokens, {example.num_trained_tokens} trained on, "
        f"{num_ends} end-of-sequence"
    )


def _marked(example: SupervisedExample, tokenizer: Any, *, colour: bool) -> str:
    before, after = (f"{_GREEN}⟦", f"⟧{_PLAIN}") if colour else ("⟦", "⟧")
    # Decoded in runs of tokens, since one character may be several tokens.
    runs = itertools.groupby(
        zip(example.token_ids, example.loss_mask, strict=True), key=lambda token: token[1]
    )
    return "".join(
        f"{before}{text}{after}" if trained else text
        for trained, run in runs
        if (text := _text([token for token, _ in run], tokenizer))
    )


def _text(ids: list[int], tokenizer: Any) -> str:
    """The text of a run of tokens, each end-of-sequence token followed by its mark."""
    eos = tokenizer.eos_token_id
    pieces = []
    for is_end, run in itertools.groupby(ids, key=lambda token: token == eos):
        if is_end:
            pieces += [f"{tokenizer.decode([token])}⏹" for token in run]
        else:
            pieces.append(tokenizer.decode(list(run)))
    return "".join(pieces)


def read_row(
    source: Any,
    number: int,
    policy: RowPolicy,
    form: RowFormat | None = None,
    *,
    seed: int = 0,
    name: str = "",
) -> dict[str, Any]:
    """One training row of a data source, checked as training checks it.

    Args:
        source: A file, folder, hub name, `reasoning_gym:TASK`, `arithmetic`, or a data config.
        number: Index of the row, from 0.
        policy: Which turns are trained on.
        form: How columns are read; None recognises them.
        seed: For generated and held-out rows.
        name: Name of the source in messages; by default the source itself.

    Raises:
        DataError: If there is no such source or row, or the row is not valid.
    """
    rows, name = read(source, seed=seed, form=form).train, name or str(source)
    if not 0 <= number < len(rows):
        raise DataError(
            f"{name} has no row {number}",
            expected=f"a row from 0 to {len(rows) - 1}",
            got=str(number),
            fix="correct --row",
        )
    # Only this row is checked, so that it can be viewed while others are invalid.
    frame = validate_rows(
        [rows[number]], tokenizer=None, max_prompt_tokens=None, name=name, policy=policy
    )
    return {str(column): value for column, value in frame.iloc[0].items()}
