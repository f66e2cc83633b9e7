"""Chunked logprobs against the plain computation, and what they hold in memory."""

import math
from weakref import WeakValueDictionary

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nemo_rl_core.functional import logprobs as module
from nemo_rl_core.functional.logprobs import (
    LOGITS_BYTES,
    LOGITS_BYTES_ON_GPU,
    logprobs_from_logits,
    rows_at_once,
    token_logprobs_from_hidden,
    token_logprobs_within_budget,
    topk_logprobs_from_hidden,
)

CPU = torch.device("cpu")


def head(num_rows, width, vocab, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        values = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return values.to(dtype).requires_grad_()

    targets = torch.randint(vocab, (num_rows,), generator=generator)
    return normal(num_rows, width), normal(vocab, width), targets, normal(vocab)


def next_token_logprobs(hidden, weight, targets, **options):
    """One token a row: `targets [N]`, to `[N]`."""
    return token_logprobs_from_hidden(hidden, weight, targets[:, None], **options).squeeze(-1)


def test_plain_logprobs_by_hand():
    # logits / T = [ln 1, ln 2, ln 5] -> probabilities 1/8, 2/8, 5/8
    logits = 2 * torch.tensor([[1.0, 2.0, 5.0]]).log()
    result = logprobs_from_logits(logits, torch.tensor([1]), temperature=2.0)
    assert result.item() == pytest.approx(math.log(2 / 8), abs=1e-6)


def test_chunked_logprobs_by_hand():
    # The head is the identity, so the hidden state is the logits: probabilities 1/4 and 3/4.
    hidden = torch.tensor([[1.0, 3.0], [3.0, 1.0]]).log()
    result = next_token_logprobs(
        hidden, torch.eye(2), torch.tensor([0, 0]), temperature=1.0, chunk_size=1
    )
    assert result.exp().tolist() == pytest.approx([0.25, 0.75])


@settings(max_examples=25, deadline=None)
@given(
    num_rows=st.integers(0, 9),
    chunk_size=st.integers(1, 12),
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    with_bias=st.booleans(),
)
def test_equals_the_plain_computation_with_gradients(num_rows, chunk_size, temperature, with_bias):
    hidden, weight, targets, bias = head(num_rows, 4, 7)
    inputs = [hidden, weight, *([bias] if with_bias else [])]
    chunked = next_token_logprobs(
        hidden,
        weight,
        targets,
        temperature=temperature,
        chunk_size=chunk_size,
        bias=bias if with_bias else None,
    )
    logits = hidden @ weight.T + (bias if with_bias else 0)
    plain = logprobs_from_logits(logits, targets, temperature=temperature)
    torch.testing.assert_close(chunked, plain)
    weights = torch.arange(1, num_rows + 1, dtype=torch.float64)
    for ours, theirs in zip(
        torch.autograd.grad((chunked * weights).sum(), inputs),
        torch.autograd.grad((plain * weights).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


def test_gradients_by_finite_differences():
    hidden, weight, targets, bias = head(5, 3, 4)

    def compute(hidden, weight, bias):
        return next_token_logprobs(
            hidden, weight, targets, temperature=0.7, chunk_size=2, bias=bias
        )

    assert torch.autograd.gradcheck(compute, (hidden, weight, bias))


def test_bfloat16_is_normalized_in_float32():
    hidden, weight, targets, _ = head(6, 8, 300, dtype=torch.bfloat16)
    result = next_token_logprobs(hidden, weight, targets, temperature=1.0, chunk_size=4)
    # The product is bfloat16, as in the model; everything behind it must not be.
    logits = (hidden @ weight.T).double()
    expected = torch.log_softmax(logits, dim=-1).gather(-1, targets[:, None]).squeeze(-1)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result.double(), expected, rtol=0, atol=1e-5)


def test_logits_of_any_size_stay_finite():
    hidden = torch.tensor([[1e4, -1e4]])
    result = next_token_logprobs(
        hidden.expand(2, 2), torch.eye(2), torch.tensor([0, 1]), temperature=1.0, chunk_size=1
    )
    assert result.tolist() == [0.0, -2e4]


class LiveElements(TorchDispatchMode):
    """Follows how many elements of `[*, vocab]` tensors are alive at once."""

    def __init__(self, vocab):
        super().__init__()
        self.vocab, self.live, self.peak = vocab, WeakValueDictionary(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.shape[-1:] == (self.vocab,):
                self.live[id(leaf)] = leaf
        storages = {tensor.data_ptr(): tensor.numel() for tensor in self.live.values()}
        self.peak = max(self.peak, sum(storages.values()))
        return result


def peak_of(compute, vocab):
    mode = LiveElements(vocab)
    with mode:
        compute().sum().backward()
    return mode.peak


def test_full_logits_never_exist_forward_or_backward():
    num_rows, vocab, chunk_size = 64, 1000, 4
    hidden, weight, targets, _ = head(num_rows, 8, vocab, dtype=torch.float32)
    chunked = peak_of(
        lambda: next_token_logprobs(
            hidden, weight, targets, temperature=0.5, chunk_size=chunk_size
        ),
        vocab,
    )
    plain = peak_of(
        lambda: logprobs_from_logits(hidden @ weight.T, targets, temperature=0.5), vocab
    )
    assert plain >= 2 * num_rows * vocab
    # The weight's transpose [D, V] ends in V as well; 6 chunks leave room for temporaries.
    assert chunked <= 6 * chunk_size * vocab + weight.numel()


def test_without_gradients_nothing_is_kept():
    hidden, weight, targets, _ = head(8, 4, 50, dtype=torch.float32)
    with torch.no_grad():
        result = next_token_logprobs(hidden, weight, targets, temperature=1.0, chunk_size=3)
    assert not result.requires_grad
    expected = logprobs_from_logits(hidden @ weight.T, targets, temperature=1.0)
    torch.testing.assert_close(result, expected)


@settings(max_examples=15, deadline=None)
@given(num_rows=st.integers(0, 7), num_ids=st.integers(1, 4), chunk_size=st.integers(1, 9))
def test_several_tokens_a_row_equal_the_plain_computation(num_rows, num_ids, chunk_size):
    hidden, weight, _, bias = head(num_rows, 4, 7)
    ids = torch.randint(7, (num_rows, num_ids), generator=torch.Generator().manual_seed(1))
    chunked = token_logprobs_from_hidden(
        hidden, weight, ids, temperature=0.7, chunk_size=chunk_size, bias=bias
    )
    plain = torch.log_softmax((hidden @ weight.T + bias) / 0.7, dim=-1).gather(-1, ids)
    torch.testing.assert_close(chunked, plain)
    weights = torch.arange(1.0, 1 + ids.numel(), dtype=torch.float64).reshape(ids.shape)
    for ours, theirs in zip(
        torch.autograd.grad((chunked * weights).sum(), (hidden, weight, bias)),
        torch.autograd.grad((plain * weights).sum(), (hidden, weight, bias)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


def test_gradients_of_several_tokens_by_finite_differences():
    hidden, weight, _, bias = head(3, 2, 4)
    ids = torch.tensor([[0, 3], [1, 1], [2, 0]])  # a token twice counts twice

    def compute(hidden, weight, bias):
        return token_logprobs_from_hidden(
            hidden, weight, ids, temperature=1.3, chunk_size=2, bias=bias
        )

    assert torch.autograd.gradcheck(compute, (hidden, weight, bias))


def test_top_k_tokens_by_hand():
    # The head is the identity and T = 2: probabilities 1/8, 2/8, 5/8 and 5/8, 1/8, 2/8.
    hidden = 2 * torch.tensor([[1.0, 2.0, 5.0], [5.0, 1.0, 2.0]]).log()
    ids, logprobs = topk_logprobs_from_hidden(
        hidden, torch.eye(3), k=2, num_ids=3, temperature=2.0, chunk_size=1
    )
    assert ids.tolist() == [[2, 1], [0, 2]]
    assert logprobs.exp().flatten().tolist() == pytest.approx([5 / 8, 2 / 8, 5 / 8, 2 / 8])
    # Id 2 stands for no token: it is not chosen, but keeps its share of the probability.
    ids, logprobs = topk_logprobs_from_hidden(
        hidden, torch.eye(3), k=2, num_ids=2, temperature=2.0, chunk_size=5
    )
    assert ids.tolist() == [[1, 0], [0, 1]]
    assert logprobs.exp().flatten().tolist() == pytest.approx([2 / 8, 1 / 8, 5 / 8, 1 / 8])


def test_full_logits_never_exist_for_several_tokens_either():
    num_rows, vocab, chunk_size = 64, 1000, 4
    hidden, weight, _, _ = head(num_rows, 8, vocab, dtype=torch.float32)
    ids = torch.randint(vocab, (num_rows, 5), generator=torch.Generator().manual_seed(0))
    chunked = peak_of(
        lambda: token_logprobs_from_hidden(
            hidden, weight, ids, temperature=0.5, chunk_size=chunk_size
        ),
        vocab,
    )
    assert chunked <= 6 * chunk_size * vocab + weight.numel()

    mode = LiveElements(vocab)
    with mode:
        topk_logprobs_from_hidden(
            hidden, weight, k=5, num_ids=vocab, temperature=0.5, chunk_size=chunk_size
        )
    assert mode.peak <= 6 * chunk_size * vocab + weight.numel()


def test_rows_at_once_by_hand():
    # 192 MiB hold four float32 tensors of 82 x 151,936 (199,340,032 bytes), and none of 83 rows.
    assert 82 * 151_936 * 4 * 4 == 199_340_032 <= LOGITS_BYTES == 201_326_592
    assert rows_at_once(151_936, CPU) == 82
    assert rows_at_once(12_288, CPU) == 1024 == LOGITS_BYTES // (12_288 * 4 * 4)
    # Small heads keep 1,024 rows, with which every figure of the small models was taken.
    assert rows_at_once(19, CPU) == rows_at_once(12_287, CPU) == 1024
    assert rows_at_once(12_289, CPU) == 1023
    assert rows_at_once(2**30, CPU) == 1  # one row is more than the budget
    assert rows_at_once(151_936, torch.device("cuda")) == 441
    assert 441 * 151_936 * 4 * 4 <= LOGITS_BYTES_ON_GPU < 442 * 151_936 * 4 * 4


@pytest.fixture
def two_rows_at_once(monkeypatch):
    """A budget with room for two rows of a head of 5 tokens."""
    monkeypatch.setattr(module, "LOGITS_BYTES", 2 * 5 * 4 * 4)
    assert rows_at_once(5, CPU) == 2


@pytest.mark.usefixtures("two_rows_at_once")
def test_large_heads_by_finite_differences():
    hidden, weight, _, bias = head(5, 2, 5)
    ids = torch.tensor([[0, 3], [1, 1], [2, 0], [4, 4], [3, 2]])

    def compute(hidden, weight, bias):
        return token_logprobs_within_budget(hidden, weight, ids, temperature=1.3, bias=bias)

    assert torch.autograd.gradcheck(compute, (hidden, weight, bias))
    frozen = weight.detach()  # as below adapters
    (without_weight,) = torch.autograd.grad(compute(hidden, frozen, None).sum(), hidden)
    (with_weight, _) = torch.autograd.grad(compute(hidden, weight, None).sum(), (hidden, weight))
    assert torch.equal(without_weight, with_weight)


@pytest.mark.usefixtures("two_rows_at_once")
@pytest.mark.parametrize("num_rows", [0, 1, 5])
def test_large_heads_give_what_small_ones_give(num_rows):
    hidden, weight, targets, bias = head(num_rows, 3, 5, dtype=torch.float32)
    leaves = (hidden, weight, bias)
    ids, upstream = targets[:, None], torch.linspace(-1, 1, num_rows)[:, None]
    large = token_logprobs_within_budget(hidden, weight, ids, temperature=0.7, bias=bias)
    small = token_logprobs_from_hidden(
        hidden, weight, ids, temperature=0.7, chunk_size=2, bias=bias
    )
    torch.testing.assert_close(large, small)
    for ours, theirs in zip(
        torch.autograd.grad((large * upstream).sum(), leaves),
        torch.autograd.grad((small * upstream).sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("num_ids", [1, 3])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_kept_logits_give_what_logits_computed_twice_give(num_ids, temperature):
    hidden, weight, _, bias = head(7, 4, 11)
    leaves = (hidden, weight, bias)
    ids = torch.randint(11, (7, num_ids), generator=torch.Generator().manual_seed(1))
    upstream = torch.linspace(-1, 1, 7 * num_ids, dtype=torch.float64).reshape(7, num_ids)
    kept = token_logprobs_within_budget(hidden, weight, ids, temperature=temperature, bias=bias)
    twice = token_logprobs_from_hidden(
        hidden, weight, ids, temperature=temperature, chunk_size=3, bias=bias
    )
    plain = torch.log_softmax((hidden @ weight.T + bias) / temperature, dim=-1).gather(-1, ids)
    expected = torch.autograd.grad((plain * upstream).sum(), leaves)
    for found in (kept, twice):
        torch.testing.assert_close(found, plain, rtol=1e-10, atol=1e-10)
        total = (found * upstream).sum()
        # The second call finds no kept logits any more.
        for _ in range(2):
            gradients = torch.autograd.grad(total, leaves, retain_graph=True)
            torch.testing.assert_close(gradients, expected, rtol=1e-10, atol=1e-10)


def test_kept_logits_are_one_tensor():
    num_rows, vocab = 16, 1000
    hidden, weight, targets, _ = head(num_rows, 8, vocab, dtype=torch.float32)
    kept = peak_of(
        lambda: token_logprobs_within_budget(hidden, weight, targets[:, None], temperature=0.5),
        vocab,
    )
    # The weight's transpose [D, V] ends in V as well.
    assert kept == num_rows * vocab + weight.numel()


@pytest.mark.usefixtures("two_rows_at_once")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_heads_in_bfloat16_sum_their_gradient_in_float32(dtype):
    """For a bfloat16 weight, as FSDP gathers it, only the sum is rounded."""
    hidden, weight, targets, _ = head(200, 3, 5, dtype=torch.float32)
    ids = targets[:, None]
    values = weight.detach().to(dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        rounded = token_logprobs_within_budget(hidden, values, ids, temperature=1.0)
    (of_weight,) = torch.autograd.grad(rounded.sum(), values)
    plain = torch.log_softmax(hidden @ weight.T, dim=-1).gather(-1, ids)
    (exact,) = torch.autograd.grad(plain.sum(), weight)
    assert of_weight.dtype == dtype
    # 0.0015 of it; 100 chunks summed in bfloat16 are off by 0.0099.
    assert (of_weight - exact).norm() < 0.005 * exact.norm()
