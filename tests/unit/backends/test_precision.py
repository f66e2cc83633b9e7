"""float32 on GPUs: in full precision, unless a recipe asks for TF32."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl_core.backends.training.base import TrainingSetup
from nemo_rl_core.backends.training.dtensor.backend import DTensorBackend
from nemo_rl_core.backends.training.dtensor.model import LogprobModel
from nemo_rl_core.config.generation import VllmGenerationConfig
from nemo_rl_core.config.optimizer import OptimizerConfig
from nemo_rl_core.config.training import DTensorTraining
from nemo_rl_core.models.generation.engine import engine_environment


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def test_a_recipe_chooses_and_the_check_at_the_start_is_in_full_precision(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    check = LogprobModel.refuse_unless_faithful

    def noted(self: LogprobModel) -> None:
        seen.append(torch.get_float32_matmul_precision())
        check(self)

    monkeypatch.setattr(LogprobModel, "refuse_unless_faithful", noted)
    chosen = []
    settings: list[dict[str, Any]] = [{"float32_matmul_precision": "high"}, {}]
    for each in settings:  # the second in the same process, as of a later stage
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


def test_vllm_reads_what_the_engine_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm.envs as library

    for precision in ("highest", "high"):
        config = VllmGenerationConfig(float32_matmul_precision=precision)
        for name, value in engine_environment(config).items():
            monkeypatch.setenv(name, value)
        assert library.environment_variables["VLLM_FLOAT32_MATMUL_PRECISION"]() == precision
