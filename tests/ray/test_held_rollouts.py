"""Rollouts whose tokens stay in the object store: trained on, they give what rollouts here give."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from nemo_rl_core.algorithms import GRPOTrainer, PPOTrainer
from nemo_rl_core.distributed.session import ClusterSession
from nemo_rl_core.rollouts.engine import RolloutEngine
from nemo_rl_core.rollouts.held import HeldSource
from nemo_rl_core.rollouts.records import RolloutRecords
from nemo_rl_core.trainers.fitting import TrainResult
from tests.conversations import ROOM, Chat

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
"""A trainer and its settings, by name."""


def sevens(prompt: str, response: str) -> float:
    """Often not equal within a group of a model with random weights."""
    return response.count("7") + 0.1 * len(response)


def fit(
    model: Path, name: str, kind: Any = GRPOTrainer, reward: Any = sevens, **settings: Any
) -> TrainResult:
    trainer = kind.from_pretrained(model, **{**SETTINGS, **settings})
    found: TrainResult = trainer.fit(PROMPTS, reward_fn=reward, name=name)
    return found


def read_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rollouts as lists, with all their tokens."""
    monkeypatch.setattr(RolloutEngine, "holds", False)


@contextmanager
def counted_sources() -> Iterator[list[HeldSource]]:
    found: list[HeldSource] = []
    original = HeldSource.__init__

    def noted(self: HeldSource, completions: Any) -> None:
        found.append(self)
        original(self, completions)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HeldSource, "__init__", noted)
        yield found


TWO_RANKS = """
import json, sys
from dataclasses import replace
from pathlib import Path

from nemo_rl_core import algorithms
from nemo_rl_core.rollouts.engine import RolloutEngine
from nemo_rl_core.rollouts.records import RolloutRecords
from tests.conversations import Chat
from tests.ray.test_held_rollouts import ON_RANKS, PROMPTS, SETTINGS, sevens

def fitted(variant, name):
    trainer, own = ON_RANKS[variant]
    settings = SETTINGS | own | {
        "generation": {"backend": "hf", "max_new_tokens": 6, "num_engines": 2},
        "cluster": {"num_threads": 1, "num_workers": 2},
    }
    made = getattr(algorithms, trainer).from_pretrained(Path(sys.argv[1]), **settings)
    reward = Chat() if variant == "conversations" else sevens
    found = made.fit(PROMPTS, reward_fn=reward, name=f"{variant} {name}")
    return found.metrics, RolloutRecords(found.folder / "rollouts").load(1)

held = {variant: fitted(variant, "held") for variant in ON_RANKS}
RolloutEngine.holds = False
here = {variant: fitted(variant, "here") for variant in ON_RANKS}
found = {}
for variant in ON_RANKS:
    (held_metrics, ours), (metrics, theirs) = held[variant], here[variant]
    bare = [[replace(each, advantage=None) for each in rollouts] for rollouts in (ours, theirs)]
    found[variant] = {
        "held": held_metrics,
        "here": metrics,
        "rollouts_are_equal": bare[0] == bare[1],
        "advantages": [[each.advantage for each in rollouts] for rollouts in (ours, theirs)],
    }
print("FOUND " + json.dumps(found))
"""


@pytest.fixture(scope="module")
def on_two_ranks(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """Of each variant, the metrics and the first step's records, held and read here."""
    home = tmp_path_factory.mktemp("two_ranks")
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as place:
        done = subprocess.run(
            [sys.executable, "-c", TWO_RANKS, str(tiny_model)],
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "RAY_TMPDIR": place, "NEMO_RL_HOME": str(home)},
        )
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, done.stderr[-3000:]
    found: dict[str, dict[str, Any]] = json.loads(lines[0].removeprefix("FOUND "))
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("variant", ON_RANKS)
def test_two_ranks_and_two_engines_learn_from_held_rollouts_as_from_others(
    variant: str, on_two_ranks: dict[str, dict[str, Any]]
) -> None:
    """The same samples in other micro-batches: sums are rounded otherwise, no more."""
    found = on_two_ranks[variant]
    assert found["rollouts_are_equal"]
    advantages, expected = found["advantages"]
    assert len(advantages) == 16
    assert any(expected)
    if variant in {"groups", "conversations"}:  # whose advantages the controller computes
        assert advantages == expected
    assert [each is None for each in advantages] == [each is None for each in expected]
    advantages, expected = ([e for e in each if e is not None] for each in (advantages, expected))
    assert advantages == pytest.approx(expected, rel=1e-3, abs=1e-5)
    ours, theirs = found["held"][0], found["here"][0]
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name


def weights(result: TrainResult) -> dict[str, torch.Tensor]:
    """Of the policy and, in PPO, of the critic."""
    return {
        f"{path.relative_to(result.folder)} {name}": each
        for path in sorted(result.folder.rglob("model/*.safetensors"))
        for name, each in load_file(path).items()
    }


@pytest.mark.parametrize("variant", VARIANTS)
def test_held_rollouts_train_to_the_same_bits(
    session: ClusterSession, tiny_model: Path, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with counted_sources() as sources:
        held = fit(tiny_model, "held", **VARIANTS[variant])
    assert len(sources) >= 2  # one a step at least
    read_here(monkeypatch)
    with counted_sources() as sources:
        here = fit(tiny_model, "here", **VARIANTS[variant])
    assert not sources
    assert held.metrics == here.metrics
    ours, theirs = weights(held), weights(here)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    for step in (1, 2):
        ours_read, theirs_read = (
            RolloutRecords(result.folder / "rollouts").load(step) for result in (held, here)
        )
        assert ours_read == theirs_read


def test_records_of_many_tokens_are_written_by_a_task(
    session: ClusterSession, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = fit(tiny_model, "written here")
    monkeypatch.setitem(RolloutRecords.__init__.__kwdefaults__, "most_tokens_here", 0)
    elsewhere = fit(tiny_model, "written elsewhere")
    for step in (1, 2):
        name = Path("rollouts") / f"step_{step:06d}.parquet"
        assert (elsewhere.folder / name).read_bytes() == (here.folder / name).read_bytes()
