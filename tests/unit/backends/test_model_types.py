"""Model types that place different demands on the trainer, compared with a plain loop."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from nemo_rl_core.algorithms.sft.loss import NLLLoss
from nemo_rl_core.backends.training.dtensor import attention, builder
from nemo_rl_core.backends.training.dtensor.context_parallel import apply_context_parallel
from nemo_rl_core.checkpoints.weights import keeps_float32, rounded_weights
from nemo_rl_core.config.training import DTensorTraining, LoRAConfig
from nemo_rl_core.distributed.local_ranks import run_ranks
from nemo_rl_core.distributed.process_group import rank, world_size
from nemo_rl_core.errors import ConfigError, ModelError
from nemo_rl_core.model_files.weights import plain_name
from nemo_rl_core.planning.model_parts import layers_of
from tasks.local_run.preflight import preflight
from tasks.recipes.common import PipelineRecipe
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


@pytest.mark.slow
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
def test_type_is_trained_like_a_plain_loop(kind: str, shares_rows: bool, tmp_path: Path) -> None:
    trained = outcome(kind, tmp_path)
    assert not trained.refused
    assert trained.error < BOUND
    assert trained.shares_rows is shares_rows


_IN_BFLOAT16 = {"bloom": False, "lfm2": False, "xglm": False, "gemma2": True, "nanochat": True}


def _chosen(folder: Path) -> tuple[bool, dict[str, torch.dtype]]:
    """Returns whether rows are shared, and dtypes of the first layers in a forward pass."""
    backend = make_backend(folder, dtype="bfloat16", training=DTensorTraining())
    dtypes: dict[str, torch.dtype] = {}

    def note(module: torch.nn.Module, _: Any) -> None:
        dtypes.update((name, each.dtype) for name, each in module.named_parameters())

    for layer in layers_of(backend._policy.model):
        layer.register_forward_pre_hook(note)
    backend.get_logprobs(make_batch())
    return backend._policy.shares_rows, dtypes


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "shares_rows"), _IN_BFLOAT16.items())
def test_bfloat16_does_not_hide_sequences_that_affect_each_other(
    kind: str, shares_rows: bool, tmp_path: Path
) -> None:
    """Nor does it make a correct model look wrong, since rows are compared in float32."""
    tiny_model(kind).save_pretrained(tmp_path / "start")
    save_tokenizer(tmp_path)
    assert _chosen(tmp_path / "start")[0] is shares_rows


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "exact"),
    [("bloom", ()), ("ernie4_5_moe", ("e_score_correction_bias", "mlp.gate.weight"))],
)
def test_ranks_compare_in_float32_and_train_in_bfloat16(
    kind: str, exact: tuple[str, ...], tmp_path: Path
) -> None:
    tiny_model(kind).save_pretrained(tmp_path / "start")
    save_tokenizer(tmp_path)
    for shares_rows, dtypes in run_ranks(partial(_chosen, tmp_path / "start"), world_size=2):
        assert shares_rows is (kind != "bloom")
        for name, dtype in dtypes.items():
            assert dtype == (torch.float32 if name.endswith(exact) else torch.bfloat16), name
        assert sum(name.endswith(exact) for name in dtypes) == len(exact)


def test_cap_is_detected_in_a_model_with_small_logits(tmp_path: Path) -> None:
    tiny_model("gemma2", final_logit_softcapping=1e4).save_pretrained(tmp_path / "start")
    save_tokenizer(tmp_path)
    policy: Any = make_backend(tmp_path / "start")._policy
    assert not policy._has_plain_head


@pytest.mark.parametrize(
    ("kind", "kernel"), [("mamba", None), ("gemma4_text", None), ("modernbert-decoder", "varlen")]
)
def test_fast_kernel_is_only_chosen_for_supported_models(
    kind: str, kernel: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cases: no heads, heads of different sizes, and a class that calls its head the decoder."""
    monkeypatch.setattr(
        attention, "unsupported_reasons", lambda *_, **__: []
    )  # as on a GPU that has all
    cuda, training = torch.device("cuda"), DTensorTraining()
    model = tiny_model(kind)
    packed = attention.packed_attention(model, training, dtype="bfloat16", device=cuda)
    assert (packed and packed.kernel) == kernel


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("xlnet", {}, "its tokens attend to later ones"),
        ("prophetnet", {}, "more than token ids"),
        ("rwkv", {}, "its backward pass fails"),
        ("bert", {"is_decoder": False}, "set is_decoder: true"),
        ("big_bird", {"attention_type": "block_sparse"}, "set attention_type: original_full"),
        ("llama", {"is_causal": False}, "remove is_causal"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "remove is_causal"),
    ],
)
def test_untrainable_types_are_refused_before_loading(
    kind: str, changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    tiny_model(kind, **changes).save_pretrained(tmp_path / "start")
    save_tokenizer(tmp_path)
    (tmp_path / "start" / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=reason) as refused:
        make_backend(tmp_path / "start")
    assert f"model_type {kind}: " in refused.value.got
    recipe = PipelineRecipe.model_validate({"model": {"name": str(tmp_path / "start")}})
    tiny_model(kind, **changes).save_pretrained(tmp_path / "start")
    with pytest.raises(ModelError, match=reason):
        preflight({"config": recipe})


def test_model_whose_tokens_attend_to_later_ones_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its packed rows agree with its forward pass, which sees the same later tokens."""
    monkeypatch.setattr(builder, "refuse_untrainable", lambda *_, **__: None)
    tiny_model("gemma3_text", use_bidirectional_attention=True).save_pretrained(tmp_path / "start")
    save_tokenizer(tmp_path)
    with pytest.raises(ModelError, match="the beginning of a sequence"):
        make_backend(tmp_path / "start")


@pytest.mark.parametrize(
    ("kind", "changes", "named"),
    [
        ("mistral", {}, "sliding_attention"),
        ("gemma2", {}, "attn_logit_softcapping"),
        ("gpt2", {}, "position_embeddings"),
        ("falcon", {}, "AttentionInterface"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}, "dynamic"),
    ],
)
def test_context_parallelism_refuses_attention_that_it_would_change(
    kind: str, changes: dict[str, Any], named: str
) -> None:
    group: Any = None  # refused before the ranks are used
    model = tiny_model(kind)
    model.config.update(changes)
    with pytest.raises(ConfigError, match=named):
        apply_context_parallel(model, group)


def _step(
    folder: Path, training: DTensorTraining, saved: Path | None = None
) -> tuple[torch.Tensor, float]:
    backend = make_backend(folder, training=training, seed=3)
    batch = make_batch()
    shard = batch.select_indices([rank(), rank() + 2, rank() + 4])
    metrics = backend.train_step(shard, NLLLoss())
    if saved:
        backend.save_checkpoint(saved)
    return backend.get_logprobs(batch), metrics["loss"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["deepseek_v3", "glm4_moe", "dots1", "ernie4_5_moe"])
@pytest.mark.parametrize("lora", [None, LoRAConfig(rank=2, alpha=4, target_modules=["o_proj"])])
def test_weights_that_transformers_keeps_in_float32_are_sent_in_float32(
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


def in_bfloat16(
    folders: dict[str, Path], lora: LoRAConfig | None
) -> dict[str, tuple[float, set[str], set[str]]]:
    """Returns a step's gradient norm, the weights used in float32, and those to keep in it."""
    batch, actual = make_batch(), {}
    shard = batch.select_indices(range(rank(), len(batch), world_size()))
    for kind, folder in folders.items():
        backend = make_backend(folder, dtype="bfloat16", training=DTensorTraining(lora=lora))
        model, exact = backend._policy.model, set()

        def note(module: Any, _: Any, name: str, exact: set[str] = exact) -> None:
            weights = module.named_parameters(name, recurse=False)
            exact |= {each for each, weight in weights if weight.dtype == torch.float32}

        for name, module in model.named_modules():
            module.register_forward_pre_hook(partial(note, name=name))
        norm = backend.train_step(shard, NLLLoss())["grad_norm"]
        names = {name for name, _ in model.named_parameters()}
        kept = {name for name in names if keeps_float32(model, plain_name(name))}
        actual[kind] = norm, exact, kept
        backend.shutdown()
    return actual


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, LoRAConfig(rank=2, alpha=4, target_modules=["o_proj"])])
def test_ranks_gather_weights_in_float32_that_transformers_keeps_in_it(
    lora: LoRAConfig | None, tmp_path: Path
) -> None:
    folders = {kind: tmp_path / kind / "start" for kind in ("hy_v4", "ernie4_5_moe")}
    for kind, folder in folders.items():
        tiny_model(kind).save_pretrained(folder)
        save_tokenizer(folder.parent)
    single = in_bfloat16(folders, lora)
    for actual in run_ranks(in_bfloat16, folders, lora, world_size=2):
        for kind, (norm, exact, kept) in actual.items():
            assert exact
            assert exact == kept - {"lm_head.weight"}  # a module that is not called
            assert norm == pytest.approx(single[kind][0], rel=0.02), kind


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "targets"),
    [
        ("gpt2", "all-linear"),  # its layers store transposed weights
        ("gpt_bigcode", ["c_attn", "c_proj"]),
        ("mixtral", "all-linear"),
        ("qwen3_moe", "all-linear"),
        ("deepseek_v3", "all-linear"),  # peft mistakes `up_proj` for experts of older checkpoints
        ("glm4_moe", ["up_proj"]),
        ("phimoe", "all-linear"),  # its router is a linear layer that returns a tuple
        ("jamba", "all-linear"),  # reads the weight of `dt_proj` without calling it
        ("nemotron_h", "all-linear"),  # peft refuses `out_proj`
        ("bart", "all-linear"),  # attention to an encoder that does not exist
        ("deepseek_v32", "all-linear"),  # its indexer has no gradient
        ("big_bird", "all-linear"),  # its pooler is not computed
        ("fuyu", "all-linear"),  # its first layer takes image patches
        ("laguna", "all-linear"),  # peft would rename its shared experts twice
        ("mixtral", EXPERTS),
        ("deepseek_v3", [*EXPERTS, "o_proj"]),
        ("gpt_oss", EXPERTS[:1]),  # its experts store transposed weights
        ("llama", ["lm_head", "q_proj"]),
        ("phi", ["lm_head"]),  # its head has a bias
        ("gemma2", "all-linear"),
    ],
)
def test_saved_weights_include_trained_adapters(kind: str, targets: Any, tmp_path: Path) -> None:
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
    trainer = tmp_path / "saved" / "trainer"
    adapted = PeftModel.from_pretrained(loaded(trainer / "base"), trainer / "adapter").eval()
    with torch.no_grad():
        torch.testing.assert_close(after, plain_logprobs(adapted, batch), rtol=0, atol=BOUND)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "targets"),
    [
        ("mixtral", EXPERTS),
        ("gpt_oss", EXPERTS),
        ("nemotron_h", "all-linear"),  # transformers uses random numbers to load it
    ],
)
def test_two_ranks_with_sharded_adapters_match_one(kind: str, targets: Any, tmp_path: Path) -> None:
    tiny_model(kind).save_pretrained(tmp_path / "start")
    save_tokenizer(tmp_path)
    training = DTensorTraining(lora=LoRAConfig(rank=2, alpha=8, target_modules=targets))
    one_rank = make_backend(tmp_path / "start", training=training, seed=3)
    batch = make_batch()
    before = one_rank.get_logprobs(batch)
    loss = one_rank.train_step(batch, NLLLoss())["loss"]
    expected = one_rank.get_logprobs(batch)
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
        ("mamba", ["in_proj", "out_proj"], "out_proj"),
        ("bart", ["self_attn.q_proj", "encoder_attn.q_proj"], "encoder_attn.q_proj"),
        ("deepseek_v32", ["q_b_proj", "wk"], "wk"),
        ("gemma2", ["q_proj", "lm_head"], "shares its weight"),
    ],
)
def test_untrained_targets_are_refused(
    kind: str, targets: list[str], named: str, tmp_path: Path
) -> None:
    tiny_model(kind).save_pretrained(tmp_path / "start")
    save_tokenizer(tmp_path)
    training = DTensorTraining(lora=LoRAConfig(target_modules=targets))
    with pytest.raises(ConfigError, match=named):
        make_backend(tmp_path / "start", training=training)
    recipe = {"model": {"name": str(tmp_path / "start")}, "training": training.model_dump()}
    with pytest.raises(ConfigError, match=named):
        preflight({"config": PipelineRecipe.model_validate(recipe)})


@pytest.mark.parametrize("kind", ["stablelm", "diffllama", "gpt2"])
def test_types_that_tensor_ranks_cannot_split_are_refused_before_the_run(
    kind: str, tmp_path: Path
) -> None:
    tiny_model(kind).save_pretrained(tmp_path / "start")
    save_tokenizer(tmp_path)
    axes = {"training": {"tensor_parallel_size": 2}, "cluster": {"num_workers": 2}}
    recipe = {"model": {"name": str(tmp_path / "start")}, **axes}
    with pytest.raises(ConfigError, match="has no plan to split"):
        preflight({"config": PipelineRecipe.model_validate(recipe)})
