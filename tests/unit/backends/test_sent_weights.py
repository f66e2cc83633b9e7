"""Weights gathered in the engines' dtype are bitwise identical to rounded full weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3MoeConfig,
)

from nemo_rl_core.backends.training.base import TrainingSetup
from nemo_rl_core.backends.training.dtensor.backend import DTensorBackend
from nemo_rl_core.backends.training.dtensor.parallelize import full_tensor
from nemo_rl_core.config.optimizer import OptimizerConfig
from nemo_rl_core.config.training import DTensorTraining
from nemo_rl_core.distributed.local_ranks import run_ranks
from nemo_rl_core.distributed.process_group import join_process_group, rank

SIZES: dict[str, Any] = {
    "vocab_size": 19,  # no number of ranks divides it
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES, intermediate_size=32, tie_word_embeddings=True),
    "experts": Qwen3MoeConfig(
        **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    ),
}
LAYOUTS: dict[int, list[tuple[str, dict[str, Any]]]] = {
    2: [
        ("llama", {}),
        ("llama", {"tensor_parallel_size": 2}),
        ("llama", {"cpu_offload": True}),
        ("llama", {"lora": {"rank": 2}}),
        ("experts", {}),
    ],
    4: [
        ("llama", {"tensor_parallel_size": 2}),
        ("llama", {"data_parallel_replicas": 2}),
        ("experts", {}),
    ],
}


@pytest.fixture
def folders(tiny_model: Path, tmp_path: Path) -> dict[str, Path]:
    for name, config in CONFIGS.items():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / name)
        AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path / name)
    return {name: tmp_path / name for name in CONFIGS}


class Gathered(TorchDispatchMode):
    """Counts the bytes that this rank contributes to gathers."""

    num_bytes = 0

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if "all_gather" in str(op):
            self.num_bytes += args[0].nbytes
        return op(*args, **(kwargs or {}))


def sent_and_rounded(folder: Path, axes: dict[str, Any]) -> dict[str, Any]:
    backend = DTensorBackend()
    backend.setup(
        TrainingSetup(
            model_folder=folder,
            optimizer=OptimizerConfig(),
            training=DTensorTraining(**axes),
            max_tokens_per_microbatch=24,
            dtype="bfloat16",
        )
    )
    with Gathered() as whole:
        # Adapters begin as zeros, which would merge to the base.
        kept = {name: weight.clone() for name, weight in backend.named_weights()}
    with Gathered() as half:
        sent = dict(backend.weights_to_send())
    backend.shutdown()
    assert list(sent) == list(kept)
    return {
        "types": {weight.dtype for weight in sent.values()},
        "kept": {weight.dtype for weight in kept.values()},
        "differing": [
            name for name, weight in sent.items() if not torch.equal(weight, kept[name].bfloat16())
        ],
        "num_rounded": sum(
            not torch.equal(weight.float(), kept[name]) for name, weight in sent.items()
        ),
        "bytes": (whole.num_bytes, half.num_bytes),
    }


def results_of_layouts(folders: dict[str, Path], layouts: list[Any]) -> list[dict[str, Any]]:
    return [sent_and_rounded(folders[name], axes) for name, axes in layouts]


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_sent_weights_are_bitwise_identical_to_rounded_full_weights(
    folders: dict[str, Path], num_ranks: int
) -> None:
    layouts = LAYOUTS[num_ranks]
    for by_layout in run_ranks(results_of_layouts, folders, layouts, world_size=num_ranks):
        for (name, axes), actual in zip(layouts, by_layout, strict=True):
            assert actual["differing"] == [], (name, axes)
            assert actual["types"] == {torch.bfloat16}
            assert actual["kept"] == {torch.float32}
            assert actual["num_rounded"] > 10  # the comparison is not trivial
            full, half = actual["bytes"]
            assert full > 10_000
            # Adapters are merged before they are rounded.
            assert half == (full if "lora" in axes else full // 2), (name, axes)


def partial_sum() -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a weight whose ranks have parts of a sum: 1 and 2 ** -8, half a step of bfloat16."""
    join_process_group()
    mesh = DeviceMesh("cpu", list(range(dist.get_world_size())))
    part = torch.tensor([1.0 + 2**-8, 2**-8][rank() :][:1])
    weight = DTensor.from_local(part, mesh, [Partial()])
    return full_tensor(weight, torch.bfloat16), full_tensor(weight, torch.float32)


@pytest.mark.slow
def test_partial_sums_are_reduced_before_rounding() -> None:
    for rounded, exact in run_ranks(partial_sum, world_size=2):
        assert exact.tolist() == [1.0 + 2**-7]
        # In 16 bits 1 + 2 ** -8 is 1 (to even), so rounded parts would also add up to 1.
        assert rounded.tolist() == [1.0 + 2**-7]
