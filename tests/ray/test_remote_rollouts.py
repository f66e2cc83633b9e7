"""Training on columns that stay in the object store equals training on local ones."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from nemo_rl_core.algorithms import GRPOTrainer, PPOTrainer
from nemo_rl_core.distributed.session import ClusterSession
from nemo_rl_core.rollouts.records import RolloutRecords
from nemo_rl_core.trainers.fit.fitting import TrainResult
from tests.conversations import ROOM, Chat
from tests.unit.algorithms.grpo.test_remote_training import read_locally

PROMPTS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(3, 9) for b in range(5)]
SETTINGS: dict[str, Any] = {
    "generation": {"max_new_tokens": 6, "kv_cache_gib": 1, "max_num_seqs": 64},
    "max_prompt_tokens": 16,
    "cluster": {"num_threads": 1},
    "save_every_num_steps": 4,
    "learning_rate": 0.01,
    "num_prompts_per_step": 4,
    "num_generations_per_prompt": 4,
    "num_steps_per_iteration": 2,
}
RETURNS: dict[str, Any] = {
    "advantage": {"kind": "reinforce_plus_plus"},
    "loss": {"kl": {"beta": 0.5, "place": "in_reward"}},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "one optimizer step": {},
    "several optimizer steps": {"train_global_batch_size": 8},
    "without a reference": {"loss": {"kl": None}},
    "groups drawn again": {"dynamic_sampling": {"max_draws": 3}},
    "returns of tokens": {"advantage": {"kind": "reinforce_plus_plus"}},
    "returns of tokens less the KL": RETURNS,
    "PPO": {"kind": PPOTrainer, "train_global_batch_size": 8},
    "conversations": {"reward": Chat(), "rollouts": ROOM},
    "PPO of conversations": {"kind": PPOTrainer, "reward": Chat(), "rollouts": ROOM},
}
ON_RANKS: dict[str, tuple[str, dict[str, Any]]] = {
    "groups": ("GRPOTrainer", {}),
    "returns": ("GRPOTrainer", {"advantage": {"kind": "reinforce_plus_plus_baseline"}}),
    "returns less the KL": ("GRPOTrainer", RETURNS),
    "conversations": ("GRPOTrainer", {"rollouts": ROOM}),
    "PPO": ("PPOTrainer", {"train_global_batch_size": 8}),
}
"""Trainers and their settings by name."""


def sevens(prompt: str, response: str) -> float:
    """Often varies within a group of a model with random weights."""
    return response.count("7") + 0.1 * len(response)


def fit(
    model: Path, name: str, kind: Any = GRPOTrainer, reward: Any = sevens, **settings: Any
) -> TrainResult:
    trainer = kind.from_pretrained(model, **{**SETTINGS, **settings})
    found: TrainResult = trainer.fit(PROMPTS, reward_fn=reward, name=name)
    return found


TWO_RANKS = """
import json, sys
from dataclasses import replace
from pathlib import Path

from pytest import MonkeyPatch

from nemo_rl_core import algorithms
from nemo_rl_core.rollouts.records import RolloutRecords
from tests.conversations import Chat
from tests.ray.test_remote_rollouts import ON_RANKS, PROMPTS, SETTINGS, sevens
from tests.unit.algorithms.grpo.test_remote_training import read_locally

def fitted(variant, name):
    trainer, changes = ON_RANKS[variant]
    settings = SETTINGS | changes | {
        "generation": {"backend": "hf", "max_new_tokens": 6, "num_engines": 2},
        "cluster": {"num_threads": 1, "num_workers": 2},
    }
    made = getattr(algorithms, trainer).from_pretrained(Path(sys.argv[1]), **settings)
    reward = Chat() if variant == "conversations" else sevens
    result = made.fit(PROMPTS, reward_fn=reward, name=f"{variant} {name}")
    return result.metrics, RolloutRecords(result.folder / "rollouts").load(1)

remote = {variant: fitted(variant, "remote") for variant in ON_RANKS}
read_locally(MonkeyPatch())
local = {variant: fitted(variant, "local") for variant in ON_RANKS}
results = {}
for variant in ON_RANKS:
    (remote_metrics, ours), (local_metrics, theirs) = remote[variant], local[variant]
    bare = [[replace(each, advantage=None) for each in rollouts] for rollouts in (ours, theirs)]
    results[variant] = {
        "remote": remote_metrics,
        "local": local_metrics,
        "rollouts_are_equal": bare[0] == bare[1],
        "advantages": [[each.advantage for each in rollouts] for rollouts in (ours, theirs)],
    }
print("FOUND " + json.dumps(results))
"""


@pytest.fixture(scope="module")
def on_two_ranks(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """Metrics and records of the first step by variant, with remote and local columns."""
    home = tmp_path_factory.mktemp("two_ranks")
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as folder:
        done = subprocess.run(
            [sys.executable, "-c", TWO_RANKS, str(tiny_model)],
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "RAY_TMPDIR": folder, "NEMO_RL_HOME": str(home)},
        )
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, done.stderr[-3000:]
    results: dict[str, dict[str, Any]] = json.loads(lines[0].removeprefix("FOUND "))
    return results


@pytest.mark.thorough
@pytest.mark.parametrize("variant", ON_RANKS)
def test_two_ranks_and_two_engines_train_alike_on_remote_rollouts(
    variant: str, on_two_ranks: dict[str, dict[str, Any]]
) -> None:
    """The same samples in other micro-batches: only the rounding of sums differs."""
    results = on_two_ranks[variant]
    assert results["rollouts_are_equal"]
    advantages, expected = results["advantages"]
    assert len(advantages) == 16
    assert any(expected)
    if variant in {"groups", "conversations"}:  # their advantages come from the controller
        assert advantages == expected
    assert [each is None for each in advantages] == [each is None for each in expected]
    advantages, expected = ([e for e in each if e is not None] for each in (advantages, expected))
    assert advantages == pytest.approx(expected, rel=1e-3, abs=1e-5)
    ours, theirs = results["remote"][0], results["local"][0]
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name


def weights(result: TrainResult) -> dict[str, torch.Tensor]:
    """Returns the weights of the policy and, in PPO, of the critic."""
    return {
        f"{path.relative_to(result.folder)} {name}": each
        for path in sorted(result.folder.rglob("model/*.safetensors"))
        for name, each in load_file(path).items()
    }


def recorded(result: TrainResult, step: int) -> list[dict[str, Any]]:
    """Returns the rows of a step's record: logprobs of engine and trainer."""
    path = result.folder / "rollouts" / f"step_{step:06d}.parquet"
    return pq.read_table(path, columns=["error", "logprobs", "trainer_logprobs"]).to_pylist()


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_remote_rollouts_train_bitwise_identically(
    session: ClusterSession, tiny_model: Path, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = fit(tiny_model, "remote", **VARIANTS[variant])
    read_locally(monkeypatch)
    local = fit(tiny_model, "local", **VARIANTS[variant])
    assert remote.metrics == local.metrics
    ours, theirs = weights(remote), weights(local)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    for step in (1, 2):
        ours_read, theirs_read = (
            RolloutRecords(result.folder / "rollouts").load(step) for result in (remote, local)
        )
        assert ours_read == theirs_read
        ours_rows, theirs_rows = (recorded(result, step) for result in (remote, local))
        assert ours_rows == theirs_rows


@pytest.mark.slow
def test_records_of_many_tokens_are_written_by_a_task(
    session: ClusterSession, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = fit(tiny_model, "written here")
    monkeypatch.setitem(RolloutRecords.__init__.__kwdefaults__, "max_local_tokens", 0)
    elsewhere = fit(tiny_model, "written elsewhere")
    for row in recorded(here, 1):  # before any step, by the same model
        engine = [] if row["error"] else row["logprobs"]
        assert row["trainer_logprobs"] == pytest.approx(engine, abs=1e-4)
    for step in (1, 2):
        name = Path("rollouts") / f"step_{step:06d}.parquet"
        assert (elsewhere.folder / name).read_bytes() == (here.folder / name).read_bytes()
