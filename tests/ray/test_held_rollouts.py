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

from nemo_rl_core.algorithms import GRPOTrainer
from nemo_rl_core.distributed.session import ClusterSession
from nemo_rl_core.rollouts.engine import SingleTurnRollouts
from nemo_rl_core.rollouts.held import HeldSource
from nemo_rl_core.rollouts.records import RolloutRecords
from nemo_rl_core.trainers.fitting import TrainResult

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
    "loss": {"kl": {"kind": "k2", "beta": 0.5, "place": "in_reward"}},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "one optimizer step": {},
    "several optimizer steps": {"train_global_batch_size": 8},
    "without a reference": {"loss": {"kl": None}},
    "groups drawn again": {"dynamic_sampling": {"max_draws": 3}},
    "returns of tokens": {"advantage": {"kind": "reinforce_plus_plus"}},
    "returns of tokens less the KL": RETURNS,
}


def sevens(prompt: str, response: str) -> float:
    """Often not equal within a group of a model with random weights."""
    return response.count("7") + 0.1 * len(response)


def fit(model: Path, name: str, **settings: Any) -> TrainResult:
    trainer = GRPOTrainer.from_pretrained(model, **{**SETTINGS, **settings})
    return trainer.fit(PROMPTS, reward_fn=sevens, name=name)


def read_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rollouts as lists, with all their tokens, as multi-turn ones are."""
    monkeypatch.setattr(SingleTurnRollouts, "holds", False)


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
from pathlib import Path

from nemo_rl_core.algorithms import GRPOTrainer
from nemo_rl_core.rollouts.engine import SingleTurnRollouts
from nemo_rl_core.rollouts.records import RolloutRecords
from tests.ray.test_held_rollouts import PROMPTS, SETTINGS, sevens

def fitted(name):
    settings = SETTINGS | {
        "generation": {"backend": "hf", "max_new_tokens": 6, "num_engines": 2},
        "cluster": {"num_threads": 1, "num_workers": 2},
    }
    trainer = GRPOTrainer.from_pretrained(Path(sys.argv[1]), **settings)
    found = trainer.fit(PROMPTS, reward_fn=sevens, name=name)
    return found.metrics, RolloutRecords(found.folder / "rollouts").load(1)

held, ours = fitted("held")
SingleTurnRollouts.holds = False
here, theirs = fitted("here")
found = {"held": held, "here": here, "rollouts_are_equal": ours == theirs, "num": len(ours)}
print("FOUND " + json.dumps(found))
"""


@pytest.mark.thorough
def test_two_ranks_and_two_engines_learn_from_held_rollouts_as_from_others(
    tiny_model: Path, tmp_path: Path
) -> None:
    """The same samples in other micro-batches: sums are rounded otherwise, no more."""
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as place:
        done = subprocess.run(
            [sys.executable, "-c", TWO_RANKS, str(tiny_model)],
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "RAY_TMPDIR": place, "NEMO_RL_HOME": str(tmp_path)},
        )
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, done.stderr[-3000:]
    found = json.loads(lines[0].removeprefix("FOUND "))
    assert found["num"] == 16
    assert found["rollouts_are_equal"]  # as the advantages are, which are in the record
    ours, theirs = found["held"][0], found["here"][0]
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name


def weights(result: TrainResult) -> dict[str, torch.Tensor]:
    return load_file(next(iter(sorted(result.folder.rglob("model/*.safetensors")))))


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
