"""Types of models that differ in what the trainer asks of them, compared with a plain loop."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file

from nemo_rl_core.algorithms.sft.loss import NLLLoss
from nemo_rl_core.backends.training.dtensor.context_parallel import apply_context_parallel
from nemo_rl_core.checkpoints.weights import keeps_float32, rounded_weights
from nemo_rl_core.config.training import DTensorTraining, LoRAConfig
from nemo_rl_core.distributed.local_ranks import run_ranks
from nemo_rl_core.errors import ConfigError
from tests.model_types import (
    BOUND,
    loaded,
    make_backend,
    make_batch,
    outcome,
    plain_logprobs,
    save_tokenizer,
    tiny_model,
)

EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


@pytest.mark.parametrize(
    ("kind", "shares_rows"),
    [
        ("gpt2", True),  # layers are called `h`
        ("mpt", False),  # ALiBi; takes no position ids
        ("opt", False),  # positions follow from the mask
        ("roberta", False),  # positions begin after the padding token's id
        ("gemma2", True),  # caps attention and logits
        ("granite", True),  # scales logits
        ("gpt_oss", False),  # sinks in attention
        ("qwen3_next", False),  # linear and full attention
        ("bamba", False),  # a state-space model with attention layers
        ("lfm2", False),  # convolutions
        ("llama4_text", True),  # `get_decoder` returns the model itself
    ],
)
def test_a_type_is_trained_as_by_a_plain_loop(kind: str, shares_rows: bool, tmp_path: Path) -> None:
    trained = outcome(kind, tmp_path)
    assert not trained.refused
    assert trained.error < BOUND
    assert trained.shares_rows is shares_rows


@pytest.mark.parametrize("kind", ["xlnet", "prophetnet", "xmod"])
def test_other_types_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    """Attention in both directions, another form of hidden states, a language for each batch."""
    refused = outcome(kind, tmp_path).refused
    assert refused.startswith("ModelError: ")
    assert type(tiny_model(kind)).__name__ in refused


@pytest.mark.parametrize(
    ("kind", "named"), [("mistral", "sliding_attention"), ("gemma2", "attn_logit_softcapping")]
)
def test_context_parallelism_refuses_attention_that_it_would_change(kind: str, named: str) -> None:
    group: Any = None  # refused before the ranks are asked
    with pytest.raises(ConfigError, match=named):
        apply_context_parallel(tiny_model(kind), group)


def _step(
    folder: Path, training: DTensorTraining, saved: Path | None = None
) -> tuple[torch.Tensor, float]:
    backend = make_backend(folder, training=training, seed=3)
    batch = make_batch()
    rank = torch.distributed.get_rank()
    shard = batch.select_indices([rank, rank + 2, rank + 4])
    metrics = backend.train_step(shard, NLLLoss())
    if saved:
        backend.save_checkpoint(saved)
    return backend.get_logprobs(batch), metrics["loss"]


@pytest.mark.parametrize("kind", ["gemma2", "granite", "bamba", "gpt2"])
def test_two_ranks_that_shard_a_model_follow_the_plain_loop(kind: str, tmp_path: Path) -> None:
    model: Any = tiny_model(kind)
    model.save_pretrained(tmp_path / "start")
    save_tokenizer(tmp_path)
    plain = loaded(tmp_path / "start")
    batch = make_batch()
    optimizer = torch.optim.AdamW(
        plain.parameters(), lr=1e-4, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.1
    )
    loss = -plain_logprobs(plain, batch).sum() / batch["token_mask"].sum()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    optimizer.step()
    for logprobs, step_loss in run_ranks(
        _step, tmp_path / "start", DTensorTraining(), world_size=2
    ):
        assert step_loss == pytest.approx(loss.item(), abs=BOUND)
        torch.testing.assert_close(logprobs, plain_logprobs(plain, batch), rtol=0, atol=BOUND)


@pytest.mark.parametrize("kind", ["deepseek_v3", "glm4_moe", "dots1", "ernie4_5_moe"])
@pytest.mark.parametrize("lora", [None, LoRAConfig(rank=2, alpha=4, target_modules=["o_proj"])])
def test_what_transformers_keeps_in_float32_is_sent_in_it(
    kind: str, lora: LoRAConfig | None, tmp_path: Path
) -> None:
    model = tiny_model(kind)
    with torch.no_grad():
        for name, bias in model.named_buffers():
            if "correction_bias" in name:  # published values are about 5 to 7
                bias.copy_(6 + 0.1 * torch.rand(bias.shape))
    model.save_pretrained(tmp_path / "start")
    save_tokenizer(tmp_path)
    training = DTensorTraining(lora=lora)
    backend = make_backend(tmp_path / "start", dtype="bfloat16", training=training)
    saved = load_file(tmp_path / "start" / "model.safetensors")
    kept = {name for name in saved if keeps_float32(model, name)}
    assert kept
    for weights in (
        dict(backend.weights_to_send()),
        dict(rounded_weights(tmp_path / "start", torch.bfloat16)),
    ):
        assert {name for name, weight in weights.items() if weight.dtype != torch.bfloat16} == kept
        for name in kept:
            assert torch.equal(weights[name], saved[name])


@pytest.mark.parametrize(
    ("kind", "targets"),
    [
        ("gpt2", "all-linear"),  # whose layers hold the transpose of their weight
        ("gpt_bigcode", ["c_attn", "c_proj"]),
        ("mixtral", "all-linear"),
        ("qwen3_moe", "all-linear"),
        ("deepseek_v3", "all-linear"),  # peft takes its `up_proj` for experts of older checkpoints
        ("glm4_moe", ["up_proj"]),
        ("phimoe", "all-linear"),  # whose router is a linear layer that returns a tuple
        ("jamba", "all-linear"),  # reads the weight of `dt_proj` without calling it
        ("mixtral", EXPERTS),
        ("deepseek_v3", [*EXPERTS, "o_proj"]),
        ("gpt_oss", EXPERTS[:1]),  # whose experts hold the transpose of their weight
        ("llama", ["lm_head", "q_proj"]),
        ("phi", ["lm_head"]),  # whose head has a bias
        ("gemma2", "all-linear"),
    ],
)
def test_saved_weights_are_those_under_trained_adapters(
    kind: str, targets: Any, tmp_path: Path
) -> None:
    tiny_model(kind).save_pretrained(tmp_path / "start")
    save_tokenizer(tmp_path)
    lora = LoRAConfig(rank=2, alpha=8, target_modules=targets)
    backend = make_backend(tmp_path / "start", training=DTensorTraining(lora=lora))
    batch = make_batch()
    before = backend.get_logprobs(batch)
    for _ in range(3):
        backend.train_step(batch, NLLLoss())
    after = backend.get_logprobs(batch)
    assert (after - before).abs().max() > 10 * BOUND
    moved = {name: float(p.abs().max()) for name, p in backend._adapters.trained.items()}
    assert all(size > 0 for size in moved.values()), moved
    assert any(".experts." in name for name in moved) is ("experts." in str(targets))
    backend.save_checkpoint(tmp_path / "saved")
    saved = plain_logprobs(loaded(tmp_path / "saved" / "model"), batch)
    torch.testing.assert_close(after, saved, rtol=0, atol=BOUND)
    adapter = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "saved" / "trainer" / "adapter")
    with torch.no_grad():
        torch.testing.assert_close(after, plain_logprobs(adapter.eval(), batch), rtol=0, atol=BOUND)


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_two_ranks_that_shard_adapted_experts_follow_one(kind: str, tmp_path: Path) -> None:
    tiny_model(kind).save_pretrained(tmp_path / "start")
    save_tokenizer(tmp_path)
    training = DTensorTraining(lora=LoRAConfig(rank=2, alpha=8, target_modules=EXPERTS))
    alone = make_backend(tmp_path / "start", training=training, seed=3)
    batch = make_batch()
    before = alone.get_logprobs(batch)
    loss = alone.train_step(batch, NLLLoss())["loss"]
    expected = alone.get_logprobs(batch)
    assert (expected - before).abs().max() > 10 * BOUND
    arguments = (tmp_path / "start", training, tmp_path / "saved")
    for logprobs, step_loss in run_ranks(_step, *arguments, world_size=2):
        assert step_loss == pytest.approx(loss, abs=BOUND)
        torch.testing.assert_close(logprobs, expected, rtol=0, atol=BOUND)
    saved = plain_logprobs(loaded(tmp_path / "saved" / "model"), batch)
    torch.testing.assert_close(saved, expected, rtol=0, atol=BOUND)
    resumed = make_backend(tmp_path / "start", training=training, seed=8)
    resumed.load_checkpoint(tmp_path / "saved")
    torch.testing.assert_close(resumed.get_logprobs(batch), expected, rtol=0, atol=BOUND)


@pytest.mark.parametrize(
    ("kind", "targets", "named"),
    [
        ("llama", ["q_proj", "v_prj"], "v_prj"),
        ("phi3", ["q_proj", "o_proj"], "q_proj"),  # its layer is called qkv_proj
        ("mixtral", ["q_proj", "w1"], "w1"),
        ("mixtral", ["down_proj"], "experts.down_proj"),
        ("jamba", ["in_proj", "dt_proj"], "dt_proj"),
        ("mamba", ["in_proj", "conv1d"], "conv1d"),
        ("gemma2", ["q_proj", "lm_head"], "shares its weight"),
    ],
)
def test_targets_that_would_not_be_trained_are_refused(
    kind: str, targets: list[str], named: str, tmp_path: Path
) -> None:
    tiny_model(kind).save_pretrained(tmp_path / "start")
    save_tokenizer(tmp_path)
    training = DTensorTraining(lora=LoRAConfig(target_modules=targets))
    with pytest.raises(ConfigError, match=named):
        make_backend(tmp_path / "start", training=training)
