"""Bad input to the real command is refused early, in a few lines, with the fix."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_core.distributed import session as sessions

Finished = Any
ROWS = [{"prompt": f"{left}+1=", "answer": str(left + 1)} for left in range(8)]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def refused(run_grpo: Callable[..., Finished]) -> Callable[..., Finished]:
    """Runs a recipe that must be refused before any worker starts."""

    def run(recipe: dict[str, Any]) -> Finished:
        before = dict(sessions._sessions)
        finished = run_grpo(recipe)
        assert sessions._sessions == before
        started = {line.split()[0] for line in finished.output.splitlines() if "started" in line}
        assert started <= {"prepare_data", "prepare_model"}
        assert finished.exit_code == (1 if started else 2), finished.output
        assert "Traceback" not in finished.output
        assert 'File "' not in finished.output
        assert len(finished.message) < 10, finished.output
        return finished

    return run


def runs(store: Path) -> list[Path]:
    return list((store / "runs").glob("*/run.log"))


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (
            {"grpo": {"learning_rat": 0.1}},
            [
                "unknown key 'grpo.learning_rat'",
                "got: learning_rat",
                "did you mean 'learning_rate'?",
            ],
        ),
        (
            {"grpo": {"num_generations_per_prompt": 1}},
            ["num_generations_per_prompt is 1", "group_normalized", "use at least 2", "fix:"],
        ),
        (
            {"grpo": {"train_global_batch_size": 7}},
            ["train_global_batch_size (7) must divide", "fix:"],
        ),
        (
            {"data": {"kind": "arithmetic", "num_train": 10_000}},
            ["only 10000 different sums exist", "fix:"],
        ),
        (
            {"data": {"num_train": 9}},
            ["a step takes more rows than the data has", "at most 9", "got: 32", "fix:"],
        ),
        (
            {"cluster": {"shape": "lapto"}},
            ["cluster.shape", "'laptop', 'one_gpu', 'node_8gpu' or 'cluster'", "got:"],
        ),
        ({"recipe": "grpo_arithmetik"}, ["no recipe 'grpo_arithmetik'", "grpo_arithmetic"]),
        (
            {"model": {"name": "/no/such/folder"}},
            ["folder does not exist", "expected:", "got: /no/such/folder", "fix: correct"],
        ),
        (
            {"generation": {"max_new_tokens": 241}},
            ["longer than the model's context", "<= 256", "got: 16 + 241", "fix:"],
        ),
        (
            {"data": {"kind": "file", "train": "no.jsonl", "validation": "no.jsonl"}},
            ["names missing files", "expected:", "data.train: no file /", "/no.jsonl", "fix:"],
        ),
        (
            {"environment": {"kind": "reward_model", "model": "some/model"}},
            ["'reward_model' gives scores, which do not tell right from wrong", "fix: set"],
        ),
        (
            {"grpo": {"preset": "dapo"}},
            ["overlong.buffer_tokens (4096) is more than generation.max_new_tokens", "(8)", "fix:"],
        ),
        (
            {"grpo": {"preset": "gdpo"}},
            ["expected: an environment with 2 rewards", "got: 1 from the environment 'exact'"],
        ),
        (
            {"training": {"tensor_parallel_size": 2}},
            ["1 workers cannot hold complete copies", "fix: set cluster.num_workers to 2"],
        ),
        (
            {"environment": {"kind": "reward_model"}},
            ["does not say which reward model scores", "expected:", "got: no model", "fix:"],
        ),
        (
            {"environment": {"kind": "function", "target": "no_such_module:reward"}},
            ["no_such_module", "cannot be imported", "expected:", "got:", "fix:"],
        ),
        (
            {"environment": {"kind": "function", "target": "json:dumb"}},
            ["module 'json' has no function 'dumb'", "expected: one of dump", "got:", "fix:"],
        ),
    ],
)
def test_invalid_recipes_are_refused_before_a_run_begins(
    refused: Callable[..., Finished], own_store: Path, recipe: dict[str, Any], words: list[str]
) -> None:
    finished = refused(recipe)
    assert finished.exit_code == 2
    for word in words:
        assert word in finished.text
    assert runs(own_store) == []


def test_missing_gpus_are_refused_at_once(
    refused: Callable[..., Finished], own_store: Path
) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    finished = refused({"cluster": {"shape": "one_gpu"}})
    assert finished.exit_code == 2
    for word in ("expected: 1 GPU", "got: 0 GPU", "fix:", "laptop"):
        assert word in finished.text
    assert runs(own_store) == []


def test_a_model_without_a_tokenizer_is_refused(
    refused: Callable[..., Finished], own_store: Path, tiny_model: Path, tmp_path: Path
) -> None:
    import shutil

    shutil.copytree(tiny_model, tmp_path / "model")
    for path in (tmp_path / "model").glob("tokenizer*"):
        path.unlink()
    finished = refused({"model": {"name": str(tmp_path / "model")}})
    for word in ("has no tokenizer_config.json", "expected:", "got:", "fix:", "save_pretrained"):
        assert word in finished.text
    assert runs(own_store) == []


def test_prompts_longer_than_the_context_of_a_model_folder_are_refused(
    refused: Callable[..., Finished], own_store: Path, tiny_model: Path
) -> None:
    data = {"kind": "arithmetic", "max_prompt_tokens": 1000}
    finished = refused({"model": {"name": str(tiny_model)}, "data": data})
    assert "longer than the model's context" in finished.text
    assert runs(own_store) == []


@pytest.mark.parametrize("text", ["{seed: }", "no-such-file.yaml"])
def test_recipes_that_are_neither_json_nor_a_file_are_refused(
    run_grpo: Callable[..., Finished], own_store: Path, text: str
) -> None:
    finished = run_grpo(text)
    assert finished.exit_code == 2
    assert "Invalid value for '--config'" in finished.text
    assert text in finished.text
    assert "Traceback" not in finished.output
    assert runs(own_store) == []


def test_prompts_without_answers_are_refused_where_the_reward_needs_them(
    refused: Callable[..., Finished], own_store: Path, tmp_path: Path
) -> None:
    rows = [{"prompt": "1+1="}, {"prompt": "2+2="}]
    files = {
        "train": write_rows(tmp_path / "train.jsonl", rows),
        "validation": write_rows(tmp_path / "validation.jsonl", [{"prompt": "0=", "answer": "0"}]),
    }
    finished = refused({"data": {"kind": "file", "max_prompt_tokens": 16, **files}})
    assert finished.exit_code == 2
    for word in (
        "the train data set lacks the column answer, which the environment 'exact' needs",
        "expected: the column answer in every row",
        "got: answer: missing from all 2 rows. Existing columns: prompt",
        "fix: add the column to the data, or choose a reward that does not need it",
    ):
        assert word in finished.text
    assert runs(own_store) == []


LONG = "1+" * 20 + "1="


@pytest.mark.parametrize(
    ("train", "words"),
    [
        ([], ["the train data set is empty", "expected: at least one row", "fix:"]),
        (
            [*ROWS, {"prompt": " ", "answer": "1"}, {"prompt": "", "answer": "1"}],
            ["prompt is empty: rows 8, 9", "fix: correct or remove these rows of", "train.jsonl"],
        ),
        (
            [*ROWS, {"prompt": LONG, "answer": "21"}],
            ["prompt has more than 16 tokens (max_prompt_tokens): rows 8", "fix:"],
        ),
        (
            [*ROWS, {"prompt": "9+9="}],
            ["answer is missing or null: rows 8", "fix:"],
        ),
        ([*ROWS, ROWS[0]], ["prompt occurs twice: rows 8", "fix:"]),
    ],
)
def test_bad_rows_are_named_before_a_worker_starts(
    refused: Callable[..., Finished],
    own_store: Path,
    tmp_path: Path,
    train: list[dict[str, Any]],
    words: list[str],
) -> None:
    files = {
        "train": write_rows(tmp_path / "train.jsonl", train),
        "validation": write_rows(tmp_path / "validation.jsonl", [{"prompt": "0=", "answer": "0"}]),
    }
    small = {"kind": "from_config", "hidden_size": 32, "num_heads": 1, "num_kv_heads": 1}
    recipe = {
        "model": small,
        "data": {"kind": "file", "max_prompt_tokens": 16, **files},
        "sft": {"global_batch_size": 4},
        "grpo": {"num_prompts_per_step": 4},
    }
    finished = refused(recipe)
    assert finished.exit_code == 1
    for word in words:
        assert word in finished.text
    # The run had begun: its trace is in the log, which the message names.
    (log,) = runs(own_store)
    assert "log:" in finished.text
    assert log.parent.name in finished.text.replace(" ", "")  # the frame breaks long lines
    assert "Traceback" in log.read_text()
    assert "DataError" in log.read_text()
    # Completed work is kept: the model is not created again once the rows are fixed.
    assert list((own_store / "artifacts").glob("prepare_model-*"))
