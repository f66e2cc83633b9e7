"""Custom columns, answer patterns, templates and system prompts."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nemo_rl_core.config.data import FileData
from nemo_rl_core.config.row_format import RowFormat
from nemo_rl_core.data.datasets import load_parts, recognized_validation
from nemo_rl_core.data.datasets.formats import recognize
from nemo_rl_core.data.datasets.prompt_columns import answer_finder
from nemo_rl_core.data.module import DataModule
from nemo_rl_core.errors import ConfigError, DataError

NESTED = [
    {
        "task_text": f"Add 1 to {n}.",
        "label": {"ground_truth": f"It is {n + 1}.", "scale": ["easy", "hard"]},
        "extra_info": {"index": n + 40},
    }
    for n in range(3)
]
COLUMNS = {"task_text": "prompt", "label.ground_truth": "answer", "extra_info.index": "id"}


def _rows(records: list[dict[str, Any]], **row_format: Any) -> list[dict[str, Any]]:
    return recognize(records, where="here", task="t", form=RowFormat.of(row_format)).rows


def test_columns_reach_into_nested_ones() -> None:
    (row, *_) = _rows(NESTED, columns=COLUMNS, answer_pattern=r"is (\d+)\.", task="sums")
    assert json.loads(row.pop("metadata")) == {
        "extra_info": {"index": 40},
        "label": {"ground_truth": "It is 1.", "scale": ["easy", "hard"]},
    }
    assert row == {
        "id": "40",
        "prompt": "Add 1 to 0.",
        "answer": "1",
        "completion": "It is 1.",
        "task": "sums",
    }
    (row, *_) = _rows(NESTED, columns={"task_text": "prompt", "label.scale.1": "answer"})
    assert row["answer"] == "hard"


def test_mapped_columns_determine_the_kind_of_rows() -> None:
    """A set with conversations, problem and answer, such as NuminaMath, can become prompts."""
    turns = [{"role": "user", "content": "p"}, {"role": "assistant", "content": "a"}]
    record = {"problem": "p", "answer": "a", "messages": turns}
    assert set(_rows([record])[0]) == {"id", "messages", "task", "metadata"}
    columns = {"problem": "prompt", "answer": "answer"}
    assert _rows([record], columns=columns)[0]["prompt"] == "p"


def test_files_of_recipes_and_python_take_the_same_keys(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(NESTED), path)
    keys: dict[str, Any] = {"columns": COLUMNS, "answer_pattern": r"(\d+)"}
    recipe = DataModule.of(
        FileData.model_validate(
            {"train": str(path), "validation": None, "validation_fraction": 0.3, **keys}
        )
    )
    from_python = DataModule.of(path, validation_fraction=0.3, **keys)
    rows = DataModule.of(NESTED, validation_fraction=0.3, **keys)
    for data in (from_python, rows):
        assert data.train.drop(columns="task").equals(recipe.train.drop(columns="task"))
    assert sorted([*rows.train["answer"], *rows.validation["answer"]]) == ["1", "2", "3"]
    with pytest.raises(DataError, match="already defines how its rows are read"):
        DataModule.of(FileData(train=str(path)), **keys)
    with pytest.raises(DataError, match="columns of a DataModule have already been read"):
        DataModule.of(rows, **keys)


def test_rename_is_the_earlier_name_of_columns() -> None:
    old = FileData.model_validate({"train": "a.jsonl", "rename": {"q": "prompt"}})
    assert old == FileData(train="a.jsonl", columns={"q": "prompt"})
    with pytest.raises(ConfigError, match="earlier name of columns"):
        RowFormat.of({"rename": {"q": "prompt"}, "columns": {"q": "prompt"}})


@pytest.mark.parametrize(
    ("row_format", "message"),
    [
        ({"columns": {"q": "promt"}}, "did you mean 'prompt'"),
        ({"columns": {"prompt": "question"}}, "the data's column comes first"),
        ({"columns": {"a": "prompt", "b": "prompt"}}, "several columns to prompt"),
        ({"answer_pattern": "####"}, "has 0 groups(.|\\n)*write 'hashes'"),
        ({"answer_pattern": "(a)|(b)"}, "has 2 groups"),
        ({"answer_pattern": "("}, "not a regular expression"),
        ({"format": "gsm8k", "columns": {"q": "prompt"}}, "set only one"),
        ({"sytem_prompt": "x"}, "did you mean 'system_prompt'"),
        ({"format": "gsm9k"}, "'gsm8k'"),
    ],
)
def test_mistakes_of_the_config_are_named(row_format: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DataModule.of(NESTED, **row_format)


@pytest.mark.parametrize(
    ("row_format", "message"),
    [
        ({"columns": {"task_txt": "prompt"}}, "'task_txt' may be 'task_text'"),
        ({"columns": {"label.truth": "answer"}}, "no row has the column 'label.truth'"),
        ({"drop_columns": ["tool"]}, "no row has the column 'tool'"),
        (
            {"columns": {"task_text": "prompt", "label.ground_truth": "answer"},
             "answer_pattern": r"is (\d\d)"},
            "3 of 3 rows have no answer",
        ),
    ],
)  # fmt: skip
def test_mistakes_about_the_data_are_named(row_format: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        _rows(NESTED, **row_format)


@pytest.mark.parametrize(
    ("pattern", "text", "answer"),
    [
        ("hashes", "5 #### 4\n#### $1,234.50", "$1234.50"),
        ("hashes", "#### 1,2", "1,2"),  # a list of two numbers
        ("hashes", "####  ", None),
        ("boxed", r"\boxed{a} \boxed{\frac{1}{\sqrt{2}}} done", r"\frac{1}{\sqrt{2}}"),
        ("boxed", r"\fbox{\{1, 2\}}", r"\{1, 2\}"),
        ("boxed", r"$\boxed 7$", "7"),
        ("boxed", r"\boxed{}", None),
        ("boxed", r"\boxed{\text{open", None),
        (r"Answer: (\S+)", "Answer: 3\nAnswer: 4", "4"),
        (r"Answer: (\S+)", "none", None),
    ],
)
def test_answers_are_taken_out_of_texts(pattern: str, text: str, answer: str | None) -> None:
    assert answer_finder(pattern)(text) == answer


GSM = [{"question": "2+2?", "answer": "so #### 4", "hint": {"level": 3}}]


def test_templates_and_system_prompts_write_prompts() -> None:
    template = r"[{hint.level}] {prompt} Put it in \boxed{} {{as text}} {{answer}}."
    (row,) = _rows(GSM, prompt_template=template, system_prompt="Be short.")
    assert json.loads(row["prompt"]) == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": r"[3] 2+2? Put it in \boxed{} {{as text}} {answer}."},
    ]
    assert (row["answer"], row["completion"]) == ("4", "so #### 4")
    turns = [{"role": "user", "content": "2+2?"}]
    (row,) = _rows([{"prompt": turns, "answer": "4"}], prompt_template="Q: {prompt}")
    assert json.loads(row["prompt"]) == [{"role": "user", "content": "Q: 2+2?"}]


def test_system_prompts_begin_conversations_and_pairs() -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (row,) = _rows([{"messages": turns}], system_prompt="S")
    assert [turn["role"] for turn in json.loads(row["messages"])] == ["system", "user", "assistant"]
    (row,) = _rows([{"prompt": "p", "chosen": "a", "rejected": "b"}], system_prompt="S")
    assert json.loads(row["prompt"])[0] == {"role": "system", "content": "S"}
    assert row["chosen"] == "a"


@pytest.mark.parametrize(
    ("record", "row_format", "message"),
    [
        (GSM[0], {"prompt_template": "{questio}"}, "names no column: questio"),
        (GSM[0], {"prompt_template": r"{prompt} \boxed{answer}"}, "shows the answer: answer"),
        (GSM[0], {"prompt_template": "Add 2 and 2."}, "all prompts would be the same"),
        (
            {"messages": [{"role": "user", "content": "a"}]},
            {"prompt_template": "{prompt}"},
            "needs rows with prompts",
        ),
        ({"text": "t"}, {"system_prompt": "S"}, "needs conversations or prompts"),
        ({"text": "t"}, {"answer_pattern": "boxed"}, "needs rows with answers"),
        (
            {"prompt": [{"role": "system", "content": "T"}, {"role": "user", "content": "a"}],
             "answer": "4"},
            {"system_prompt": "S"},
            "already have a system turn",
        ),
    ],
)  # fmt: skip
def test_prompts_that_cannot_be_written_are_refused(
    record: dict[str, Any], row_format: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        _rows([record], **row_format)


def test_rows_keep_their_numbers_behind_ties() -> None:
    turns = [{"role": "system", "content": "T"}, {"role": "user", "content": "a"}]
    tie, pair = ({"prompt": "p", "responses": ["a", "b"], "scores": [1, n]} for n in (1, 2))
    with pytest.raises(DataError, match=r"got: row 2 \(counted from 0\)"):
        _rows([tie, pair, {**pair, "prompt": turns}], system_prompt="S")
    rows = [tie, {**pair, "level": 7}]
    (row,) = _rows(rows, prompt_template="{level}: {prompt}")
    assert (row["id"], row["prompt"]) == ("1", "7: p")


@pytest.mark.parametrize("column", ["image", "images"])
def test_images_are_refused_unless_dropped(column: str) -> None:
    rows = [{"prompt": "p", "answer": "a", column: None}, {"prompt": "q", "answer": "b"}]
    assert len(_rows(rows)) == 2  # an empty column says nothing
    rows[1][column] = [{"x": 1}]  # type: ignore[assignment]
    with pytest.raises(DataError) as caught:
        _rows(rows)
    assert f"1 rows have {column}" in str(caught.value)
    assert "first in row 1" in str(caught.value)
    assert f"data.drop_columns: [{column}]" in str(caught.value)
    kept = _rows(rows, drop_columns=[column])
    assert [row["metadata"] for row in kept] == ["{}", "{}"]


def test_rows_to_measure_on_are_read_without_those_to_train_on(tmp_path: Path) -> None:
    validation = tmp_path / "validation.parquet"
    pq.write_table(pa.Table.from_pylist(NESTED), validation)
    broken = tmp_path / "train.parquet"
    broken.write_text("no parquet")
    config = FileData(train=str(broken), validation=str(validation), columns=COLUMNS)
    read = recognized_validation(config, seed=0)
    assert [row["id"] for row in read.rows] == ["40", "41", "42"]
    with pytest.raises(DataError, match="cannot be read"):
        load_parts(config, seed=0)
    # An unused split of a folder is also not read.
    splits = tmp_path / "splits"
    splits.mkdir()
    pq.write_table(pa.Table.from_pylist(NESTED), splits / "train-0.parquet")
    broken.rename(splits / "test-0.parquet")
    assert len(DataModule.of(splits, columns=COLUMNS, validation_fraction=0.3).train) == 2
