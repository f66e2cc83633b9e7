"""Float8 on a simulated CUDA device: products with torch's kernel instead of the emulation."""

from pathlib import Path
from unittest import mock

import pytest
import torch

from nemo_rl_core.algorithms.sft.loss import NLLLoss
from nemo_rl_core.backends.training.base import TrainingSetup
from nemo_rl_core.backends.training.dtensor.backend import DTensorBackend
from nemo_rl_core.config.optimizer import OptimizerConfig
from nemo_rl_core.config.training import DTensorTraining
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict, collate
from nemo_rl_core.errors import ConfigError
from tests.simulated_cuda import CudaRuleError, Transfer, count, simulated_cuda

pytest.importorskip("torchao", reason="needs torchao: `make test-float8`")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real device")
LENGTHS = [11, 4, 7, 2, 9, 3, 3, 8]  # 47 tokens: not a multiple of 16
LAYERS = 14


def make_batch() -> BatchedDataDict:
    generator = torch.Generator().manual_seed(1)
    sequences = [torch.randint(0, 16, (n,), generator=generator).tolist() for n in LENGTHS]
    return collate(sequences, [[index >= n // 2 for index in range(n)] for n in LENGTHS])


def trained(
    folder: Path, float8: str, *, transfers: list[Transfer] | None = None
) -> tuple[dict[str, float], dict[str, torch.Tensor], int]:
    """Returns metrics, weights and kernel calls of a step; `transfers` records its passes."""
    backend = DTensorBackend()
    backend.setup(
        TrainingSetup(
            model_folder=folder,
            optimizer=OptimizerConfig(learning_rate=1e-2, adam_epsilon=1e-3),
            max_tokens_per_microbatch=64,
            training=DTensorTraining(float8=float8, attention="sdpa", deterministic=True),
            dtype="bfloat16",
        )
    )
    if transfers is not None:
        transfers.clear()
    with mock.patch.object(torch, "_scaled_mm", wraps=torch._scaled_mm) as kernel:
        metrics, _ = backend.forward_backward(make_batch(), NLLLoss(), returns_outputs=False)
    actual = list(transfers or ())
    metrics |= backend.optimizer_step()
    weights = {name: each.cpu().clone() for name, each in backend.named_weights()}
    if transfers is not None:
        transfers[:] = actual
    return metrics, weights, kernel.call_count


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_kernel_matches_the_emulation_without_waits(recipe: str, tiny_model: Path) -> None:
    metrics, weights, num_emulated = trained(tiny_model, recipe)
    assert num_emulated == 0
    with simulated_cuda() as transfers:
        actual, on_gpu, num_products = trained(tiny_model, recipe, transfers=transfers)
        # One for transformers' mask, one for the metrics.
        assert count(transfers, "sync") == 2
        assert count(transfers, "upload") == 0
    assert num_products == LAYERS * (2 if recipe.endswith("gw_hp") else 3)
    assert actual == pytest.approx(metrics, rel=1e-5)
    for name, weight in weights.items():
        torch.testing.assert_close(on_gpu[name], weight, rtol=0, atol=1e-5, msg=name)


def test_token_counts_that_are_not_multiples_of_16_need_padding(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchao.float8 import float8_ops

    monkeypatch.setattr(float8_ops, "pad_tensor_for_matmul", lambda tensor, dims: tensor)
    with simulated_cuda(), pytest.raises(CudaRuleError, match="divisible by 16"):
        trained(tiny_model, "rowwise")


def test_older_gpu_is_refused(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with simulated_cuda():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
        with pytest.raises(ConfigError, match=r"compute capability 8\.0"):
            trained(tiny_model, "rowwise")
