"""Token sequences from a data source, for proofs by commands.

Not in `proof`, whose imports count in the key of the stage `convert`, which reads no source.
"""

from pathlib import Path
from typing import Any

from nemo_rl_core.data.chat import tokenize_row
from nemo_rl_core.data.datasets.sources import read
from nemo_rl_core.data.pretrained import load_tokenizer
from nemo_rl_core.data.schemas import checked_rows
from nemo_rl_core.errors import DataError

_MAX_TOKENS = 256


def token_rows(source: Any, model_folder: Path, *, num_rows: int) -> list[list[int]]:
    """Returns the first rows of a source as token sequences."""
    tokenizer = load_tokenizer(model_folder)
    rows = read(source, seed=0).train[:num_rows]
    checked = checked_rows(rows, tokenizer=None, max_prompt_tokens=None, name=str(source)[:80])
    sequences = [
        list(example.token_ids[:_MAX_TOKENS])
        for row in checked.to_pylist()
        for example in tokenize_row(tokenizer, row).values()
    ]
    comparable = [sequence for sequence in sequences if len(sequence) > 1]
    if not comparable:
        raise DataError(
            f"{str(source)[:80]} has no row to compare models on",
            expected="a row of two tokens or more",
            got=f"{len(rows)} rows, all shorter",
            fix="name another data source",
        )
    return comparable
