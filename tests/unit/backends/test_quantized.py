"""Adapters on a frozen base in 8 and 4 bits, compared with the dequantized model."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config

from nemo_rl_core.algorithms.sft.loss import NLLLoss
from nemo_rl_core.backends.training.dtensor.backend import DTensorBackend
from nemo_rl_core.config import training as training_config
from nemo_rl_core.config.training import DTensorTraining, LoRAConfig
from nemo_rl_core.data.pretrained import load_tokenizer
from nemo_rl_core.errors import ConfigError, ModelError, ResourceError
from nemo_rl_core.model_files.quantized import quantized_layers
from nemo_rl_core.planning.memory import plan_memory
from nemo_rl_core.planning.sizes import sizes_of
from tests.unit.backends.test_lora import make_backend, make_batch, plain_loss, weights
from tests.unit.planning.layouts import stage

PRECISIONS = ["8bit", "4bit"]
NF4 = torch.tensor(
    # Dettmers et al. (2023), appendix E.
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ]
)  # fmt: skip


def quantized(precision: Any, rank: int = 4) -> DTensorTraining:
    return DTensorTraining(lora=LoRAConfig(rank=rank, alpha=6.0), weights=precision)


def rounded(weight: torch.Tensor, precision: str) -> torch.Tensor:
    """Returns a weight as its quantization represents it, before constants are quantized too."""
    if precision == "8bit":
        half = weight.half().float()
        scale = half.abs().amax(dim=1, keepdim=True)
        return (half / scale * 127).round() * scale / 127
    blocks = weight.reshape(-1, 64)
    scale = blocks.abs().amax(dim=1, keepdim=True)
    nearest = ((blocks / scale)[..., None] - NF4).abs().argmin(dim=-1)
    return (NF4[nearest] * scale).reshape(weight.shape)


def dequantized_model(folder: Path, backend: DTensorBackend) -> torch.nn.Module:
    """Returns the folder's model with the weights that the backend sends to engines."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.load_state_dict(weights(backend), strict=False)
    return model


@pytest.mark.parametrize("precision", PRECISIONS)
def test_sent_weights_are_the_folders_rounded_ones(tiny_model: Path, precision: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    linear = {f"{n}.weight" for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    sent = weights(make_backend(tiny_model, quantized(precision)))
    for name, weight in model.state_dict().items():
        if name not in linear - {"lm_head.weight"}:
            assert name not in sent or torch.equal(sent[name], weight), name
            continue
        expected = rounded(weight, precision)
        # Scales of 4 bits are themselves rounded to 8 bits; a weight in the middle may be rounded
        # to either side.
        bound = (1e-4 if precision == "8bit" else 2e-3) * weight.abs().max()
        assert (sent[name] - expected).abs().mean() < bound < (sent[name] - weight).abs().mean()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_gradients_of_adapters_match_a_dequantized_loop(tiny_model: Path, precision: str) -> None:
    from peft import LoraConfig, get_peft_model

    batch, backend = make_batch(), make_backend(tiny_model, quantized(precision))
    model = get_peft_model(
        dequantized_model(tiny_model, backend),
        LoraConfig(r=4, lora_alpha=6, target_modules="all-linear"),
    ).eval()
    trained, ours = dict(model.named_parameters()), backend._adapters.trained
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in ours.items():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
            trained[f"base_model.model.{name}"].copy_(parameter)
    plain_loss(model, batch).backward()
    metrics, _ = backend.forward_backward(batch, NLLLoss())
    assert metrics["loss"] == pytest.approx(plain_loss(model, batch).item(), rel=1e-5)
    for name, parameter in ours.items():
        expected = trained[f"base_model.model.{name}"].grad
        error = (parameter.grad - expected).abs().max() / expected.abs().max()
        assert error < 1e-4, (name, error)


@pytest.mark.parametrize(
    ("head", "precision"),
    [
        ("lm", "4bit"),
        pytest.param("lm", "8bit", marks=pytest.mark.slow),
        pytest.param("scalar", "4bit", marks=pytest.mark.slow),
    ],
)
def test_resumed_training_is_bitwise_identical(
    tiny_model: Path, tmp_path: Path, head: str, precision: str
) -> None:
    """It also resumes if the worker is set up on the merged weights, like a later iteration's."""

    def loss(outputs, part, *, global_valid_seqs, global_valid_tokens):
        return (outputs - 0.3).square().sum() / global_valid_tokens, {}

    batch, training = make_batch(), quantized(precision)
    straight = make_backend(tiny_model, training, head=head)
    straight.train_step(batch, loss)
    straight.save_checkpoint(tmp_path)
    straight.train_step(batch, loss)
    expected = weights(straight)
    for start in (tiny_model, tmp_path / "model"):
        resumed = make_backend(start, training, head=head, seed=8)
        resumed.load_checkpoint(tmp_path)
        resumed.train_step(batch, loss)
        actual = weights(resumed)
        assert expected.keys() == actual.keys()
        assert all(torch.equal(expected[name], actual[name]) for name in expected)


@pytest.mark.parametrize(
    ("kind", "precision"),
    [
        ("qwen2", "8bit"),
        ("gpt2", "4bit"),
        pytest.param("qwen2", "4bit", marks=pytest.mark.slow),
        pytest.param("gpt2", "8bit", marks=pytest.mark.slow),
    ],
)
def test_saved_models_are_dequantized_and_merged(
    kind: str, precision: str, tiny_model: Path, tmp_path: Path
) -> None:
    """GPT-2 stores transposed weights, of which some are square; bitsandbytes transposes them."""
    folder, batch = tiny_model, make_batch()
    if kind == "gpt2":
        folder, tokenizer = tmp_path / "gpt2", load_tokenizer(tiny_model)
        torch.manual_seed(0)
        config = GPT2Config(vocab_size=len(tokenizer), n_embd=32, n_layer=1, n_head=2)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    backend = make_backend(folder, quantized(precision), reference_folder=folder)
    start = backend.get_logprobs(batch)
    for _ in range(2):
        backend.train_step(batch, NLLLoss())
    after = backend.get_logprobs(batch)
    assert (after - start).abs().max() > 0.01
    assert torch.equal(backend.get_reference_logprobs(batch), start)
    assert backend._reference is None
    backend.save_checkpoint(tmp_path / "saved")
    plain = make_backend(tmp_path / "saved" / "model", DTensorTraining())
    assert not hasattr(plain._policy.model.config, "quantization_config")
    torch.testing.assert_close(plain.get_logprobs(batch), after, rtol=0, atol=1e-5)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_memory_is_as_planned(precision: str, tiny_model: Path, tmp_path: Path) -> None:
    """No dequantized weight is kept between the passes, and weights have their planned sizes."""
    from transformers import Qwen2Config

    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    tokenizer = load_tokenizer(tiny_model)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        **sizes,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    training = quantized(precision, rank=2)
    backend = make_backend(tmp_path / "model", training)
    model = backend._policy.model
    layers = quantized_layers(model)
    assert len(layers) == 2 * 7
    tensors: list[torch.Tensor] = [parameter.data for parameter in model.parameters()]
    for layer in layers.values():
        state = getattr(layer.weight, "quant_state", None)
        tensors += [state.absmax, state.state2.absmax] if state else [layer.weight.SCB]
    by_storage = {
        each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in tensors
    }
    load = replace(stage("llama-3.1-8b", training=training), sizes=sizes_of(config.to_dict()))
    planned = plan_memory(load, 79.0).parts["weights"] * 2**30
    assert sum(by_storage.values()) == pytest.approx(planned, rel=0.02)  # scales of narrow rows
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        backend.forward_backward(make_batch(), NLLLoss())
    kept = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    others = [each for each in saved if each.untyped_storage()._cdata not in kept]
    assert max(each.numel() for each in others) < 256 * 128  # of the smallest layer, k_proj


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
def test_recomputation_and_offloading_change_no_value(tiny_model: Path, precision: Any) -> None:
    results = []
    for options in ({}, {"activation_checkpointing": True}, {"offload_for_generation": "all"}):
        training = quantized(precision).model_copy(update=options)
        backend = make_backend(tiny_model, training, seed=3)
        backend.release_memory()
        for _ in range(2):
            backend.train_step(make_batch(), NLLLoss())
        backend.release_memory()
        results.append(weights(backend))
    for result in results[1:]:
        assert all(torch.equal(result[name], weight) for name, weight in results[0].items())


def test_bfloat16_steps_agree_with_those_of_the_dequantized_model(tiny_model: Path) -> None:
    batch = make_batch()
    for precision in PRECISIONS:
        exact, half = (
            make_backend(tiny_model, quantized(precision), dtype=dtype, seed=3)
            for dtype in ("float32", "bfloat16")
        )
        assert half.get_logprobs(batch).isfinite().all()
        torch.testing.assert_close(
            half.get_logprobs(batch), exact.get_logprobs(batch), rtol=0, atol=0.05
        )
        losses = [each.train_step(batch, NLLLoss())["loss"] for each in (exact, half)]
        assert losses[1] == pytest.approx(losses[0], rel=0.01)


def test_what_cannot_be_quantized_is_refused(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"4bit cannot be sharded(.|\n)*num_workers to 1"):
        quantized("4bit").data_parallel_size(2)
    assert quantized("4bit").data_parallel_size(1) == 1
    for option in ("cpu_offload", "compile"):
        with pytest.raises(ValueError, match="remove cpu_offload and compile, or weights"):
            DTensorTraining(lora=LoRAConfig(), weights="8bit", **{option: True})
    (tmp_path / "config.json").write_text(
        '{"model_type": "qwen2", "quantization_config": {"quant_method": "fp8"}}'
    )
    with pytest.raises(ModelError, match="quant_method: fp8"):
        make_backend(tmp_path, quantized("4bit"))
    monkeypatch.setattr(training_config, "find_spec", lambda _: None)
    with pytest.raises(ResourceError, match=r"weights: 4bit needs the package(.|\n)*make setup"):
        make_backend(tiny_model, quantized("4bit"))
