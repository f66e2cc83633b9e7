"""`megatron` with Transformer Engine's layers on torch's kernels, compared with local ones."""

import inspect
import json
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from nemo_rl_core.algorithms.grpo.loss import GRPOLossFn
from nemo_rl_core.algorithms.grpo.loss_config import ClippedLoss, KLInLoss
from nemo_rl_core.backends.training.base import TrainingSetup
from nemo_rl_core.config.optimizer import OptimizerConfig
from nemo_rl_core.config.training import MegatronTraining
from nemo_rl_core.data.pretrained import load_tokenizer
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict, collate
from nemo_rl_core.distributed.local_ranks import run_ranks
from tests import fake_transformer_engine as fake
from tests.simulated_cuda import simulated_cuda

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real device")
RANK_IMPORTS = "torch"  # Megatron looks for the library when it is imported
LOSS = GRPOLossFn(ClippedLoss(kl=KLInLoss(beta=0.1)))
SIGNATURES = Path(__file__).parent / "transformer_engine_2.11.json"
LENGTHS = [11, 4, 7, 2, 9, 3]
SHAPE: dict[str, Any] = {
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
MODELS = {
    "qwen2": Qwen2Config(**{key: value for key, value in SHAPE.items() if key != "head_dim"}),
    "qwen3": Qwen3Config(**SHAPE, tie_word_embeddings=True),
    "qwen3_moe": Qwen3MoeConfig(
        **SHAPE, moe_intermediate_size=8, num_experts=4, num_experts_per_tok=2
    ),
}


@pytest.fixture(
    params=[
        pytest.param(name, marks=[] if name == "qwen3_moe" else [pytest.mark.thorough])
        for name in MODELS
    ]
)
def folder(request: pytest.FixtureRequest, tiny_model: Path, tmp_path: Path) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MODELS[request.param])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:  # all ones and zeros otherwise
                parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "model")
    load_tokenizer(tiny_model).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def make_batch() -> BatchedDataDict:
    generator = torch.Generator().manual_seed(2)
    rows = [torch.randint(3, 24, (length,), generator=generator).tolist() for length in LENGTHS]
    batch = collate(rows, [[False] + [True] * (len(row) - 1) for row in rows])
    shape = batch["token_mask"].shape
    batch["advantages"] = torch.randn(shape, generator=generator)
    for name in ("prev_logprobs", "reference_logprobs"):
        batch[name] = -3 * torch.rand(shape, generator=generator)
    return batch


def started(folder: Path, **training: Any) -> Any:
    from nemo_rl_core.backends.training.megatron.backend import MegatronBackend

    backend = MegatronBackend()
    backend.setup(
        TrainingSetup(
            model_folder=folder,
            optimizer=OptimizerConfig(learning_rate=1e-2, adam_epsilon=1e-3, weight_decay=0.1),
            max_tokens_per_microbatch=24,
            training=MegatronTraining(attention="auto", **training),
            reference_folder=folder,
        )
    )
    return backend


def results(folder: Path, saved: Path, **training: Any) -> dict[str, Any]:
    backend, batch = started(folder, **training), make_batch()
    results: dict[str, Any] = {"before": backend.get_logprobs(batch)}
    results["steps"] = [backend.train_step(batch, LOSS) for _ in range(2)]
    backend.save_checkpoint(saved)
    results["third"] = backend.train_step(batch, LOSS)
    backend.shutdown()
    backend = started(folder, **training)
    backend.load_checkpoint(saved)
    results["third again"] = backend.train_step(batch, LOSS)
    backend.release_memory()
    results["after"] = backend.get_logprobs(batch)
    results["reference"] = backend.get_reference_logprobs(batch)
    results["weights"] = {name: each.cpu().clone() for name, each in backend.named_weights()}
    choices = backend.choices()
    return {**results, "attention": choices["training.attention"]}


def with_engine(folder: Path, saved: Path, training: dict[str, Any]) -> Any:
    with simulated_cuda(), mock.patch.object(torch, "compile", lambda function, **_: function):
        fake.install()
        actual = results(folder, saved, **training)
        return actual, Counter(name for name, _ in fake.CALLS), fake.CALLS[:40]


def local(folder: Path, saved: Path, training: dict[str, Any]) -> Any:
    return results(folder, saved, **training)


@pytest.mark.slow
@pytest.mark.parametrize(
    "training",
    [{}, pytest.param({"activation_checkpointing": True}, marks=pytest.mark.thorough)],
)
def test_layers_match_local_ones(folder: Path, tmp_path: Path, training: dict[str, Any]) -> None:
    (want,) = run_ranks(local, folder, tmp_path / "local", training, world_size=1)
    ((actual, calls, first),) = run_ranks(
        with_engine, folder, tmp_path / "engine", training, world_size=1
    )
    assert (want.pop("attention"), actual.pop("attention")) == ("sdpa", "transformer_engine")
    torch.testing.assert_close(actual, want, rtol=1e-4, atol=1e-5)
    assert actual["third"] == actual["third again"]
    has_experts = "moe" in json.loads((folder / "config.json").read_text())["model_type"]
    assert calls["FusedAdam"] > 0
    assert calls["DotProductAttention"] > 0
    assert bool(calls["GroupedLinear"]) == has_experts
    # Queries and keys of all rows are concatenated; each sequence begins at position 0 for rope.
    assert calls["rope"] == 2 * calls["DotProductAttention"]
    assert first[0][1][1] == 1  # all tokens in one row, whatever the rows


def signature_of(function: Any) -> list[str]:
    return [
        f"{'*' * (each.kind is each.VAR_POSITIONAL)}{'**' * (each.kind is each.VAR_KEYWORD)}"
        f"{each.name}{'' if each.default is each.empty else '=' + repr(each.default)}"
        for each in inspect.signature(function).parameters.values()
    ]


def test_signatures_match_the_library() -> None:
    recorded = json.loads(SIGNATURES.read_text())
    assert recorded.pop("version") == fake.VERSION
    results = {}
    for name in recorded:
        owner, _, method = name.partition(".")
        function = getattr(fake, owner)
        results[name] = signature_of(getattr(function, method) if method else function)
    assert len(results) >= 12
    assert results == recorded
