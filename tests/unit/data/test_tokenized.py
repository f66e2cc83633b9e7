"""Stored tokens equal those of one process, are made once, and give the same errors."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from nemo_rl_core.algorithms.sft.data import load_examples
from nemo_rl_core.data import tokenized
from nemo_rl_core.data.loader import save_frame
from nemo_rl_core.data.pairs import tokenized_pairs
from nemo_rl_core.data.pretrained import load_tokenizer
from nemo_rl_core.errors import DataError
from nemo_rl_core.types import Row
from tests.validated import validate_rows


def _saved(folder: Path, rows: list[Row]) -> Path:
    numbered = [{"id": str(n), "task": "t", "metadata": "{}", **row} for n, row in enumerate(rows)]
    frame: pd.DataFrame = validate_rows(
        numbered, tokenizer=None, max_prompt_tokens=None, name="train"
    )
    save_frame(frame, folder)
    return folder


def _conversation(number: int) -> Row:
    texts = [("user", f"{number}?"), ("assistant", "one"), ("user", "more"), ("assistant", "two")]
    turns = [{"role": role, "content": text} for role, text in texts]
    return {"messages": json.dumps(turns), "mask": "all_assistant_turns"}


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[Path]]:
    """Stores tokens of any number of rows, by two processes, and lists the stored files."""
    home = tmp_path / "home"
    monkeypatch.setenv("NEMO_RL_HOME", str(home))
    monkeypatch.setattr(tokenized, "MIN_ROWS", 10)
    monkeypatch.setattr(tokenized, "_ROWS_PER_PROCESS", 10)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    return lambda: sorted((home / "cache" / "tokens").iterdir())


@pytest.mark.slow
def test_tokens_equal_those_of_one_process_and_are_made_once(
    tmp_path: Path,
    byte_tokenizer: Callable[[str], Any],
    stored: Callable[[], list[Path]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = byte_tokenizer("chatml")
    folder = _saved(tmp_path / "rows", [_conversation(number) for number in range(25)])
    many = load_examples(folder, tokenizer)
    (file,) = stored()

    def none(*_: Any) -> None:
        raise AssertionError("tokens are made again")

    with monkeypatch.context() as patched:
        patched.setattr(tokenized, "_tokenize_in_processes", none)
        assert list(load_examples(folder, tokenizer)) == list(many)
        tokenizer.save_pretrained(tmp_path / "elsewhere")
        elsewhere = load_tokenizer(tmp_path / "elsewhere")
        assert list(load_examples(folder, elsewhere)) == list(many)
    # Another template, and other rows, have separate tokens.
    load_examples(folder, byte_tokenizer("headers"))
    assert len(stored()) == 2
    assert file in stored()
    monkeypatch.setattr(tokenized, "MIN_ROWS", 100)
    direct = load_examples(folder, tokenizer)
    assert isinstance(direct, list)
    assert list(many) == direct
    assert (many[7], many[20:]) == (direct[7], direct[20:])


def test_pairs_and_errors_equal_those_of_one_process(
    tmp_path: Path,
    byte_tokenizer: Callable[[str], Any],
    stored: Callable[[], list[Path]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tokenized, "_ROWS_PER_PROCESS", 1000)
    pairs = [{"prompt": f"{n}?", "chosen": "yes", "rejected": "no"} for n in range(12)]
    folder = _saved(tmp_path / "pairs", pairs)
    bad = _saved(tmp_path / "bad", [_conversation(number) for number in range(12)])
    found, messages = [], []
    for fewest in (10, 100):
        monkeypatch.setattr(tokenized, "MIN_ROWS", fewest)
        found.append(tokenized_pairs(folder, byte_tokenizer("chatml")))
        with pytest.raises(DataError) as caught:
            load_examples(bad, byte_tokenizer("none"))
        messages.append(str(caught.value))
    assert found[0] == found[1]
    assert messages[0] == messages[1]
    assert len(stored()) == 1


def test_stored_tokens_depend_on_all_code_that_makes_them() -> None:
    code = {module.__name__ for module in tokenized._CODE}
    values = [value for module in tokenized._CODE for value in vars(module).values()]
    used = {str(getattr(value, "__module__", "")) for value in values}
    assert {name for name in used if name.startswith("nemo_rl_core.data.")} <= code
