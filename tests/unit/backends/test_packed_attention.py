"""Attention over packed rows with boundaries, compared with transformers and a dense mask."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import BlockMask
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from nemo_rl_core.algorithms.sft.loss import NLLLoss
from nemo_rl_core.backends.training import packed_attention as kernels
from nemo_rl_core.backends.training.base import TrainingSetup
from nemo_rl_core.backends.training.dtensor.attention import PackedAttention, packed_attention
from nemo_rl_core.backends.training.dtensor.backend import DTensorBackend
from nemo_rl_core.backends.training.dtensor.microbatches import packed_tokens
from nemo_rl_core.backends.training.dtensor.model import LogprobModel
from nemo_rl_core.backends.training.dtensor.parallelize import parallelize
from nemo_rl_core.config.optimizer import OptimizerConfig
from nemo_rl_core.config.training import DTensorTraining
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict, collate
from nemo_rl_core.distributed.local_ranks import run_ranks
from nemo_rl_core.distributed.packing.plan import Microbatch
from nemo_rl_core.errors import ConfigError, ModelError

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
SIZES: dict[str, Any] = {
    "vocab_size": 19,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
}
KINDS = ["sliding_attention", "full_attention"]
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**{**SIZES, "num_key_value_heads": 4}),
    "llama grouped": LlamaConfig(**SIZES),
    "qwen2": Qwen2Config(**{**SIZES, "num_key_value_heads": 1}),
    "qwen3": Qwen3Config(**SIZES),
    "gemma3, windows": Gemma3TextConfig(**SIZES, sliding_window=4, layer_types=KINDS),
}
LENGTHS = [7, 3, 6, 2, 9]
PACKINGS = {
    "a row each": ((0,), (1,), (2,), (3,), (4,)),
    "one row": ((0, 1, 2, 3, 4),),
    "filler": ((0, 1), (2, 3), (4,)),
}

on_cpus = pytest.mark.skipif(
    torch.cuda.is_available(), reason="tests/gpu/test_1_attention.py does this on GPUs"
)


def model_of(kind: str) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[kind]).eval()


def batch_of(rows: tuple[tuple[int, ...], ...]) -> tuple[BatchedDataDict, Microbatch]:
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(0, 19, (n,), generator=generator).tolist() for n in LENGTHS]
    batch = collate(ids, [[True] * n for n in LENGTHS])
    longest = max(sum(LENGTHS[each] for each in row) for row in rows)
    return batch, Microbatch(rows=rows, row_length=longest + 1)


def computed(
    model: Any, rows: tuple[tuple[int, ...], ...], attention: str | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns hidden states of all tokens and gradients of the logprobs' sum."""
    kernel = PackedAttention(model, attention) if attention else None  # type: ignore[arg-type]
    packed = LogprobModel(model, temperature=1.0, dtype="float32", attention=kernel)
    batch, plan = batch_of(rows)
    is_token = torch.arange(max(LENGTHS)) < batch["input_lengths"][:, None]
    every = packed_tokens(batch, plan, is_token, with_boundaries=kernel is not None)
    (hidden,) = packed._read(batch, every, lambda hidden, _: (hidden,))
    weight = torch.linspace(-1, 1, hidden.numel(), dtype=hidden.dtype).view_as(hidden)
    logprobs = packed.logprobs(batch, packed.packed(batch, plan))
    ((hidden * weight).sum() + logprobs.sum().to(hidden.dtype)).backward()
    gradients = {name: each.grad for name, each in model.named_parameters()}
    return hidden.detach(), {name: grad for name, grad in gradients.items() if grad is not None}


@pytest.mark.slow
@pytest.mark.parametrize("packing", list(PACKINGS))
@pytest.mark.parametrize("kind", list(CONFIGS))
def test_boundaries_match_a_dense_mask(kind: str, packing: str) -> None:
    for dtype, bound in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        want, want_gradients = computed(model_of(kind).to(dtype), PACKINGS[packing], None)
        actual, gradients = computed(model_of(kind).to(dtype), PACKINGS[packing], "reference")
        torch.testing.assert_close(actual, want, rtol=bound, atol=bound)
        assert set(gradients) == set(want_gradients)
        # The head computes in float32, whatever the decoder's dtype.
        largest = max(each.abs().max() for each in want_gradients.values()).item()
        for name, gradient in want_gradients.items():
            close = bound * largest if name.startswith("model.layers") else 1e-5 * largest
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-5, atol=close)


@on_cpus
def test_recomputed_layers_use_boundaries() -> None:
    rows = PACKINGS["one row"]
    want, want_gradients = computed(model_of("qwen3"), rows, None)
    training = DTensorTraining(activation_checkpointing=True)
    model = parallelize(model_of("qwen3"), training, None, dtype="float32")
    actual, gradients = computed(model, rows, "reference")
    torch.testing.assert_close(actual, want, rtol=1e-5, atol=1e-5)
    for name, gradient in want_gradients.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-4)


def test_no_mask_of_all_pairs_is_created(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, ...]] = []
    plain = kernels.KERNELS["reference"]

    def watched(query: Tensor, *others: Any, **options: Any) -> Tensor:
        seen.append(tuple(query.shape))
        return plain(query, *others, **options)

    monkeypatch.setitem(kernels.KERNELS, "reference", watched)
    monkeypatch.setattr(
        "transformers.masking_utils.find_packed_sequence_indices",
        lambda _: pytest.fail("transformers made a mask"),
    )
    model = model_of("llama grouped")
    computed(model, PACKINGS["filler"], "reference")
    assert seen == [(3 * 11, 4, 16)] * 4  # 2 layers, 2 passes: tokens, heads, size


def test_unpacked_rows_use_the_default_attention() -> None:
    plain, registered = model_of("gemma3, windows"), model_of("gemma3, windows")
    PackedAttention(registered, "reference")
    ids = torch.arange(1, 13).view(2, 6)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
    with torch.no_grad():
        for options in ({}, {"attention_mask": mask}, {"attention_mask": mask, "use_cache": True}):
            want, actual = (each(input_ids=ids, **options).logits for each in (plain, registered))
            assert torch.equal(actual, want)
        want, actual = (
            each.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False)
            for each in (plain, registered)
        )
    assert torch.equal(actual, want)


def test_model_that_does_not_pass_boundaries_is_refused() -> None:
    model = model_of("llama")
    PackedAttention(model, "reference")
    with pytest.raises(ModelError, match=r"training\.attention to sdpa"):
        model(torch.ones(1, 4).long(), attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool))


def test_segments_begin_with_sequences_and_filler() -> None:
    segments = kernels.segments_of(torch.tensor([[0, 1, 2, 0, 1], [0, 1, 0, 0, 1]]))
    assert segments.boundaries.tolist() == [0, 3, 5, 7, 8, 10]
    assert segments.boundaries.dtype == torch.int32
    assert segments.longest == 3


def dense_mask(borders: list[int], window: int | None) -> Tensor:
    positions = torch.arange(borders[-1])
    segment = torch.bucketize(positions, torch.tensor(borders[1:]), right=True)
    distance = positions[:, None] - positions
    allowed = (segment[:, None] == segment) & (distance >= 0)
    return allowed if window is None else allowed & (distance < window)


def last_of(boundaries: Tensor) -> Tensor:
    """Returns the last token of each token's sequence."""
    return (boundaries[1:] - 1).repeat_interleave(boundaries.diff())


def listed_blocks(numbers: Tensor, indices: Tensor) -> Tensor:
    """Converts FlexAttention's lists to a `[B, B]` bool mask."""
    actual = torch.zeros(indices.shape[-2:], dtype=torch.bool)
    for row, count in enumerate(numbers[0, 0].tolist()):
        actual[row, indices[0, 0, row, :count].long()] = True
    return actual


@pytest.mark.parametrize("window", [None, 1, 100, 300])
@pytest.mark.parametrize(
    "borders",
    [[0, 5], [0, 128], [0, 1, 600], [0, 100, 128, 300, 640], [0, 3, 500, 511, 900], [0, 512, 1000]],
)
def test_block_masks_contain_the_pairs_of_a_dense_mask(
    borders: list[int], window: int | None
) -> None:
    boundaries = torch.tensor(borders, dtype=torch.int32)
    mask = kernels.block_mask(last_of(boundaries), window)
    assert isinstance(mask, BlockMask)
    want = dense_mask(borders, window)
    positions = torch.arange(borders[-1], dtype=torch.int32)
    none = torch.tensor(0)
    assert torch.equal(mask.mask_mod(none, none, positions[:, None], positions[None]), want)
    filler = -len(positions) % 128
    blocks = torch.nn.functional.pad(want, (0, filler, 0, filler)).unflatten(1, (-1, 128))
    blocks = blocks.unflatten(0, (-1, 128)).transpose(1, 2).flatten(2)
    # In the last row of blocks, only existing queries count.
    exists = torch.nn.functional.pad(torch.ones_like(want), (0, filler, 0, filler))
    exists = exists.unflatten(1, (-1, 128)).unflatten(0, (-1, 128)).transpose(1, 2).flatten(2)
    assert mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None
    partly = listed_blocks(mask.kv_num_blocks, mask.kv_indices)
    wholly = listed_blocks(mask.full_kv_num_blocks, mask.full_kv_indices)
    assert torch.equal(partly | wholly, blocks.any(-1))
    assert not (partly & wholly).any()
    assert (blocks | ~exists).all(-1)[wholly].all()


@pytest.mark.parametrize("window", [None, 40])
def test_flex_matches_the_reference(window: int | None) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(300, heads, 16) for heads in (4, 2, 2))
    boundaries = torch.tensor([0, 7, 140, 300], dtype=torch.int32)
    masks = {window: kernels.block_mask(last_of(boundaries), window)}
    segments = kernels.Segments(boundaries, 160, masks)
    with torch.no_grad():
        actual, want = (
            kernels.KERNELS[name](query, key, value, segments, scale=0.3, window=window)
            for name in ("flex", "reference")
        )
    torch.testing.assert_close(actual, want, rtol=1e-5, atol=1e-5)


def test_flex_computes_logprobs_of_packed_rows() -> None:
    batch, plan = batch_of(PACKINGS["filler"])
    results = []
    for kernel in (None, "flex"):
        model = model_of("gemma3, windows")
        attention = PackedAttention(model, kernel) if kernel else None
        with torch.no_grad():
            packed = LogprobModel(model, temperature=1.0, dtype="float32", attention=attention)
            results.append(packed.logprobs(batch, packed.packed(batch, plan)))
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 4])
def test_varlen_attn_of_this_torch_accepts_the_call(window: int | None) -> None:
    with FakeTensorMode():
        parts = [
            torch.empty(10, heads, 16, dtype=torch.bfloat16, requires_grad=True)
            for heads in (4, 2, 2)
        ]
        segments = kernels.Segments(torch.empty(3, dtype=torch.int32), 6)
        actual = kernels.varlen_attention(*parts, segments, scale=0.3, window=window)
        assert actual.shape == parts[0].shape
        actual.sum().backward()
        assert [each.grad is not None and each.grad.shape for each in parts] == [
            each.shape for each in parts
        ]


def test_varlen_attn_is_causal_in_every_torch() -> None:
    arguments = kernels._varlen_arguments
    newer = frozenset({"query", "scale", "window_size", "enable_gqa"})
    assert arguments(newer, scale=0.3, window=None) == {"scale": 0.3, "window_size": (-1, 0)}
    assert arguments(newer, scale=None, window=8) == {"scale": None, "window_size": (7, 0)}
    both = newer | {"is_causal"}
    assert arguments(both, scale=None, window=None)["is_causal"]
    older = frozenset({"query", "is_causal"})
    assert arguments(older, scale=None, window=None) == {"is_causal": True}
    with pytest.raises(NotImplementedError, match="window_size"):
        arguments(older, scale=None, window=8)


def chosen(model: Any, device: torch.device, dtype: str = "bfloat16", **training: Any) -> Any:
    actual = packed_attention(model, DTensorTraining(**training), dtype=dtype, device=device)
    return actual and actual.kernel


def test_auto_is_the_fastest_kernel_for_the_model(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert chosen(model_of("qwen3"), CPU) is None
    assert chosen(model_of("qwen3"), CUDA) == "varlen"
    assert chosen(model_of("gemma3, windows"), CUDA) == "varlen"
    assert chosen(model_of("qwen3"), CUDA, dtype="float32") == "flex"
    assert chosen(model_of("qwen3"), CUDA, attention="sdpa") is None
    caplog.set_level(logging.WARNING)
    assert chosen(model_of("qwen3"), CUDA, context_parallel_size=2) is None
    assert "context_parallel_size splits rows" in caplog.text
    softcap = AutoModelForCausalLM.from_config(Gemma2Config(**SIZES), attn_implementation="sdpa")
    assert chosen(softcap, CUDA) is None
    assert "attn_logit_softcapping" in caplog.text
    narrow = LlamaConfig(**{**SIZES, "head_dim": 8})
    assert chosen(AutoModelForCausalLM.from_config(narrow), CUDA, dtype="float32") is None
    assert "heads of 16 or more, not 8" in caplog.text


@on_cpus
def test_kernel_that_cannot_compute_the_model_is_refused(tiny_model: Path) -> None:
    for kernel in ("varlen", "flex"):
        setup = TrainingSetup(
            model_folder=tiny_model,
            optimizer=OptimizerConfig(),
            training=DTensorTraining(attention=kernel),
            max_tokens_per_microbatch=24,
        )
        with pytest.raises(ConfigError, match=f"{kernel} only computes gradients") as error:
            DTensorBackend().setup(setup)
        assert "leave training.attention out" in str(error.value)
    with pytest.raises(ConfigError, match="16 bits, not in float32") as error:
        chosen(model_of("qwen3"), CUDA, dtype="float32", attention="varlen")
    assert "flex, sdpa" in str(error.value)


def sharded_step(folder: Path, tensor_parallel_size: int) -> list[tuple[Tensor, dict[str, float]]]:
    """Returns logprobs and a step with a dense mask and with boundaries."""
    results = []
    for kernel in (None, "reference"):
        training = DTensorTraining(
            activation_checkpointing=True, tensor_parallel_size=tensor_parallel_size
        )
        with pytest.MonkeyPatch.context() as patch:
            if kernel:
                patch.setattr(
                    "nemo_rl_core.backends.training.dtensor.builder.packed_attention",
                    lambda model, *_, **__: PackedAttention(model, "reference"),
                )
            backend = DTensorBackend()
            backend.setup(
                TrainingSetup(
                    model_folder=folder,
                    optimizer=OptimizerConfig(learning_rate=1e-2, adam_epsilon=1e-3),
                    training=training,
                    max_tokens_per_microbatch=16,
                )
            )
            batch, _ = batch_of(PACKINGS["filler"])
            batch["input_ids"] %= 16
            results.append((backend.get_logprobs(batch), backend.train_step(batch, NLLLoss())))
    return results


@pytest.mark.thorough
@pytest.mark.parametrize("tensor_parallel_size", [1, 2])
def test_sharded_models_use_boundaries(tiny_model: Path, tensor_parallel_size: int) -> None:
    for results in run_ranks(sharded_step, tiny_model, tensor_parallel_size, world_size=2):
        (want, want_step), (actual, found_step) = results
        torch.testing.assert_close(actual, want, rtol=1e-5, atol=1e-5)
        assert found_step["loss"] == pytest.approx(want_step["loss"], rel=1e-5)
        assert found_step["grad_norm"] == pytest.approx(want_step["grad_norm"], rel=1e-4)


def test_kernels_and_context_parallelism_exclude_each_other() -> None:
    for kernel in ("varlen", "flex"):
        with pytest.raises(ValueError, match="context parallelism"):
            DTensorTraining(attention=kernel, context_parallel_size=2)
    DTensorTraining(attention="sdpa", context_parallel_size=2)
