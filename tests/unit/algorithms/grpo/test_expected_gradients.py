"""Expected gradients over all completions of a tiny vocabulary, against their definitions."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from nemo_rl_core.algorithms.grpo.config import GRPOConfig
from nemo_rl_core.algorithms.grpo.data import add_advantages, with_outcomes
from nemo_rl_core.algorithms.grpo.loss import GRPOLossFn
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict

VOCABULARY, END, MAX_TOKENS = 3, 2, 3
PREFIXES = [p for n in range(MAX_TOKENS) for p in itertools.product((0, 1), repeat=n)]
SUM = {"kind": "constant", "max_tokens": 1}
"""The sum over tokens, the mean over sequences."""


def completions(prefix: tuple[int, ...] = ()) -> list[tuple[int, ...]]:
    if len(prefix) == MAX_TOKENS or prefix[-1:] == (END,):
        return [prefix]
    return [actual for token in range(VOCABULARY) for actual in completions((*prefix, token))]


COMPLETIONS = completions()
MASK = torch.tensor([[float(t < len(c)) for t in range(MAX_TOKENS)] for c in COMPLETIONS])


def model(seed: int, scale: float = 0.5) -> Tensor:
    """Logits of the next token after each prefix, `[prefixes, V]`."""
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(len(PREFIXES), VOCABULARY, generator=generator).double()
    return logits.requires_grad_()


def logprobs(logits: Tensor) -> Tensor:
    """Returns `[15, 3]` logprobs of all completions, 0 where a completion has ended."""
    table = torch.log_softmax(logits, -1)
    rows = [
        torch.stack(
            [
                table[PREFIXES.index(c[:t]), c[t]] if t < len(c) else table.new_zeros(())
                for t in range(MAX_TOKENS)
            ]
        )
        for c in COMPLETIONS
    ]
    return torch.stack(rows)


def gradient(value: Tensor, logits: Tensor) -> Tensor:
    (actual,) = torch.autograd.grad(value, logits, retain_graph=True)
    return actual.flatten()


def comparison(actual: Tensor, expected: Tensor) -> tuple[float, float]:
    """Returns the cosine of two gradients, and the ratio of their norms."""
    cosine = torch.cosine_similarity(actual, expected, dim=0).item()
    return cosine, (actual.norm() / expected.norm()).item()


def distance(actual: Tensor, expected: Tensor) -> float:
    return ((actual - expected).norm() / expected.norm()).item()


def with_kl_in_reward(kl: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Returns the expected gradient over all pairs of completions, and the gradient of their KL."""
    config = GRPOConfig.model_validate(
        {
            "num_generations_per_prompt": 2,
            "advantage": {"kind": "leave_one_out"},
            "loss": {"kind": "reinforce", "reduction": SUM, "kl": {"beta": 1.0, **kl}},
        }
    )
    policy, reference = model(1), logprobs(model(2)).detach()
    current = logprobs(policy)
    chances = current.detach().sum(-1).exp()
    total = torch.zeros((), dtype=torch.float64)
    for pair in itertools.product(range(len(COMPLETIONS)), repeat=2):
        rows = list(pair)
        batch = BatchedDataDict(
            token_mask=MASK[rows],
            sample_mask=torch.ones(2),
            rewards=torch.zeros(2, dtype=torch.float64),
            group_ids=torch.zeros(2, dtype=torch.long),
            truncated=torch.zeros(2, dtype=torch.bool),
            prev_logprobs=current[rows].detach(),
            reference_logprobs=reference[rows],
        )
        outcomes = with_outcomes(batch, config, max_new_tokens=MAX_TOKENS)
        batch = add_advantages(outcomes, config)
        loss, _ = GRPOLossFn(config.loss)(
            current[rows],
            batch,
            global_valid_seqs=torch.tensor(2.0),
            global_valid_tokens=MASK[rows].sum(),
        )
        total = total + chances[rows].prod() * loss
    divergence = (current.sum(-1).exp() * (current.sum(-1) - reference.sum(-1))).sum()
    return gradient(total, policy), gradient(divergence, policy)


def test_probabilities_of_all_completions_sum_to_one() -> None:
    assert len(COMPLETIONS) == 15
    assert logprobs(model(1)).sum(-1).exp().sum().item() == pytest.approx(1)


def test_the_penalty_in_the_reward_has_by_default_the_gradient_of_the_kl() -> None:
    actual, expected = with_kl_in_reward({"place": "in_reward"})
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("kind", "cosine", "length"), [("k2", -0.35, 0.24), ("k3", -0.55, 0.26)])
def test_other_estimators_in_the_reward_have_another_gradient(
    kind: str, cosine: float, length: float
) -> None:
    kl = {"place": "in_reward", "kind": kind, "allow_biased_gradient": True}
    actual = comparison(*with_kl_in_reward(kl))
    assert actual == pytest.approx((cosine, length), abs=0.005)


FULL = {"kind": "truncated", "cap": float("inf")}


def of_stale_samples(loss: dict[str, Any], *, sampled: str) -> tuple[Tensor, Tensor]:
    """Returns the expected gradient over samples of older weights, and that of the definition.

    Args:
        loss: KL or entropy, without a policy term since all advantages are 0.
        sampled: `before the step`, by an engine with older weights; or `in the step`, by the
            weights that the step's earlier optimizer steps have changed.
    """
    policy, old, reference = model(1), model(3), logprobs(model(2)).detach()
    current, sampler = logprobs(policy), logprobs(old).detach()
    is_older = sampled == "before the step"
    importance = {"importance": FULL} if is_older else {}
    config = GRPOConfig.model_validate({"loss": {"reduction": SUM, **importance, **loss}}).loss
    total = torch.zeros((), dtype=torch.float64)
    for row, chance in enumerate(sampler.sum(-1).exp()):
        rows = [row]
        batch = {
            "token_mask": MASK[rows],
            "sample_mask": torch.ones(1),
            "advantages": torch.zeros(1, MAX_TOKENS, dtype=torch.float64),
            "prev_logprobs": (current if is_older else sampler)[rows].detach(),
            "generation_logprobs": sampler[rows],
            "reference_logprobs": reference[rows],
        }
        value, metrics = GRPOLossFn(config)(
            current[rows],
            batch,
            global_valid_seqs=torch.tensor(1.0),
            global_valid_tokens=MASK[rows].sum(),
        )
        assert value.item() == pytest.approx(reported(metrics) * MASK[rows].sum().item())
        total = total + chance * value
    return gradient(total, policy), gradient(defined(policy, old, loss), policy)


def reported(metrics: dict[str, Tensor]) -> float:
    name, sign = ("kl", 1) if "kl" in metrics else ("approx_entropy", -1)
    return sign * metrics[name].item()


def defined(policy: Tensor, old: Tensor, loss: dict[str, Any]) -> Tensor:
    """Returns KL or negative entropy of the next token, summed over the samples' prefixes."""
    table, reference = torch.log_softmax(policy, -1), torch.log_softmax(model(2), -1).detach()
    other = reference if loss["kl"] is not None else torch.zeros_like(reference)
    of_prefix = (table.exp() * (table - other)).sum(-1)
    chances = torch.log_softmax(old.detach(), -1)
    reached = [
        sum(chances[PREFIXES.index(p[:t]), token] for t, token in enumerate(p)) for p in PREFIXES
    ]
    return (torch.as_tensor(reached).exp() * of_prefix).sum()


@pytest.mark.parametrize("sampled", ["before the step", "in the step"])
@pytest.mark.parametrize(
    ("loss", "off"),
    [
        ({"kl": {"beta": 1.0}}, 0.23),
        ({"kl": None, "entropy_bonus": 1.0}, 0.34),
    ],
    ids=["kl", "entropy"],
)
def test_stale_samples_have_the_gradient_of_the_policy_in_training(
    loss: dict[str, Any], off: float, sampled: str
) -> None:
    actual, expected = of_stale_samples(loss, sampled=sampled)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)
    unweighted = {**loss, "weighted_terms": "policy"}
    assert distance(*of_stale_samples(unweighted, sampled=sampled)) == pytest.approx(off, abs=0.005)


@pytest.mark.parametrize("kind", ["clipped", "cispo", "reinforce", "on_policy", "gspo", "sapo"])
def test_samples_of_the_current_weights_have_weight_one(kind: str) -> None:
    results = []
    for terms in ("all", "policy"):
        loss = {"kind": kind, "kl": {"beta": 0.3}, "entropy_bonus": 0.2, "weighted_terms": terms}
        config = GRPOConfig.model_validate({"loss": loss}).loss
        policy = model(1)
        current = logprobs(policy)
        value, metrics = GRPOLossFn(config, prev_is_current=True)(
            current,
            {
                "token_mask": MASK,
                "sample_mask": torch.ones(len(COMPLETIONS)),
                "advantages": logprobs(model(4)).detach(),
                "reference_logprobs": logprobs(model(2)).detach(),
            },
            global_valid_seqs=torch.tensor(15.0),
            global_valid_tokens=MASK.sum(),
        )
        results.append((gradient(value, policy), value.detach(), metrics))
    (one, value, metrics), (other, plain, others) = results
    assert torch.equal(one, other)
    assert torch.equal(value, plain)
    assert all(torch.equal(metrics[name], others[name]) for name in others)
