"""Text view of a data set row with the trained tokens marked."""

import itertools
from collections.abc import Mapping
from typing import Any

from nemo_rl_core.config.row_format import RowFormat
from nemo_rl_core.config.row_policy import RowPolicy
from nemo_rl_core.data.chat import tokenize_row
from nemo_rl_core.data.datasets.sources import read
from nemo_rl_core.data.loss_masks import SupervisedExample
from nemo_rl_core.data.schemas import checked_rows
from nemo_rl_core.data.tools import tools_of
from nemo_rl_core.errors import DataError

_GREEN, _PLAIN = "\x1b[32m", "\x1b[0m"

LEGEND = "⟦trained on⟧, and ⏹ after each end-of-sequence token"
"""Explanation of the marks in `preview`."""


def preview(row: Mapping[str, Any], tokenizer: Any, *, color: bool = False) -> str:
    """Formats the text that the model receives for a row, with trained tokens between ⟦ and ⟧.

    Example:
        >>> from nemo_rl_core.data.tokenizer import build_arithmetic_tokenizer
        >>> print(preview({"prompt": "1+2=", "completion": "3"}, build_arithmetic_tokenizer()))
        row: 7 tokens, 2 trained on, 1 end-of-sequence
        <bos>1+2=⟦3<eos>⏹⟧
    """
    return "\n\n".join(
        f"{name}: {len(example.token_ids)} tokens, {example.num_trained_tokens} trained on, "
        f"{example.token_ids.count(tokenizer.eos_token_id)} end-of-sequence\n"
        f"{_marked(example, tokenizer, color=color)}"
        for name, example in tokenize_row(tokenizer, row).items()
    )


def tools_line(row: Mapping[str, Any]) -> list[str]:
    """Returns a line with the names of a row's tools, or nothing."""
    names = ", ".join(tool["function"]["name"] for tool in tools_of(row))
    return [f"tools: {names}"] if names else []


def _marked(example: SupervisedExample, tokenizer: Any, *, color: bool) -> str:
    before, after = (f"{_GREEN}⟦", f"⟧{_PLAIN}") if color else ("⟦", "⟧")
    # Decode runs of tokens, since one character may be several tokens.
    runs = itertools.groupby(
        zip(example.token_ids, example.loss_mask, strict=True), key=lambda token: token[1]
    )
    return "".join(
        f"{before}{text}{after}" if trained else text
        for trained, run in runs
        if (text := _text([token for token, _ in run], tokenizer))
    )


def _text(ids: list[int], tokenizer: Any) -> str:
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
    """Reads one training row of a data source, with the same checks as in training.

    Args:
        source: A file, folder, hub name, `reasoning_gym:TASK`, `arithmetic`, or a data config.
        number: Index of the row, from 0.
        form: How columns are read; None recognizes them.
    """
    rows, name = read(source, seed=seed, form=form).train, name or str(source)
    if not 0 <= number < len(rows):
        raise DataError(
            f"{name} has no row {number}",
            expected=f"a row from 0 to {len(rows) - 1}",
            got=str(number),
            fix="correct --row",
        )
    # Only this row is checked, so that it can be viewed even if others are invalid.
    checked = checked_rows(
        [rows[number]], tokenizer=None, max_prompt_tokens=None, name=name, policy=policy
    )
    (row,) = checked.to_pylist()
    return dict(row)
