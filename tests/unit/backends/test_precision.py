"""Precision and kernels: full float32 unless a recipe sets TF32, deterministic on CPUs."""

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl_core.backends.training.base import TrainingSetup, get_training_backend
from nemo_rl_core.backends.training.dtensor.backend import DTensorBackend
from nemo_rl_core.backends.training.dtensor.model import LogprobModel
from nemo_rl_core.config.generation import VllmGenerationConfig
from nemo_rl_core.config.optimizer import OptimizerConfig
from nemo_rl_core.config.training import DTensorTraining, MegatronTraining
from nemo_rl_core.distributed.local_ranks import run_ranks
from nemo_rl_core.models.generation.engine_environment import engine_environment
from tests.simulated_cuda import simulated_cuda


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_float32_matmul_precision(before)
    torch.use_deterministic_algorithms(is_deterministic)


def test_recipe_sets_precision_and_the_first_check_uses_full_precision(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    check = LogprobModel.choose_layout

    def noted(self: LogprobModel) -> None:
        seen.append(torch.get_float32_matmul_precision())
        check(self)

    monkeypatch.setattr(LogprobModel, "choose_layout", noted)
    chosen = []
    settings: list[dict[str, Any]] = [{"float32_matmul_precision": "high"}, {}]
    for each in settings:  # the second in the same process, like a later stage
        backend = DTensorBackend()
        backend.setup(
            TrainingSetup(
                model_folder=tiny_model,
                optimizer=OptimizerConfig(),
                max_tokens_per_microbatch=64,
                training=DTensorTraining(**each),
            )
        )
        chosen.append(torch.get_float32_matmul_precision())
    assert chosen == ["high", "highest"]
    assert seen == ["highest", "highest"]


def test_vllm_reads_the_engines_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm.envs as library

    for precision in ("highest", "high"):
        config = VllmGenerationConfig(float32_matmul_precision=precision)
        for name, value in engine_environment(config).items():
            monkeypatch.setenv(name, value)
        assert library.environment_variables["VLLM_FLOAT32_MATMUL_PRECISION"]() == precision


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real device")
@pytest.mark.parametrize("training", [DTensorTraining, MegatronTraining])
def test_kernels_are_deterministic_on_cpus_and_if_a_recipe_sets_it(
    training: type[DTensorTraining | MegatronTraining], tiny_model: Path
) -> None:
    cases = [("cpu", "auto"), ("cpu", False), ("cuda", "auto"), ("cuda", True)]
    # In separate processes: Megatron is permanently redirected to the CPU if it finds no GPU.
    actual = run_ranks(_kernels, training, cases, tiny_model, world_size=1)[0]
    assert actual == [("true", True), ("false", False), ("false", False), ("true", True)]


def _kernels(
    training: type[DTensorTraining | MegatronTraining], cases: list[Any], folder: Path
) -> list[Any]:
    results = []
    # GPUs first, since Megatron is redirected to the CPU.
    for device, deterministic in sorted(cases, key=lambda case: case[0], reverse=True):
        config = training(attention="sdpa", deterministic=deterministic)
        with simulated_cuda() if device == "cuda" else nullcontext():
            backend = get_training_backend(config.backend)()
            backend.setup(
                TrainingSetup(
                    model_folder=folder,
                    optimizer=OptimizerConfig(),
                    max_tokens_per_microbatch=64,
                    training=config,
                )
            )
            chosen = backend.choices()["training.deterministic"]
            results.append((device, chosen, torch.are_deterministic_algorithms_enabled()))
            if isinstance(config, MegatronTraining):
                backend.shutdown()
    return [each[1:] for each in sorted(results, key=lambda each: each[0])]
