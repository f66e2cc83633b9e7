"""The training worker compared with a plain transformers loop."""

import copy
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from nemo_rl_core.algorithms.sft.loss import NLLLoss
from nemo_rl_core.backends.training.base import TrainingSetup
from nemo_rl_core.backends.training.dtensor.attention import PackedAttention
from nemo_rl_core.backends.training.dtensor.backend import DTensorBackend
from nemo_rl_core.backends.training.dtensor.model import LogprobModel
from nemo_rl_core.config.model import DType
from nemo_rl_core.config.optimizer import OptimizerConfig
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict, collate
from nemo_rl_core.errors import ConsistencyError, DataError, ModelError

# With Adam's usual epsilon, a gradient that is zero except for rounding moves a weight by the full
# learning rate, in a direction that rounding decides, so results could not be compared.
EPSILON = 1e-3
OPTIMIZER = OptimizerConfig(
    learning_rate=1e-2, weight_decay=0.1, num_warmup_steps=2, adam_epsilon=EPSILON
)
LENGTHS = [11, 4, 7, 2, 9, 3, 3, 8]


def make_batch(vocabulary: int = 16) -> BatchedDataDict:
    generator = torch.Generator().manual_seed(1)
    sequences = [
        torch.randint(0, vocabulary, (length,), generator=generator).tolist() for length in LENGTHS
    ]
    masks = [[index >= length // 2 for index in range(length)] for length in LENGTHS]
    return collate(sequences, masks)


def make_backend(folder: Path, *, max_tokens: int = 24, **changes: object) -> DTensorBackend:
    backend = DTensorBackend()
    backend.setup(
        TrainingSetup(
            model_folder=folder,
            optimizer=OPTIMIZER,
            max_tokens_per_microbatch=max_tokens,
            **changes,
        )
    )
    return backend


def plain_logprobs(model: torch.nn.Module, batch: BatchedDataDict) -> torch.Tensor:
    """Computes each sequence separately, through the model's logits."""
    result = torch.zeros(batch["token_mask"].shape)
    for row, length in enumerate(batch["input_lengths"].tolist()):
        ids = batch["input_ids"][row : row + 1, :length]
        logprobs = torch.log_softmax(model(input_ids=ids).logits[0, :-1].float(), dim=-1)
        result[row, : length - 1] = logprobs.gather(-1, ids[0, 1:, None])[:, 0]
    return result * batch["token_mask"]


def plain_step(model: torch.nn.Module, batch: BatchedDataDict, optimizer: torch.optim.Optimizer):
    optimizer.zero_grad()
    loss = -plain_logprobs(model, batch).sum() / batch["token_mask"].sum()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item(), norm.item()


@pytest.mark.slow
@pytest.mark.parametrize("max_tokens", [11, 24, 1000])
def test_packed_logprobs_equal_those_of_separate_sequences(
    tiny_model: Path, max_tokens: int
) -> None:
    batch = make_batch()
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    expected = plain_logprobs(model, batch)
    actual = make_backend(tiny_model, max_tokens=max_tokens).get_logprobs(batch)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert (actual[~batch["token_mask"]] == 0).all()


def test_temperature_divides_the_logits(tiny_model: Path) -> None:
    batch = make_batch()
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    ids = batch["input_ids"][:1, :11]
    expected = torch.log_softmax(model(input_ids=ids).logits[0, 9] / 0.5, dim=-1)[ids[0, 10]]
    actual = make_backend(tiny_model, temperature=0.5).get_logprobs(batch)[0, 9]
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_changed_sequence_does_not_change_its_neighbors(tiny_model: Path) -> None:
    batch = make_batch()
    backend = make_backend(tiny_model, max_tokens=1000)
    before = backend.get_logprobs(batch)
    changed = BatchedDataDict(copy.deepcopy(dict(batch)))
    changed["input_ids"][1, :4] = (changed["input_ids"][1, :4] + 5) % 16
    after = backend.get_logprobs(changed)
    others = [row for row in range(len(LENGTHS)) if row != 1]
    assert torch.equal(before[others], after[others])
    assert not torch.equal(before[1], after[1])


@pytest.mark.slow
@pytest.mark.parametrize("max_tokens", [11, 1000])
def test_five_steps_follow_the_plain_loop(tiny_model: Path, max_tokens: int) -> None:
    batch = make_batch()
    backend = make_backend(tiny_model, max_tokens=max_tokens)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=EPSILON, weight_decay=0.1
    )
    for step in range(5):
        # Two steps of warm-up: half the rate, then the full rate.
        optimizer.param_groups[0]["lr"] = 1e-2 * min(1.0, (step + 1) / 2)
        loss, norm = plain_step(model, batch, optimizer)
        metrics = backend.train_step(batch, NLLLoss())
        assert metrics["loss"] == pytest.approx(loss, rel=1e-4)
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
        assert metrics["learning_rate"] == optimizer.param_groups[0]["lr"]
    expected = dict(model.named_parameters())
    for name, weight in backend.named_weights():
        torch.testing.assert_close(weight.cpu(), expected[name].detach(), rtol=1e-4, atol=1e-5)


def test_masked_sample_has_no_effect(tiny_model: Path) -> None:
    batch = make_batch()
    batch["sample_mask"][0] = 0
    fewer = batch.select_indices(range(1, len(LENGTHS)))
    with_masked, without = make_backend(tiny_model), make_backend(tiny_model)
    first = with_masked.train_step(batch, NLLLoss())
    second = without.train_step(fewer, NLLLoss())
    assert first["loss"] == pytest.approx(second["loss"], rel=1e-5)
    assert first["num_valid_tokens"] == second["num_valid_tokens"]


def test_resumed_training_is_bitwise_identical(tiny_model: Path, tmp_path: Path) -> None:
    batch = make_batch()
    straight = make_backend(tiny_model)
    for _ in range(4):
        straight.train_step(batch, NLLLoss())
    first = make_backend(tiny_model)
    for _ in range(2):
        first.train_step(batch, NLLLoss())
    first.save_checkpoint(tmp_path)
    second = make_backend(tiny_model)
    second.load_checkpoint(tmp_path)
    for _ in range(2):
        second.train_step(batch, NLLLoss())
    for (name, one), (_, other) in zip(
        straight.named_weights(), second.named_weights(), strict=True
    ):
        assert torch.equal(one, other), name


def test_reference_does_not_change(tiny_model: Path) -> None:
    batch = make_batch()
    backend = make_backend(tiny_model, reference_folder=tiny_model)
    start = backend.get_logprobs(batch)
    backend.train_step(batch, NLLLoss())
    assert torch.equal(backend.get_reference_logprobs(batch), start)
    assert not torch.equal(backend.get_logprobs(batch), start)


def test_non_finite_gradient_leaves_the_weights_unchanged(tiny_model: Path) -> None:
    backend = make_backend(tiny_model)
    before = [(name, weight.clone()) for name, weight in backend.named_weights()]

    def broken(logprobs, batch, *, global_valid_seqs, global_valid_tokens):
        return (logprobs * float("nan")).sum(), {}

    with pytest.raises(ConsistencyError, match="not finite"):
        backend.train_step(make_batch(), broken)
    for (name, old), (_, new) in zip(before, backend.named_weights(), strict=True):
        assert torch.equal(old, new), name


def test_sequence_over_the_budget_is_refused(tiny_model: Path) -> None:
    with pytest.raises(DataError, match="11 tokens does not fit"):
        make_backend(tiny_model, max_tokens=10).get_logprobs(make_batch())


@pytest.mark.parametrize(("dtype", "head"), [("float32", 1.0), ("bfloat16", 4.0)])
def test_model_that_changes_its_logits_after_the_head_is_refused(
    tiny_model: Path, dtype: DType, head: float
) -> None:
    """Bfloat16 compares the mean, here with logits that vary like those of a trained model."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(head)
    LogprobModel(model, temperature=1.0, dtype=dtype).choose_layout()

    def double(module: object, args: object, output: object) -> object:
        output.logits = output.logits * 2
        return output

    model.register_forward_hook(double)
    with pytest.raises(ModelError, match="different logprobs from its hidden states"):
        LogprobModel(model, temperature=1.0, dtype=dtype).choose_layout()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cap_on_logits_is_refused_if_it_exceeds_rounding(tiny_model: Path, dtype: DType) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    ids = torch.arange(12)[None]
    with torch.no_grad():
        model.lm_head.weight.mul_(9 / model(input_ids=ids).logits.abs().max())
    policy = LogprobModel(model, temperature=1.0, dtype=dtype)
    policy.choose_layout()

    def capped(module: object, args: object, output: object) -> object:
        output.logits = 30 * torch.tanh(output.logits / 30)
        return output

    model.register_forward_hook(capped)
    with pytest.raises(ModelError, match="different logprobs from its hidden states"):
        policy.choose_layout()


def test_reference_needs_a_folder(tiny_model: Path) -> None:
    with pytest.raises(ValueError, match="reference_folder"):
        make_backend(tiny_model).get_reference_logprobs(make_batch())


def test_two_halves_equal_a_full_step(tiny_model: Path) -> None:
    batch, loss = make_batch(), NLLLoss()
    full, halved = make_backend(tiny_model), make_backend(tiny_model)
    for _ in range(2):
        logprobs = halved.get_logprobs(batch)
        halved.forward_backward(batch.slice(0, 3), loss)  # abandoned; must leave no trace
        metrics, actual = halved.forward_backward(batch, loss)
        assert actual is not None
        assert torch.equal(actual, logprobs)
        assert {**metrics, **halved.optimizer_step()} == full.train_step(batch, loss)
    for ours, theirs in zip(full.named_weights(), halved.named_weights(), strict=True):
        assert torch.equal(ours[1], theirs[1])


def test_choices_report_the_kernel_of_auto(tiny_model: Path) -> None:
    backend = make_backend(tiny_model)
    on_a_cpu = {"training.attention": "sdpa", "training.deterministic": "true"}
    assert backend.choices() == on_a_cpu
    backend._policy.attention = PackedAttention(backend._policy.model, "flex")
    assert backend.choices() == {**on_a_cpu, "training.attention": "flex"}
