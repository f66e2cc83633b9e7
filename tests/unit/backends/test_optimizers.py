"""Learning rates by hand, and settings that cannot be optimized."""

import math

import pytest
import torch

from nemo_rl_core.backends.training.optimizers import build_optimizer, learning_rate_at
from nemo_rl_core.config.optimizer import OptimizerConfig
from nemo_rl_core.config.training import DTensorTraining
from nemo_rl_core.errors import ConfigError


def rates(num_updates: int, **options: object) -> list[float]:
    config = OptimizerConfig.model_validate({"learning_rate": 2.0, **options})
    return [learning_rate_at(update, config) for update in range(1, num_updates + 1)]


def test_constant_after_warm_up() -> None:
    assert rates(6, num_warmup_steps=4) == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]
    assert rates(2) == [2.0, 2.0]


def test_linear_decay_counts_from_the_end_of_the_warm_up() -> None:
    schedule = {"kind": "linear", "num_decay_steps": 4, "final_fraction": 0.5}
    # 2.0 falls to 1.0 in four steps of 0.25.
    expected = [1.0, 2.0, 1.75, 1.5, 1.25, 1.0, 1.0]
    assert rates(7, num_warmup_steps=2, schedule=schedule) == pytest.approx(expected)


def test_cosine_decay() -> None:
    schedule = {"kind": "cosine", "num_decay_steps": 4}
    root = math.sqrt(0.5)
    # 1 + cos of 45, 90, 135 and 180 degrees, then zero.
    expected = [2.0, 1 + root, 1.0, 1 - root, 0.0, 0.0]
    assert rates(6, num_warmup_steps=1, schedule=schedule) == pytest.approx(expected, abs=1e-12)


def test_every_schedule_except_constant_needs_a_length() -> None:
    with pytest.raises(ValueError, match="num_decay_steps"):
        OptimizerConfig.model_validate({"schedule": {"kind": "cosine"}})
    with pytest.raises(ConfigError, match="num_decay_step"):
        OptimizerConfig.model_validate({"schedule": {"kind": "linear", "num_decay_step": 3}})


def test_update_matches_adamw_by_hand() -> None:
    weight = torch.nn.Parameter(torch.tensor([2.0]))
    frozen = torch.nn.Parameter(torch.tensor([2.0]), requires_grad=False)
    config = OptimizerConfig(learning_rate=0.1, weight_decay=0.5, adam_epsilon=1e-8)
    optimizer = build_optimizer([("weight", weight), ("frozen", frozen)], config)
    weight.grad = torch.tensor([3.0])
    optimizer.step()
    # Decay subtracts 0.1 * 0.5 * 2; Adam's first step is the rate in the gradient's direction.
    assert weight.item() == pytest.approx(2.0 - 0.1 - 0.1, abs=1e-6)
    assert frozen.item() == 2.0
    assert len(optimizer.state) == 1


def test_model_without_trained_parameters_is_refused() -> None:
    frozen = torch.nn.Parameter(torch.ones(1), requires_grad=False)
    with pytest.raises(ConfigError, match="no parameter that takes gradients"):
        build_optimizer([("frozen", frozen)], OptimizerConfig())


def test_eight_bit_moments_step_almost_like_those_in_float32() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = [torch.nn.Parameter(torch.zeros(64, 80)) for _ in range(2)]
    optimizers = [
        build_optimizer([("weight", weight)], OptimizerConfig(learning_rate=1e-2, moments=moments))
        for weight, moments in zip(weights, ("float32", "8bit"), strict=True)
    ]
    for _ in range(5):
        gradient = torch.randn(64, 80, generator=generator)
        for weight, optimizer in zip(weights, optimizers, strict=True):
            weight.grad = gradient.clone()
            optimizer.step()
    exact, rounded = (weight.detach() for weight in weights)
    assert 0 < (exact - rounded).abs().mean() < 0.05 * exact.abs().mean()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weights": "4bit"}, "add a lora section"),
        ({"lora": {}, "tensor_parallel_size": 2}, "not split over the ranks"),
    ],
)
def test_contradictions_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DTensorTraining.model_validate(settings)
