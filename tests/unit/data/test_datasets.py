import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_core.config.data import FileData
from nemo_rl_core.config.generated_data import ArithmeticData, ReasoningGymData
from nemo_rl_core.config.row_format import RowFormat
from nemo_rl_core.data.checking import COLUMNS
from nemo_rl_core.data.datasets import load_rows
from nemo_rl_core.data.datasets.reasoning_gym_draw import draw
from nemo_rl_core.data.datasets.sources import read
from nemo_rl_core.data.module import DataModule
from nemo_rl_core.errors import DataError
from nemo_rl_core.types import Row
from tests.validated import validate_rows


@settings(max_examples=30)
@given(st.integers(0, 2**40), st.integers(1, 60), st.integers(1, 39))
def test_sums_are_right_different_and_disjoint(seed: int, num_train: int, num_held: int) -> None:
    config = ArithmeticData(num_train=num_train, num_validation=num_held, max_operand=9)
    train, validation = load_rows(config, seed=seed)
    assert (len(train), len(validation)) == (num_train, num_held)
    assert len({row["prompt"] for row in train + validation}) == num_train + num_held
    for row in train + validation:
        left, right = row["prompt"].removesuffix("=").split("+")
        assert row["answer"] == row["completion"] == str(int(left) + int(right))
        assert max(int(left), int(right)) <= 9
    assert (train, validation) == load_rows(config, seed=seed)


def test_another_seed_gives_other_sums() -> None:
    config = ArithmeticData(num_train=50, num_validation=5)
    assert load_rows(config, seed=0) != load_rows(config, seed=1)


def _questions(rows: list[Row]) -> set[str]:
    return {row["prompt"] for row in rows}


def test_reasoning_gym_mixes_tasks_in_equal_parts_and_keeps_sets_apart() -> None:
    config = ReasoningGymData(
        tasks=("chain_sum", "gsm_symbolic", "word_ladder"),
        task_options={"chain_sum": {"max_terms": 2, "max_digits": 2}},
        instruction="Answer with a number.",
        num_train=11,
        num_validation=4,
    )
    train, validation = load_rows(config, seed=3)
    # 11 = 4 + 4 + 3 and 4 = 2 + 1 + 1
    assert Counter(row["task"] for row in train) == {
        "chain_sum": 4,
        "gsm_symbolic": 4,
        "word_ladder": 3,
    }
    assert [row["task"] for row in train[:3]] == ["chain_sum", "gsm_symbolic", "word_ladder"]
    assert Counter(row["task"] for row in validation)["chain_sum"] == 2
    assert not _questions(train) & _questions(validation)
    assert len({row["id"] for row in train + validation}) == 15
    first = train[0]
    assert tuple(first) == COLUMNS
    assert first["prompt"].endswith("=\nAnswer with a number.")
    stored = json.loads(first["metadata"])
    assert stored["task"] == "chain_sum"
    assert stored["options"] == {"max_terms": 2, "max_digits": 2}
    assert stored["entry"]["answer"] == first["answer"]


def test_a_completion_is_made_of_the_fields_of_its_question() -> None:
    config = ReasoningGymData(num_train=3, num_validation=1, completion="{expression} = {answer}")
    train, _ = draw(config, seed=0)
    for row in train:
        entry = json.loads(row["metadata"])["entry"]
        assert row["completion"] == f"{entry['metadata']['expression']} = {entry['answer']}"
        assert row["prompt"] == entry["question"]
    with_answers, _ = draw(config.replace(completion="{answer}"), seed=0)
    assert [row["completion"] for row in with_answers] == [row["answer"] for row in train]


@pytest.mark.slow
def test_reasoning_gym_rows_do_not_depend_on_the_hash_seed() -> None:
    program = (
        "import json; from nemo_rl_core.config.data import ReasoningGymData as C; "
        "from nemo_rl_core.data.datasets import load_rows; "
        "c = C(tasks=('word_ladder', 'list_functions'), num_train=8, num_validation=2); "
        "print(json.dumps(load_rows(c, seed=0)))"
    )
    sampled = {
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(sampled) == 1
    assert sampled.pop().strip()


def test_more_training_rows_leave_the_others_as_they_were() -> None:
    small = ReasoningGymData(tasks=("chain_sum",), num_train=5, num_validation=3)
    train, validation = draw(small, seed=0)
    more_train, same_validation = draw(small.replace(num_train=9), seed=0)
    assert same_validation == validation
    assert more_train[:5] == train


@pytest.mark.parametrize(
    ("changes", "fragment"),
    [
        ({"tasks": ("chain_summ",)}, "did you mean 'chain_sum'?"),
        ({"tasks": ("composite",)}, "mixture"),
        ({"tasks": ("countdown",)}, "runs the model's text as Python"),
        ({"tasks": ("chain_sum", "chain_sum")}, "twice"),
        ({"tasks": ("rubiks_cube",)}, "no reference answer"),
        ({"tasks": ("arc_agi",)}, "cannot score its rows after they were stored"),
        ({"task_options": {"chain_sum": {"max_trems": 3}}}, "max_trems"),
        ({"task_options": {"chain_sum": {"min_terms": 9, "max_terms": 2}}}, "AssertionError"),
        ({"completion": "{expresion} = {answer}"}, "did you mean 'expression'?"),
        ({"completion": "{answer"}, "is not a valid template"),
        ({"completion": "{}"}, "is not a valid template"),
        (
            # Sums of one digit and one term: there are ten questions, and 12 are requested.
            {"task_options": {"chain_sum": {"min_terms": 1, "max_terms": 1, "max_digits": 1}}},
            "too few different questions",
        ),
    ],
)
def test_unusable_reasoning_gym_tasks_are_refused(changes: Row, fragment: str) -> None:
    config = ReasoningGymData(num_train=9, num_validation=3).replace(**changes)
    with pytest.raises(DataError) as caught:
        draw(config, seed=0)
    assert fragment in str(caught.value)
    assert len(str(caught.value).splitlines()) < 10


def test_an_error_of_the_child_process_is_complete() -> None:
    with pytest.raises(DataError) as caught:
        load_rows(ReasoningGymData(tasks=("chain_summ",)), seed=0)
    assert caught.value.problem == "data.tasks: reasoning-gym has no task 'chain_summ'"
    assert caught.value.expected == "a name in its gallery"
    assert caught.value.fix == "did you mean 'chain_sum'?"


def _load_both(path: Path) -> list[Row]:
    train, validation = load_rows(FileData(train=str(path), validation=str(path)), seed=0)
    assert train == validation
    return train


def test_the_three_formats_read_alike(tmp_path: Path) -> None:
    records = [
        {"prompt": "two\nlines, \u00e9 \u2028 x", "answer": "007"},
        {"prompt": 'a "quote"', "answer": "1.50"},
    ]
    (tmp_path / "a.jsonl").write_text(
        "\n".join(json.dumps(record, ensure_ascii=False) for record in records) + "\n\n"
    )
    (tmp_path / "a.csv").write_text(
        '\ufeffprompt,answer\n"two\nlines, \u00e9 \u2028 x",007\n"a ""quote""",1.50\n'
    )
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "a.PARQUET")
    expected = [
        {
            "id": str(number),
            **record,
            "completion": record["answer"],
            "task": "file",
            "metadata": "{}",
        }
        for number, record in enumerate(records)
    ]
    for name in ("a.jsonl", "a.csv", "a.PARQUET"):
        rows = _load_both(tmp_path / name)
        assert [dict(sorted(row.items())) for row in rows] == [
            dict(sorted(row.items())) for row in expected
        ]


def test_given_columns_are_kept_numbers_become_text_and_gaps_are_filled(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(
        '{"prompt": "p", "answer": 46, "id": 7, "completion": "so 46", "task": "t", '
        '"metadata": {"k": 1}, "other": 0}\n{"prompt": "q", "answer": 0.5, "completion": null}\n'
    )
    assert _load_both(path) == [
        {
            "id": "7",
            "prompt": "p",
            "answer": "46",
            "completion": "so 46",
            "task": "t",
            # Unrecognized columns reach rewards through the metadata.
            "metadata": '{"k": 1, "other": 0}',
        },
        {
            "id": "1",
            "prompt": "q",
            "answer": "0.5",
            "completion": "0.5",
            "task": "file",
            "metadata": "{}",
        },
    ]


def test_prompts_may_have_no_answers(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "Tell a joke."}\n{"prompt": "And another."}\n')
    name = str(tmp_path / "a.jsonl")
    train, _ = load_rows(FileData(train=name, validation=name), seed=0)
    assert [(row["prompt"], row["answer"]) for row in train] == [
        ("Tell a joke.", ""),
        ("And another.", ""),
    ]
    frame = validate_rows(train, tokenizer=None, max_prompt_tokens=None, name="train")
    assert frame["answer"].tolist() == ["", ""]
    # If one row has an answer, rows without one are faults.
    mixed = [*train, {**train[0], "id": "2", "prompt": "1+1=", "answer": "2"}]
    with pytest.raises(DataError, match="answer is empty: rows 0, 1"):
        validate_rows(mixed, tokenizer=None, max_prompt_tokens=None, name="train")


@pytest.mark.parametrize(
    ("name", "content", "fragment"),
    [
        ("a.txt", b"x", "one of .jsonl, .csv, .parquet"),
        ("missing.jsonl", None, "does not exist"),
        ("a.jsonl", b'{"answer": "p"}\n', "lacks the column prompt"),
        ("a.csv", b"question,reply\na,b\n", "the column prompt and the column answer"),
        ("a.jsonl", b'{"prompt": "p", "answer": "1"}\n{broken\n', "line 2"),
        ("a.jsonl", b"[1]\n", "not an object"),
        ("a.jsonl", b"\xff\xfe", "cannot be read"),
        ("a.jsonl", b"[" * 100_000, "line 1"),
        ("a.csv", b'prompt,answer\n"open,1\n', "cannot be read"),
        ("a.parquet", b"PAR1", "cannot be read"),
    ],
)
def test_files_that_cannot_be_used_are_refused(
    tmp_path: Path, name: str, content: bytes | None, fragment: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        _load_both(tmp_path / name)
    assert fragment in str(caught.value)
    assert len(str(caught.value).splitlines()) < 10


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv"])
def test_an_empty_file_gives_no_rows_for_the_schema_to_refuse(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"")
    assert _load_both(tmp_path / name) == []


def test_a_megabyte_in_a_field_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt,answer\n" + "x" * 1_000_000 + ",1\n")
    assert len(_load_both(tmp_path / "a.csv")[0]["prompt"]) == 1_000_000


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("column", ["prompt", "answer", "completion", "id", "task"])
def test_invalid_numbers_are_refused_by_row(tmp_path: Path, column: str, value: float) -> None:
    rows: list[Row] = [
        {"prompt": f"{n}+1=", "answer": n + 1, "completion": n + 1} for n in range(4)
    ]
    rows[1][column] = rows[3][column] = value
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match=rf"{column} is (missing or null|not text): rows 1, 3"):
        DataModule.of(path)


@pytest.mark.parametrize("column", ["prompt", "answer", "completion"])
def test_a_nested_object_is_not_text(column: str) -> None:
    rows: list[Row] = [{"prompt": f"{n}+1=", "answer": "1", "completion": "1"} for n in range(4)]
    rows[2][column] = {"a": {"b": "1+1="}}
    with pytest.raises(DataError, match=f"{column} is not text: rows 2"):
        DataModule.of(rows)


def test_half_a_surrogate_pair_is_refused_by_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    bad = r'{"prompt": "\ud800=", "answer": "4"}'
    path.write_text('{"prompt": "1+1=", "answer": 2}\n' + bad + "\n" + bad + "\n")
    with pytest.raises(DataError, match="prompt holds half of a surrogate pair: rows 1, 2"):
        DataModule.of(path)


def test_a_column_that_occurs_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("prompt,answer,answer\n1+1=,2,3\n")
    with pytest.raises(DataError, match="two columns 'answer'"):
        DataModule.of(path)
    table = pa.table([["1+1="], ["2"], ["3"]], names=["prompt", "answer", "answer"])
    pq.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"cannot be read\n.*Multiple matches.*answer"):
        DataModule.of(tmp_path / "rows.parquet")
    path = tmp_path / "rows.arrow"
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(DataError, match="two columns 'answer'"):
        DataModule.of(path)
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "1+1=", "answer": 2}\n{"prompt": "2", "answer": 2, "answer": 3}\n')
    with pytest.raises(DataError, match="line 2: the key 'answer' occurs twice"):
        DataModule.of(path)


@pytest.mark.parametrize(
    "text",
    [
        '\ufeff[{"prompt": "1", "answer": "2"},\n {"prompt": "3", "answer": "4"}]\n',
        '{"version": 1, "data": [{"prompt": "1", "answer": "2"}, {"prompt": "3", "answer": "4"}]}',
        '{"prompt": "1", "answer": "2"}\n{"prompt": "3", "answer": "4"}\n',
    ],
)
def test_json_files_are_arrays_or_lines(tmp_path: Path, text: str) -> None:
    (tmp_path / "rows.json").write_text(text)
    (tmp_path / "dataset_infos.txt").write_text("{}")
    for source in (tmp_path / "rows.json", tmp_path):
        rows = read(source, seed=0).train
        assert [(row["prompt"], row["answer"]) for row in rows] == [("1", "2"), ("3", "4")]
    one = read(tmp_path / "rows.json", seed=0, form=RowFormat(max_rows=1)).train
    assert len(one) == 1


def test_a_single_object_is_one_row(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text('{"prompt": "1", "answer": "2"}')
    assert len(read(tmp_path / "rows.json", seed=0).train) == 1


def test_json_next_to_data_files_is_not_data(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"prompt": "1", "answer": "2"}\n')
    (tmp_path / "dataset_infos.json").write_text('{"default": {}}')
    assert len(read(tmp_path, seed=0).train) == 1


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("[1]", "element 0 is 1, not an object"),
        ("7", "neither an array nor an object"),
        ('[{"prompt": "1", "prompt": "2"}]', "'prompt' occurs twice"),
        ('[{"prompt": "1"},]', "cannot be read"),
        ("", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
    ],
)
def test_json_files_without_rows_are_refused(tmp_path: Path, text: str, fragment: str) -> None:
    (tmp_path / "rows.json").write_text(text)
    with pytest.raises(DataError, match=fragment):
        read(tmp_path / "rows.json", seed=0)
