"""Models that the real package megatron-bridge builds: `make test-megatron-bridge`.

It imports Transformer Engine, so the fake of it is installed in every rank.
"""

import json
import shutil
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    Glm4MoeConfig,
    LlamaConfig,
    MistralConfig,
    OlmoeConfig,
    Qwen3MoeConfig,
)

from nemo_rl_core.backends.training.base import TrainingSetup
from nemo_rl_core.checkpoints.weight_files import stored_tensors
from nemo_rl_core.config.megatron_types import BRIDGE_VERSION, bridge_version
from nemo_rl_core.config.optimizer import OptimizerConfig
from nemo_rl_core.config.training import MegatronTraining
from nemo_rl_core.data.pretrained import load_tokenizer
from nemo_rl_core.distributed.local_ranks import run_ranks
from nemo_rl_core.errors import WorkerError
from tests import fake_transformer_engine as fake
from tests.simulated_cuda import simulated_cuda
from tests.unit.backends.megatron.test_megatron_transformer_engine import (
    LOSS,
    SHAPE,
    make_batch,
    results,
    signature_of,
)

pytestmark = [
    pytest.mark.experimental,
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real device"),
    pytest.mark.skipif(bridge_version() is None, reason="megatron-bridge is not installed"),
]
RANK_IMPORTS = "torch"  # before the fake is installed
RECORDED = json.loads((Path(__file__).parent / "megatron_bridge_0.3.1.json").read_text())
ROPE = {"rope_type": "default", "rope_theta": 500.0}
BASE = {**SHAPE, "rope_parameters": ROPE}
WITHOUT_HEAD_DIM = {key: value for key, value in BASE.items() if key != "head_dim"}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
MODELS = {
    "mistral": MistralConfig(**BASE, sliding_window=None),
    # So many per token that each expert gets some; otherwise the simulated GPU has no gradients.
    "olmoe": OlmoeConfig(
        **{**WITHOUT_HEAD_DIM, "num_key_value_heads": 4}, num_experts=4, num_experts_per_tok=3
    ),
    "gemma": GemmaConfig(**BASE),
}
REFUSED = {
    "a window": (MistralConfig(**BASE, sliding_window=8), "sliding_window=8"),
    "a buffer": (
        Glm4MoeConfig(
            **BASE,
            moe_intermediate_size=8,
            n_routed_experts=4,
            num_experts_per_tok=2,
            first_k_dense_replace=1,
        ),
        "router.expert_bias",
    ),
    # The bridge assumes that the weights of the chosen experts are renormalized.
    "another computation": (
        Qwen3MoeConfig(**BASE, moe_intermediate_size=8, norm_topk_prob=False, **EXPERTS),
        "computes different logprobs",
    ),
}


def saved(config: Any, tokenizer: Path, folder: Path) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:  # all ones and zeros otherwise
                parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    load_tokenizer(tokenizer).save_pretrained(folder)
    return folder


def transformers_logprobs(folder: Path) -> torch.Tensor:
    batch, model = make_batch(), AutoModelForCausalLM.from_pretrained(folder).eval()
    expected = torch.zeros(batch["token_mask"].shape)
    for row, length in enumerate(batch["input_lengths"].tolist()):
        ids = batch["input_ids"][row, :length]
        with torch.no_grad():
            logprobs = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
        expected[row, : length - 1] = logprobs.gather(-1, ids[1:, None])[:, 0]
    return expected


def on_gpu(folder: Path, where: Path, by_bridge: bool, dtype: str = "float32") -> Any:
    """Trains on a simulated GPU with Transformer Engine's layers."""
    with simulated_cuda(), mock.patch.object(torch, "compile", lambda function, **_: function):
        fake.install()
        if by_bridge:
            force_bridge()
        if dtype == "float32":
            return results(folder, where)
        return set_up(folder, dtype=dtype).get_logprobs(make_batch())


def force_bridge() -> None:
    """Makes the bridge build the types that the backend supports itself, too."""
    for name in ("model", "reference"):
        import_module(f"nemo_rl_core.backends.training.megatron.{name}").is_for_bridge = bool


def converted(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Returns the weights that `megatron-to-hf` writes for a checkpoint."""
    with simulated_cuda(), mock.patch.object(torch, "compile", lambda function, **_: function):
        fake.install()
        from nemo_rl_core.backends.training.megatron.checkpoint import load_native_weights
        from nemo_rl_core.backends.training.megatron.model import build_model
        from nemo_rl_core.backends.training.megatron.topology import initialize_topology
        from nemo_rl_core.backends.training.megatron.weights import iter_hf_weights

        initialize_topology(MegatronTraining())
        models = build_model(checkpoint / "model", MegatronTraining())
        load_native_weights(checkpoint / "trainer", models)
        return {name: each.cpu().clone() for name, each in iter_hf_weights(models)}


def set_up(folder: Path, *, dtype: Any = "float32", **training: Any) -> Any:
    from nemo_rl_core.backends.training.megatron.backend import MegatronBackend

    backend = MegatronBackend()
    backend.setup(
        TrainingSetup(
            model_folder=folder,
            optimizer=OptimizerConfig(learning_rate=1e-2),
            max_tokens_per_microbatch=24,
            training=MegatronTraining(attention="auto", **training),
            dtype=dtype,
        )
    )
    return backend


@pytest.mark.parametrize("name", MODELS)
def test_model_matches_transformers_and_trains(name: str, tiny_model: Path, tmp_path: Path) -> None:
    folder = saved(MODELS[name], tiny_model, tmp_path / name)
    (actual,) = run_ranks(on_gpu, folder, tmp_path / "saved", False, world_size=1)
    torch.testing.assert_close(actual["before"], transformers_logprobs(folder), rtol=0, atol=1e-5)
    torch.testing.assert_close(actual["reference"], actual["before"], rtol=0, atol=0)
    assert actual["third"] == actual["third again"]
    stored = dict(stored_tensors(tmp_path / "saved" / "model"))
    (weights,) = run_ranks(converted, tmp_path / "saved", world_size=1)
    torch.testing.assert_close(weights, stored, rtol=0, atol=0)
    # The trained model is exported to transformers.
    (tmp_path / "trained").mkdir()
    shutil.copy(folder / "config.json", tmp_path / "trained")
    save_file(actual["weights"], tmp_path / "trained" / "model.safetensors", {"format": "pt"})
    trained = transformers_logprobs(tmp_path / "trained")
    torch.testing.assert_close(actual["after"], trained, rtol=0, atol=1e-5)
    assert (trained - actual["before"]).abs().max() > 0.01


def test_training_matches_the_backends_model(tiny_model: Path, tmp_path: Path) -> None:
    folder = saved(LlamaConfig(**BASE), tiny_model, tmp_path / "llama")
    (backend_result,) = run_ranks(on_gpu, folder, tmp_path / "own", False, world_size=1)
    (actual,) = run_ranks(on_gpu, folder, tmp_path / "bridge", True, world_size=1)
    assert actual.pop("attention") == backend_result.pop("attention") == "transformer_engine"
    torch.testing.assert_close(actual, backend_result, rtol=0, atol=0)


def test_bfloat16_agrees_within_its_rounding(tiny_model: Path, tmp_path: Path) -> None:
    folder = saved(MODELS["mistral"], tiny_model, tmp_path / "mistral")
    (actual,) = run_ranks(on_gpu, folder, tmp_path, False, "bfloat16", world_size=1)
    expected = transformers_logprobs(folder)
    assert 0 < (actual - expected).abs().mean() < 0.05


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "tensor": (2, {"tensor_parallel_size": 2, "sequence_parallel": True}),
    "pipeline": (2, {"pipeline_parallel_size": 2}),
    "context": (2, {"context_parallel_size": 2}),
    "data": (2, {}),
}


def scatter(
    output: Any, parts: Any, scatter: Any = torch.distributed.scatter, **options: Any
) -> Any:
    """Sends contiguous parts, as a copy to a GPU would; otherwise gloo is wrong."""
    return scatter(output, parts and [part.contiguous() for part in parts], **options)


def over_gloo(folder: Path, training: dict[str, Any], by_bridge: bool) -> Any:
    fake.install()
    if by_bridge:
        force_bridge()
    with mock.patch.object(torch.distributed, "scatter", scatter):
        backend = set_up(folder, **training)
    batch = make_batch()
    exported = {name: each.clone() for name, each in backend.named_weights()}
    before = backend.get_logprobs(batch)
    step = backend.train_step(batch, LOSS)
    weights = {name: each.clone() for name, each in backend.named_weights()}
    return before, step, weights, exported


@pytest.mark.parametrize("layout", LAYOUTS)
def test_several_ranks_match_the_backends_model(
    layout: str, tiny_model: Path, tmp_path: Path
) -> None:
    # Local layers; of the bridge's rules, only those of Llama support their names.
    folder = saved(LlamaConfig(**BASE), tiny_model, tmp_path / "llama")
    num_ranks, training = LAYOUTS[layout]
    backend_results = run_ranks(over_gloo, folder, training, False, world_size=num_ranks)
    bridge_results = run_ranks(over_gloo, folder, training, True, world_size=num_ranks)
    torch.testing.assert_close(bridge_results, backend_results, rtol=0, atol=0)
    stored = dict(stored_tensors(folder))
    assert all(bridge_results[0][3][name].equal(tensor) for name, tensor in stored.items())
    assert bridge_results[0][3].keys() == stored.keys()


@pytest.mark.parametrize("name", REFUSED)
def test_wrongly_computed_models_are_refused(name: str, tiny_model: Path, tmp_path: Path) -> None:
    config, words = REFUSED[name]
    folder = saved(config, tiny_model, tmp_path / "model")
    with pytest.raises(WorkerError, match=words):
        run_ranks(on_gpu, folder, tmp_path, True, world_size=1)


def signatures_of_the_package() -> dict[str, list[str]]:
    fake.install()
    assert bridge_version() == BRIDGE_VERSION
    results = {}
    for name in RECORDED:
        module, _, path = name.partition(":")
        function: Any = import_module(module)
        for part in path.split("."):
            function = getattr(function, part)
        results[name] = signature_of(function)
    return results


def test_recorded_signatures_match_the_package() -> None:
    (actual,) = run_ranks(signatures_of_the_package, world_size=1)
    assert actual == RECORDED
