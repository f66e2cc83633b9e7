"""`train`: names, and mistakes that are detected before any worker starts."""

import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest

import nemo_rl_core
from nemo_rl_core import algorithms
from nemo_rl_core.algorithms.dpo import setup
from nemo_rl_core.algorithms.dpo.trainer import DPOTrainer
from nemo_rl_core.api.functional import get_algorithm, register_algorithm
from nemo_rl_core.data.loader import load_records
from nemo_rl_core.distributed import session as sessions
from nemo_rl_core.errors import ConfigError, DataError, NemoRLError
from nemo_rl_core.store.manifest import Manifest
from nemo_rl_core.store.store import Store
from nemo_rl_core.trainers.base import BaseTrainer
from nemo_rl_core.trainers.loop import RunSpec

REPOSITORY = Path(__file__).resolve().parents[3]
NAMES = ["sft", "dpo", "reward_model", "grpo", "async_grpo", "ppo", "distillation"]


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NEMO_RL_HOME", str(tmp_path / "store"))
    return tmp_path / "store"


@pytest.mark.parametrize("name", NAMES)
def test_algorithms_are_found_by_name(name: str) -> None:
    trainer = get_algorithm(name)
    assert issubclass(trainer, BaseTrainer)
    section = name.removeprefix("async_")  # another trainer for the same section
    assert trainer.algorithm == section
    assert section in trainer.settings_class.model_fields


def test_an_unknown_algorithm_lists_the_choices(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match="no algorithm 'gropo'") as caught:
        nemo_rl_core.train(tiny_model, [], algorithm="gropo")
    assert set(NAMES) <= set(str(caught.value.expected).split(", "))


def test_a_custom_algorithm_is_found() -> None:
    @register_algorithm("own_of_test_api")
    class Own(BaseTrainer[Any, Any]):
        def _train_step(self, batch: list[Any]) -> dict[str, float]:
            return {}

    assert get_algorithm("own_of_test_api") is Own


@pytest.mark.parametrize("package", [nemo_rl_core, algorithms])
def test_every_public_name_exists(package: Any) -> None:
    for name in package.__all__:
        assert callable(getattr(package, name)), name
    with pytest.raises(AttributeError, match="no attribute 'GROPTrainer'"):
        package.GROPTrainer  # noqa: B018


def test_public_names_are_shown() -> None:
    assert {"train", "GRPOTrainer", "DataModule"} <= set(dir(nemo_rl_core))


@pytest.mark.parametrize(
    "module", ["nemo_rl_core", "nemo_rl_core.algorithms", "nemo_rl_core.algorithms.dpo"]
)
def test_importing_loads_neither_torch_nor_ray(module: str) -> None:
    script = f"import sys, {module}; print(*sys.modules)"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    loaded = {name.split(".")[0] for name in done.stdout.split()}
    assert not loaded & {"torch", "ray", "vllm", "transformers", "pandas", "pydantic"}


def test_setup_creates_a_dpo_trainer() -> None:
    trainer = setup("a/model", num_pairs_per_step=4)
    assert isinstance(trainer, DPOTrainer)
    assert (trainer.model, trainer.config.num_pairs_per_step) == ("a/model", 4)


ROWS = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(9)]
ASKED = [{"prompt": f"{n}+1="} for n in range(9)]
SMALL = {"max_prompt_tokens": 16, "max_new_tokens": 8}
PAIRS = [{"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": "0"} for n in range(9)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "error", "match"),
    [
        ({"algorithm": "sft", "reward_fn": len}, ConfigError, "'sft' scores no completions"),
        ({"reward_fn": 0.5}, ConfigError, "not a reward"),
        ({"reward_fn": lambda prompt: 1.0}, ConfigError, "a prompt and a response"),
        ({"dataset": []}, DataError, "data set is empty"),
        ({"dataset": [{"question": "1+1="}]}, DataError, "lacks the column prompt"),
        ({"dataset": ASKED}, DataError, "lacks the column answer, which the environment 'exact'"),
        (
            {"dataset": ASKED, "reward_fn": lambda completion, answer: 1.0},
            DataError,
            "lacks the column answer, which reward_fn needs",
        ),
        (
            {"reward_fn": lambda completion, solution: 1.0},
            DataError,
            r"lacks the column solution, .*\n.*\n.* prompt, .*answer, task, id, metadata",
        ),
        (
            {"reward_fn": [lambda completion: 1.0], "reward_weights": [1.0, 2.0]},
            ConfigError,
            "one finite weight for each reward",
        ),
        (
            {"environment": {"kind": "python", "target": "none:E"}},
            ConfigError,
            "'none:E' cannot be",
        ),
        ({"dataset": "no/such/rows.jsonl"}, DataError, "no/such/rows.jsonl"),
        ({"dataset": PAIRS}, DataError, "no prompts with answers"),
        ({"dataset": ROWS, "algorithm": "dpo"}, DataError, "no preference pairs"),
        ({"num_prompts_per_step": 9}, DataError, "more rows than the data set has"),
        ({"validation": ROWS[:2]}, DataError, "validation"),  # those rows are trained on
        ({"max_prompt_tokens": 2}, DataError, "max_prompt_tokens"),
        ({"max_prompt_tokens": 250}, ConfigError, "longer than the model's context"),  # 256, and 8
        ({"model": "/no/such/model"}, NemoRLError, "/no/such/model"),
        ({"num_prompt_per_step": 8}, ConfigError, "no setting 'num_prompt_per_step'"),
        ({"num_prompts_per_step": 0}, ConfigError, "num_prompts_per_step"),
    ],
)
def test_mistakes_are_found_before_any_worker_starts(
    asked: dict[str, Any], error: type[Exception], match: str, tiny_model: Path
) -> None:
    running = dict(sessions._sessions)
    settings = {} if "algorithm" in asked else SMALL
    with pytest.raises(error, match=match):
        nemo_rl_core.train(**{**settings, "model": tiny_model, "dataset": ROWS, **asked})
    assert sessions._sessions == running
    made = Store.default().artifacts
    assert not [*made.glob("grpo-*"), *made.glob("sft-*"), *made.glob("dpo-*")]


class RowsReadError(Exception):
    """Carries the rows of a run that ends before training."""


@register_algorithm("rows_of_test_api")
class ReadsAlone(BaseTrainer[Any, Any]):
    def _train_step(self, batch: list[Any]) -> dict[str, float]:
        return {}

    def run(self, spec: RunSpec, **_: Any) -> NoReturn:
        raise RowsReadError(load_records(spec.train), Manifest.read(spec.train).config["read_as"])


GSM8K = [{"question": f"{n}+1=", "answer": f"one more\n#### {n + 1}"} for n in range(4)]


def test_train_reads_columns_by_its_options(tiny_model: Path) -> None:
    with pytest.raises(RowsReadError) as caught:
        nemo_rl_core.train(tiny_model, GSM8K, algorithm="rows_of_test_api")
    rows, read_as = caught.value.args
    assert read_as.startswith("gsm8k")
    assert {row["prompt"]: row["answer"] for row in rows}.items() <= {
        "0+1=": "1",
        "1+1=": "2",
        "2+1=": "3",
        "3+1=": "4",
    }.items()
    with pytest.raises(RowsReadError) as caught:
        nemo_rl_core.train(
            tiny_model,
            GSM8K,
            algorithm="rows_of_test_api",
            columns={"question": "prompt", "answer": "answer"},
            answer_pattern=r"(\w+) more",
            prompt_template="1+{prompt}",
        )
    (row, *_), _ = caught.value.args
    assert (row["prompt"][:2], row["answer"]) == ("1+", "one")


def test_train_refuses_invalid_data_before_workers_start(tiny_model: Path) -> None:
    with pytest.raises(DataError, match="no answer of the pattern 'boxed'"):
        nemo_rl_core.train(tiny_model, GSM8K, answer_pattern="boxed")
    trainer = get_algorithm("grpo").from_pretrained(tiny_model)
    with pytest.raises(ConfigError, match="did you mean 'columns'") as caught:
        trainer.fit(GSM8K, colums={"question": "prompt"})
    assert "reward_fn" in str(caught.value)
