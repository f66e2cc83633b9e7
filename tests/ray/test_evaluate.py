"""Evaluates a model that was taught sums, and one that was not."""

from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_rl_core.algorithms.sft.data import load_examples, sft_batch
from nemo_rl_core.algorithms.sft.loss import NLLLoss
from nemo_rl_core.backends.generation.base import GenerationSetup
from nemo_rl_core.config.evaluation import EvaluationConfig
from nemo_rl_core.config.single_turn import ExactMatch, RewardFunction
from nemo_rl_core.config.trainer import RolloutSettings
from nemo_rl_core.data.loader import save_frame
from nemo_rl_core.data.pretrained import load_tokenizer
from nemo_rl_core.distributed.session import ClusterSession
from nemo_rl_core.errors import ConfigError
from nemo_rl_core.evals.evaluate import evaluate
from nemo_rl_core.evals.rows import greedy_outcomes
from tests.validated import validate_rows

NUM_ROWS = 12
SAMPLED = ("pass_at_1", "pass_at_2", "cons_at_2")


@pytest.fixture(scope="module")
def data(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [
        {
            "id": f"sum-{index}",
            "prompt": f"{index}+{index + 1}=",
            "answer": str(2 * index + 1),
            "completion": str(2 * index + 1),
            "task": "arithmetic",
            "metadata": "{}",
        }
        for index in range(NUM_ROWS)
    ]
    tokenizer = load_tokenizer(tiny_model)
    folder = tmp_path_factory.mktemp("rows")
    save_frame(validate_rows(rows, tokenizer=tokenizer, max_prompt_tokens=16, name="sums"), folder)
    return folder


@pytest.fixture
def setup(generation_setup: GenerationSetup) -> RolloutSettings:
    return RolloutSettings(
        generation=generation_setup.config,
        environment=ExactMatch(),
        dtype="float32",
        max_prompt_tokens=16,
        seed=0,
    )


def test_a_model_with_random_weights_knows_nothing(
    session: ClusterSession, tiny_model: Path, data: Path, setup: RolloutSettings
) -> None:
    config = EvaluationConfig(num_samples_per_prompt=2)
    result = evaluate(tiny_model, data, session, config=config, settings=setup)
    assert set(result.metrics) == {
        "num_prompts",
        "num_unscored",
        "greedy_accuracy",
        "greedy_accuracy_low",
        "greedy_accuracy_high",
        "mean_reward",
        "truncated_fraction",
        *(f"{name}{end}" for name in SAMPLED for end in ("", "_low", "_high")),
    }
    assert result.metrics["greedy_accuracy"] == 0.0
    # Wilson's upper bound for 0 of 12 at 95 %: 1.96^2 / (12 + 1.96^2) = 3.8415 / 15.8415.
    assert result.metrics["greedy_accuracy_high"] == pytest.approx(0.2425, abs=1e-4)
    assert result.metrics["greedy_accuracy_low"] == pytest.approx(0.0, abs=1e-12)
    assert 0 <= result.metrics["pass_at_1"] <= result.metrics["pass_at_2"] <= 1
    for name in SAMPLED:
        low, value, high = (result.metrics[f"{name}{end}"] for end in ("_low", "", "_high"))
        assert 0 <= low <= value <= high < 1
    # One greedy completion and two samples of each.
    assert len(result.rows) == NUM_ROWS * 3
    assert result.num_tokens >= len(result.rows)
    assert result.peak_memory_gib > 0.1


def test_a_model_that_was_taught_the_answers_gives_them(
    session: ClusterSession,
    tiny_model: Path,
    data: Path,
    setup: RolloutSettings,
    make_policy: Callable,
    tmp_path: Path,
) -> None:
    from nemo_rl_core.config.optimizer import OptimizerConfig

    policy = make_policy(optimizer=OptimizerConfig(learning_rate=0.01, num_warmup_steps=10))
    batch = sft_batch(load_examples(data, load_tokenizer(tiny_model)))
    for _ in range(150):
        metrics = policy.train(batch, NLLLoss())
    assert metrics["loss"] < 0.02
    policy.save_checkpoint(tmp_path)
    config = EvaluationConfig(num_samples_per_prompt=2)
    result = evaluate(tmp_path / "model", data, session, config=config, settings=setup)
    assert result.metrics["greedy_accuracy"] == result.metrics["mean_reward"] == 1.0
    # Wilson's lower bound for 12 of 12: 12 / (12 + 1.96^2).
    assert result.metrics["greedy_accuracy_low"] == pytest.approx(0.7575, abs=1e-4)
    assert result.metrics["truncated_fraction"] == 0.0
    assert result.metrics["pass_at_2"] > 0.9
    assert greedy_outcomes(result.rows) == {f"sum-{index}": True for index in range(NUM_ROWS)}
    assert result.categories == {"arithmetic": result.metrics}
    again = evaluate(tmp_path / "model", data, session, config=config, settings=setup)
    assert again.rows == result.rows
    assert again.metrics == result.metrics


def test_a_reward_that_does_not_exist_stops_the_evaluation(
    session: ClusterSession, tiny_model: Path, data: Path, setup: RolloutSettings
) -> None:
    environment = RewardFunction(target="no_such_module:reward")
    with pytest.raises(ConfigError, match="cannot be imported"):
        evaluate(
            tiny_model,
            data,
            session,
            config=EvaluationConfig(),
            settings=setup.model_copy(update={"environment": environment}),
        )
