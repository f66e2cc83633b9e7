"""Runs the reference documents' examples of algorithms, trainers, rewards and callbacks.

`nemo_rl` is spelled `nemo_rl_core`; a tiny model and rows of ours replace those of the hub.
Examples of backends, clusters, engines and converters have separate tests.
"""

import importlib
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import nemo_rl_core
from nemo_rl_core import GRPOTrainer, TrainResult, algorithms
from nemo_rl_core.api.functional import _ALGORITHM_REGISTRY
from nemo_rl_core.distributed.session import ClusterSession
from nemo_rl_core.environments import FunctionalRewardWrapper
from nemo_rl_core.environments.interfaces import EnvironmentInterface, EnvironmentReturn
from nemo_rl_core.errors import ConfigError
from nemo_rl_core.trainers.callbacks import Callback

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(3, 9) for b in range(7)]
PAIRS = [{"prompt": r["prompt"], "chosen": r["answer"], "rejected": "0"} for r in ROWS]
# Small values where the documents use defaults; the engine is that of conftest.py.
OFFLINE = {"cluster": {"num_threads": 1}}
SMALL = {
    **OFFLINE,
    "generation": {"max_new_tokens": 6, "kv_cache_gib": 1, "max_num_seqs": 64},
    "max_prompt_tokens": 16,
    "num_generations_per_prompt": 2,
    "num_steps_per_iteration": 1,
}


def score(prompt: str, response: str) -> float:
    return len(response) / 10


def my_reward(prompt: str, response: str) -> float:
    return 1.0 if "7" in response else 0.0


def batch_reward(prompts: list[str], responses: list[str]) -> list[float]:
    return [score(p, r) for p, r in zip(prompts, responses, strict=True)]


class MyEnvironment(EnvironmentInterface):
    """An environment that scores complete conversations."""

    def step(self, message_log_batch: Any, metadata: Any) -> EnvironmentReturn:
        rewards = [score(log[0]["content"], log[-1]["content"]) for log in message_log_batch]
        return EnvironmentReturn(
            observations=[],
            metadata=[None] * len(message_log_batch),
            next_stop_strings=[None] * len(message_log_batch),
            rewards=torch.tensor(rewards),
            terminateds=torch.ones(len(message_log_batch), dtype=torch.bool),
            answers=None,
        )

    def global_post_process_and_metrics(self, batch: Any) -> Any:
        return batch, {"mean_reward": batch["rewards"].mean().item()}


def test_five_lines(session: ClusterSession, tiny_model: Path) -> None:
    result = nemo_rl_core.train(
        model=str(tiny_model),
        dataset=ROWS,
        reward_fn=lambda p, r: 1.0 if "7" in r else 0.0,
        num_prompts_per_step=4,
        **SMALL,
    )
    assert isinstance(result, TrainResult)
    assert 0 <= result.metrics[0]["reward"] <= 1
    assert (result.checkpoint / "model.safetensors").is_file()
    assert result.lineage_id.startswith("grpo-")


def test_from_pretrained(
    session: ClusterSession,
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import pandas as pd

    (tmp_path / "my-dataset").mkdir()
    pd.DataFrame(ROWS).to_parquet(tmp_path / "my-dataset" / "rows.parquet")
    monkeypatch.chdir(tmp_path)
    trainer = GRPOTrainer.from_pretrained(str(tiny_model), num_prompts_per_step=32, **SMALL)
    result = trainer.fit(dataset="my-dataset", reward_fn=my_reward)
    rollouts = pd.read_parquet(result.folder / "rollouts" / "step_000001.parquet")
    assert len(rollouts) == 64  # 32 prompts, 2 completions each
    assert rollouts["reward"].tolist() == [float("7" in text) for text in rollouts["completion"]]


@pytest.mark.parametrize(
    ("make", "expected_reward"),
    [
        (lambda: my_reward, my_reward),
        (lambda: FunctionalRewardWrapper(batch_reward, name="batch_scorer"), score),
        (MyEnvironment, score),
    ],
    ids=["callable", "wrapper", "environment"],
)
def test_three_ways_to_a_reward(
    session: ClusterSession,
    tiny_model: Path,
    make: Callable[[], Any],
    expected_reward: Callable[[str, str], float],
) -> None:
    import pandas as pd

    trainer = GRPOTrainer.from_pretrained(tiny_model, num_prompts_per_step=4, **SMALL)
    result = trainer.fit(dataset=ROWS, reward_fn=make())
    rollouts = pd.read_parquet(result.folder / "rollouts" / "step_000001.parquet")
    expected = [
        expected_reward(*pair) for pair in zip(rollouts.prompt, rollouts.completion, strict=True)
    ]
    assert rollouts["reward"].tolist() == pytest.approx(expected)


def test_callbacks(
    session: ClusterSession, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class MyCallback(Callback):
        def on_epoch_end(self, trainer: Any, epoch: int, metrics: Any) -> None:
            print(f"Epoch {epoch}: {metrics['loss']}")  # noqa: T201

    class LoggingCallback(Callback):
        def on_step_end(self, trainer: Any, step: int, metrics: Any) -> None:
            if step % 2 == 0:
                print(f"Step {step}: loss={metrics['loss']:.4f}")  # noqa: T201

    trainer = algorithms.SFTTrainer.from_pretrained(
        tiny_model, num_steps=4, global_batch_size=20, **OFFLINE
    )
    result = trainer.fit(ROWS, callbacks=[MyCallback(), LoggingCallback()])
    losses = [step["loss"] for step in result.metrics]
    # 40 rows are trained on (2 of 42 are held out), so an epoch has two steps.
    lines = [line for line in capsys.readouterr().out.splitlines() if ": " in line]
    assert [line for line in lines if line.startswith("Epoch")] == [
        f"Epoch 0: {losses[1]}",
        f"Epoch 1: {losses[3]}",
    ]
    assert [line for line in lines if line.startswith("Step")] == [
        f"Step 2: loss={losses[1]:.4f}",
        f"Step 4: loss={losses[3]:.4f}",
    ]


def test_setup_and_dpo_train(session: ClusterSession, tiny_model: Path) -> None:
    from nemo_rl_core.algorithms.dpo import dpo_train
    from nemo_rl_core.algorithms.dpo import setup as dpo_setup

    trainer = dpo_setup(str(tiny_model), num_steps_per_iteration=1, num_pairs_per_step=4, **OFFLINE)
    result = dpo_train(trainer, PAIRS)
    assert result.metrics[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)


def test_losses_are_importable_next_to_the_trainers(
    session: ClusterSession, make_policy: Any
) -> None:
    from nemo_rl_core.algorithms import DPOLossFn, GRPOLossFn
    from nemo_rl_core.distributed.batched_data_dict import collate

    policy = make_policy()
    batch = collate([(1, 5, 6), (1, 5, 7)], [(False, True, True)] * 2)
    logprobs = policy.get_logprobs(batch)["logprobs"]
    pairs = {
        "pair_ids": torch.zeros(2, dtype=torch.int64),
        "is_chosen": torch.tensor([True, False]),
        "reference_logprobs": logprobs,
    }
    batch.update(pairs)
    assert policy.train(batch, DPOLossFn())["loss"] == pytest.approx(math.log(2), abs=1e-6)

    policy = make_policy()
    group = {
        "advantages": torch.tensor([[1.0], [-1.0]]).expand(2, 2),
        "prev_logprobs": logprobs,
        "generation_logprobs": logprobs,
    }
    # The ratios are 1, so the advantages cancel each other.
    batch.update(group)
    assert policy.train(batch, GRPOLossFn())["loss"] == pytest.approx(0.0, abs=1e-6)


def test_a_custom_loss_is_a_function(session: ClusterSession, make_policy: Any) -> None:
    from nemo_rl_core.distributed.batched_data_dict import collate

    def likelihood(
        next_token_logprobs: torch.Tensor,
        batch: Any,
        *,
        global_valid_seqs: torch.Tensor,
        global_valid_tokens: torch.Tensor,
    ) -> Any:
        chosen = torch.where(batch["token_mask"], next_token_logprobs, 0.0)
        loss = -chosen.sum() / global_valid_tokens
        return loss, {"loss": loss.detach()}

    policy = make_policy()
    batch = collate([(1, 5, 6), (1, 7)], [(False, True, True), (False, True)])
    mean = policy.get_logprobs(batch)["logprobs"][batch["token_mask"]].mean().item()
    first = policy.train(batch, likelihood)["loss"]
    assert first == pytest.approx(-mean, rel=1e-5)
    assert policy.train(batch, likelihood)["loss"] < first


MYALGO = {
    "config.py": '''
class MyAlgoConfig(dict):
    """Section `myalgo`."""
''',
    "trainer.py": '''
import torch

from nemo_rl_core.algorithms.sft.loss import NLLLoss
from nemo_rl_core.data.chat import supervised_example
from nemo_rl_core.distributed.batched_data_dict import collate
from nemo_rl_core.data.pretrained import load_tokenizer
from nemo_rl_core.trainers.base import BaseTrainer


class MyAlgoTrainer(BaseTrainer):
    """My custom algorithm trainer."""

    @classmethod
    def _build_config_from_pretrained(cls, model, **kwargs):
        config = super()._build_config_from_pretrained(model, **kwargs)
        config["myalgo"] = {
            "my_param": kwargs.pop("my_param", 1.0),
        }
        return config

    def __init__(self, config):
        super().__init__(config)
        self._myalgo_config = config.get("myalgo", {})

    def _train_step(self, batch):
        tokenizer = load_tokenizer(self.model)
        rows = [supervised_example(tokenizer, row["prompt"], row["completion"]) for row in batch]
        data = collate([row.token_ids for row in rows], [row.loss_mask for row in rows])
        before = self._compute_loss(data, self.policy.get_logprobs(data)["logprobs"])
        return {**self.policy.train(data, NLLLoss()), "weighted_loss": before.item()}

    def _compute_loss(self, batch, outputs):
        mask = batch["token_mask"]
        return -self._myalgo_config["my_param"] * outputs[mask].mean()
''',
    "__init__.py": """
from nemo_rl_core.algorithms.myalgo.config import MyAlgoConfig
from nemo_rl_core.algorithms.myalgo.trainer import MyAlgoTrainer
""",
}


@pytest.fixture
def myalgo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Adds the package `nemo_rl_core.algorithms.myalgo` from another folder."""
    folder = tmp_path / "myalgo"
    folder.mkdir()
    for name, text in MYALGO.items():
        (folder / name).write_text(text)
    monkeypatch.setattr(algorithms, "__path__", [*algorithms.__path__, str(tmp_path)])
    yield importlib.import_module("nemo_rl_core.algorithms.myalgo")
    for name in [name for name in sys.modules if name.startswith("nemo_rl_core.algorithms.myalgo")]:
        del sys.modules[name]
    del algorithms.myalgo


def test_a_custom_algorithm(
    session: ClusterSession, tiny_model: Path, myalgo: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered = dict(_ALGORITHM_REGISTRY._registered)
    monkeypatch.setattr(_ALGORITHM_REGISTRY, "_registered", registered)
    _ALGORITHM_REGISTRY["myalgo"] = myalgo.MyAlgoTrainer
    result = nemo_rl_core.train(
        tiny_model,
        ROWS,
        algorithm="myalgo",
        my_param=2.0,
        num_steps=3,
        global_batch_size=4,
        **OFFLINE,
    )
    assert len(result.metrics) == 3
    # Token means of the same rows with the same weights, one doubled by `my_param`.
    for step in result.metrics:
        assert step["weighted_loss"] == pytest.approx(2 * step["loss"], rel=1e-5)
    assert result.manifest.config["myalgo"] == {"my_param": 2.0}
    assert (result.checkpoint / "model.safetensors").is_file()

    with pytest.raises(ConfigError, match="no setting 'my_parm'"):
        myalgo.MyAlgoTrainer.from_pretrained(tiny_model, my_parm=2.0)


def test_a_custom_algorithm_from_a_dict(
    session: ClusterSession, make_policy: Any, tiny_model: Path, myalgo: Any
) -> None:
    config = {"myalgo": {"my_param": 0.5}, "cluster": {"num_threads": 1}}
    trainer = myalgo.MyAlgoTrainer(config)
    trainer.model, trainer.policy = tiny_model, make_policy()
    result = trainer._train_step([{"prompt": "1+2=", "completion": "3"}])
    assert "loss" in result
    assert result["weighted_loss"] == pytest.approx(0.5 * result["loss"], rel=1e-5)
