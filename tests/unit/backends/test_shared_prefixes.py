"""Shared prefixes: values and gradients of separate sequences, from fewer tokens."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MambaConfig,
    PreTrainedConfig,
    Starcoder2Config,
    Starcoder2Model,
)

from nemo_rl_core.algorithms.dpo.loss import DPOLossFn
from nemo_rl_core.algorithms.grpo.loss import GRPOLossFn
from nemo_rl_core.algorithms.grpo.loss_config import ClippedLoss, KLInLoss
from nemo_rl_core.backends.training.base import TrainingSetup, allowed_sharing
from nemo_rl_core.backends.training.dtensor.attention import PackedAttention
from nemo_rl_core.backends.training.dtensor.backend import DTensorBackend
from nemo_rl_core.backends.training.dtensor.model import LogprobModel
from nemo_rl_core.backends.training.packed_attention import block_mask
from nemo_rl_core.config.optimizer import OptimizerConfig
from nemo_rl_core.config.training import DTensorTraining, LoRAConfig
from nemo_rl_core.data.pretrained import load_tokenizer
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict, collate
from nemo_rl_core.distributed.packing.ranks import plan_shard
from tests.unit.backends.test_packed_attention import listed_blocks

SIZES: dict[str, Any] = {
    "vocab_size": 19,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
}


def made(config: PreTrainedConfig, folder: Path, tokenizer: Path) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    load_tokenizer(tokenizer).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Its norms compute in float64 if weights do, unlike those of Llama and Qwen.
    config = Starcoder2Config(**SIZES, sliding_window=None)
    return made(config, tmp_path_factory.mktemp("starcoder2") / "model", tiny_model)


def started(folder: Path, *, share: bool, head: str = "lm", **training: Any) -> DTensorBackend:
    backend = DTensorBackend()
    backend.setup(
        TrainingSetup(
            model_folder=folder,
            # With such an epsilon, AdamW's first step is plain gradient descent.
            optimizer=OptimizerConfig(
                learning_rate=1e4, adam_epsilon=1e8, adam_beta1=0, adam_beta2=0, max_grad_norm=1e9
            ),
            max_tokens_per_microbatch=64,
            training=DTensorTraining(share_prefixes=share, **training),
            head=head,
        )
    )
    return backend


def groups(*, prompt: int = 9) -> BatchedDataDict:
    """Creates four groups of four; in each, two completions begin alike, and two are equal."""
    generator = torch.Generator().manual_seed(2)

    def tokens(count: int) -> list[int]:
        return torch.randint(3, 19, (count,), generator=generator).tolist()

    sequences, masks = [], []
    for _ in range(4):
        start, first = tokens(prompt), tokens(5)
        for completion in (first, [*first[:2], *tokens(4)], tokens(3), first):
            sequences.append([*start, *completion])
            masks.append([False] * prompt + [True] * len(completion))
    batch = collate(sequences, masks)
    shape = batch["token_mask"].shape
    batch["advantages"] = torch.randn(shape, generator=generator)
    for name in ("prev_logprobs", "reference_logprobs"):
        batch[name] = -3 * torch.rand(shape, generator=generator)
    return batch


def pairs() -> BatchedDataDict:
    batch = groups()
    batch["pair_ids"] = torch.arange(8).repeat_interleave(2)
    batch["is_chosen"] = torch.tensor([True, False] * 8)
    return batch


def num_tokens(backend: DTensorBackend) -> int:
    """Returns the number of tokens in the last plan."""
    (plan,) = backend._microbatches._plans.values()
    return sum(len(part.rows) * part.row_length for part in plan)


def mean_square(
    values: torch.Tensor, batch: BatchedDataDict, **_: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    valid = torch.arange(values.shape[1]) < batch["input_lengths"][:, None]
    return ((values - 1).square() * valid).sum(), {}


CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "grpo": (groups, GRPOLossFn(ClippedLoss(kl=KLInLoss(beta=0.1))), {}),
    "dpo": (pairs, DPOLossFn(), {}),
    "critic": (groups, mean_square, {"head": "scalar"}),
    "lora": (
        groups,
        GRPOLossFn(ClippedLoss(kl=None)),
        {"lora": LoRAConfig(rank=4, alpha=8.0)},
    ),
    "recomputed": (
        groups,
        GRPOLossFn(ClippedLoss(kl=None)),
        {"activation_checkpointing": True},
    ),
}


@pytest.fixture
def float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_loss_values_and_gradients_match_separate_sequences(
    case: str, folder: Path, request: pytest.FixtureRequest
) -> None:
    make, loss, options = CASES[case]
    is_scalar = options.get("head") == "scalar"  # that head is always float32
    backends = [started(folder, share=share, **options) for share in (True, False)]
    if not is_scalar:
        request.getfixturevalue("float64")
    tolerance = 1e-5 if is_scalar else 1e-10
    results = []
    for backend in backends:
        if not is_scalar:
            backend._policy.model.double()
        values = (backend.get_values if is_scalar else backend.get_logprobs)(make())
        before = {name: weight.clone() for name, weight in backend.named_weights()}
        metrics = backend.train_step(make(), loss)
        moved = {name: before[name] - weight for name, weight in backend.named_weights()}
        results.append((values, metrics, moved, num_tokens(backend)))
    (values, metrics, moved, few), (expected_values, same, as_much, many) = results
    assert few < (0.75 if case == "dpo" else 0.6) * many
    torch.testing.assert_close(values, expected_values, rtol=0, atol=tolerance)
    assert metrics == pytest.approx(same, rel=tolerance, abs=tolerance)
    largest = max(float(each.abs().max()) for each in as_much.values())
    assert largest > 1e-7
    for name, difference in moved.items():
        error = float((difference - as_much[name]).abs().max())
        assert error < tolerance * largest, (name, error, largest)


def test_logprobs_in_float32_only_differ_by_rounding(folder: Path) -> None:
    shared, separate = (
        started(folder, share=share).get_logprobs(groups()) for share in (True, False)
    )
    assert not torch.equal(shared, torch.zeros_like(shared))
    assert float((shared.sum(1) - separate.sum(1)).abs().max()) < 3e-5


def test_rerun_is_bitwise_identical(folder: Path) -> None:
    loss = GRPOLossFn(ClippedLoss(kl=None))
    weights = []
    for _ in range(2):
        backend = started(folder, share=True)
        backend.train_step(groups(), loss)
        weights.append(dict(backend.named_weights()))
    assert all(torch.equal(each, weights[1][name]) for name, each in weights[0].items())


@pytest.mark.slow
def test_windows_limit_sharing(tiny_model: Path, tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention"]
    config = Gemma3TextConfig(**SIZES, sliding_window=12, layer_types=kinds)
    folder = made(config, tmp_path / "gemma3", tiny_model)
    sharing = allowed_sharing(folder)
    assert sharing is not None and sharing.longest == 12
    for prompt, is_shared in ((6, True), (11, False)):
        batches = [groups(prompt=prompt), groups(prompt=prompt)]
        backends = [started(folder, share=share) for share in (True, False)]
        shared, separate = (
            each.get_logprobs(batch) for each, batch in zip(backends, batches, strict=True)
        )
        assert float((shared - separate).abs().max()) < 1e-5
        assert (num_tokens(backends[0]) < num_tokens(backends[1])) == is_shared


def test_sequence_longer_than_a_window_is_packed_separately(
    tiny_model: Path, tmp_path: Path
) -> None:
    kinds = ["sliding_attention", "full_attention"]
    config = Gemma3TextConfig(**SIZES, sliding_window=12, layer_types=kinds)
    folder = made(config, tmp_path / "gemma3", tiny_model)
    short, long = groups(prompt=4), groups(prompt=20)
    sequences = [
        batch["input_ids"][row, : int(batch["input_lengths"][row])].tolist()
        for batch, rows in ((short, range(16)), (long, (0,)))
        for row in rows
    ]
    batch = collate(sequences, [[True] * len(each) for each in sequences])
    shared, separate = (started(folder, share=share).get_logprobs(batch) for share in (True, False))
    assert float((shared - separate).abs().max()) < 1e-5


def tree_of(kernel: str | None, folder: Path) -> tuple[LogprobModel, torch.Tensor]:
    """Returns logprobs of two groups in rows of two and one, with a kernel."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.get_default_dtype()).eval()
    attention = PackedAttention(model, kernel) if kernel else None
    packed = LogprobModel(
        model,
        temperature=1.0,
        dtype="float32",
        attention=attention,
        sharing=allowed_sharing(folder),
    )
    batch = groups()
    plan = plan_shard(batch, max_tokens=64, sharing=packed.sharing)
    assert all(part.shared for part in plan)
    actual = torch.zeros(batch["token_mask"].shape)
    for part in plan:
        rows = batch.select_indices(part.indices)
        actual[list(part.indices)] = packed.logprobs(rows, packed.packed(rows, part))
    return packed, actual


def test_trees_with_boundaries_match_a_dense_mask(folder: Path, float64: None) -> None:
    gradients = []
    for kernel in (None, "reference"):
        packed, actual = tree_of(kernel, folder)
        (actual * torch.linspace(-1, 1, actual.numel()).view_as(actual)).sum().backward()
        moved = {name: each.grad for name, each in packed.model.named_parameters()}
        gradients.append((actual.detach(), moved))
    (values, moved), (expected_values, as_much) = gradients
    torch.testing.assert_close(values, expected_values, rtol=0, atol=1e-10)
    torch.testing.assert_close(moved, as_much, rtol=0, atol=1e-10)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="compiled there, by tests/gpu")
def test_flex_computes_trees(folder: Path) -> None:
    with torch.no_grad():
        (_, actual), (_, expected) = (tree_of(kernel, folder) for kernel in ("flex", None))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@given(st.lists(st.integers(1, 200), min_size=1, max_size=6), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_blocks_of_trees_contain_every_pair(sizes: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    parents = [int(torch.randint(-1, n, (), generator=generator)) for n in range(len(sizes))]
    # Nodes in depth-first order; the end of a node's parent comes after the node's end.
    children = {n: [each for each, of in enumerate(parents) if of == n] for n in (-1, *parents)}
    last: list[int] = []

    def place(node: int) -> None:
        begin = len(last)
        last.extend([0] * sizes[node])
        for child in children.get(node, []):
            place(child)
        last[begin : begin + sizes[node]] = [len(last) - 1] * sizes[node]

    for root in children[-1]:
        place(root)
    keys = torch.tensor(last, dtype=torch.int32)
    positions = torch.arange(len(last), dtype=torch.int32)
    want = (positions <= positions[:, None]) & (positions[:, None] <= keys)
    mask = block_mask(keys, None)
    none = torch.tensor(0)
    assert torch.equal(mask.mask_mod(none, none, positions[:, None], positions), want)
    partly = listed_blocks(mask.kv_num_blocks, mask.kv_indices)
    assert mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None
    wholly = listed_blocks(mask.full_kv_num_blocks, mask.full_kv_indices)
    for query in range(0, len(last), 128):
        for key in range(0, len(last), 128):
            pairs = want[query : query + 128, key : key + 128]
            at = query // 128, key // 128
            assert bool(pairs.all()) or not wholly[at]
            assert bool((partly | wholly)[at]) or not pairs.any()


def test_allowed_sharing_of_configs(tiny_model: Path, tmp_path: Path) -> None:
    heads = {**SIZES, "max_position_embeddings": 32}
    llama = made(LlamaConfig(**heads), tmp_path / "llama", tiny_model)
    sharing = allowed_sharing(llama)
    assert sharing is not None and sharing.longest == float("inf")
    mamba = MambaConfig(vocab_size=19, hidden_size=16, num_hidden_layers=1, state_size=4)
    assert allowed_sharing(made(mamba, tmp_path / "mamba", tiny_model)) is None


def test_model_that_computes_different_values_does_not_share(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # It ignores the mask, and derives one from positions that restart, like some models.
    plain = Starcoder2Model.forward

    def forward(self: Any, *args: Any, attention_mask: Any = None, **named: Any) -> Any:
        return plain(self, *args, **named)

    monkeypatch.setattr(Starcoder2Model, "forward", forward)
    backend = started(folder, share=True)
    assert backend.prefix_sharing() is None
    assert "training.share_prefixes: Starcoder2ForCausalLM computes different values" in caplog.text
    separate = started(folder, share=False)
    assert torch.equal(backend.get_logprobs(groups()), separate.get_logprobs(groups()))


def test_setting_turns_sharing_off(folder: Path) -> None:
    assert started(folder, share=True).prefix_sharing() is not None
    assert started(folder, share=False).prefix_sharing() is None
