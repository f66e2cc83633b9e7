"""Hand-computed clipped losses, and every kind against its definition in plain Python."""

import math
import pickle
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_core.algorithms.grpo.loss import GRPOLossFn
from nemo_rl_core.algorithms.grpo.loss_config import (
    BandImportance,
    CISPOLoss,
    ClippedLoss,
    ConstantDenominator,
    GSPOLoss,
    KLInLoss,
    OnPolicyLoss,
    ReinforceLoss,
    SAPOLoss,
    SequenceMaskImportance,
    TruncatedImportance,
)
from nemo_rl_core.config.kl import KLInReward
from tests.loss_checks import (
    call_loss,
    check_metrics_are_detached_scalars,
    check_microbatches,
    check_poison,
)

LN2 = math.log(2)
LOGPROBS = ["prev_logprobs", "generation_logprobs", "reference_logprobs"]
PER_TOKEN = ["advantages", *LOGPROBS]


def run(config, logprobs, batch, step=None):
    return call_loss(GRPOLossFn(config), logprobs, batch, reads="both", step=step)


def by_token(advantages, width):
    return torch.tensor(advantages, dtype=torch.float64)[:, None].repeat(1, width)


def hand_batch():
    """Four valid tokens with ratios 2 and 1 (A = 1), and 1/2 and 2 (A = -3); one row masked out."""
    zeros = torch.zeros(3, 3, dtype=torch.float64)
    current = zeros.clone()
    current[0, 0], current[1, 0], current[1, 2] = LN2, -LN2, LN2
    batch = {
        "token_mask": torch.tensor([[1, 1, 0], [1, 0, 1], [1, 1, 1]]),
        "sample_mask": torch.tensor([1, 1, 0]),
        "advantages": by_token([1.0, -3.0, 100.0], 3),
        **{name: zeros.clone() for name in LOGPROBS},
    }
    return current.requires_grad_(), batch


def test_token_mean_by_hand():
    current, batch = hand_batch()
    config = ClippedLoss(clip_low=0.2, clip_high=0.4, kl=None)
    loss, metrics = run(config, current, batch)
    loss.backward()
    # A = 1:  r = 2 -> max(-2, -1.4) = -1.4 (clipped, no gradient); r = 1 -> -1, gradient -1
    # A = -3: r = 1/2 -> max(1.5, 2.4) = 2.4 (clipped);  r = 2 -> max(6, 4.2) = 6, gradient 3 * 2
    assert loss.item() == pytest.approx((-1.4 - 1 + 2.4 + 6) / 4)
    expected = torch.tensor([[0, -1, 0], [0, 0, 6], [0, 0, 0]], dtype=torch.float64) / 4
    torch.testing.assert_close(current.grad, expected)
    assert {name: value.item() for name, value in metrics.items()} == pytest.approx(
        {
            "loss": 6 / 4,
            "ratio_mean": (2 + 1 + 0.5 + 2) / 4,
            "approx_entropy": -(2 * LN2 + 0 - LN2 / 2 + 2 * LN2) / 4,
            "clip_fraction_high": 1 / 4,
            "clip_fraction_low": 1 / 4,
            # d = cur - prev = ln2, 0, -ln2, ln2; e^d - 1 - d
            "policy_kl": ((1 - LN2) + 0 + (-0.5 + LN2) + (1 - LN2)) / 4,
        }
    )


def test_sequence_mean_by_hand():
    current, batch = hand_batch()
    batch["token_mask"][0, 1] = 0
    config = ClippedLoss(clip_low=0.2, clip_high=0.4, reduction="sequence_mean", kl=None)
    loss, metrics = run(config, current, batch)
    # rows -1.4 / 1 and (2.4 + 6) / 2; the mean over two sequences, not over three tokens
    assert loss.item() == pytest.approx((-1.4 + 4.2) / 2)
    assert metrics["loss"].item() == loss.item()
    # metrics stay per token
    assert metrics["ratio_mean"].item() == pytest.approx((2 + 0.5 + 2) / 3)


def test_a_clip_that_does_not_bind_is_not_counted():
    current, batch = hand_batch()
    # With the signs swapped, max() takes the unclipped side at every ratio outside the band but
    # one: row 0 has r = 2 with A < 0; row 1 has r = 1/2 and, the one, r = 2 with A > 0.
    batch["advantages"] = -batch["advantages"]
    _, metrics = run(ClippedLoss(kl=None), current, batch)
    assert metrics["clip_fraction_low"].item() == 0
    assert metrics["clip_fraction_high"].item() == 1 / 4


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean"])
def test_a_valid_sequence_without_tokens_adds_nothing_but_counts(reduction):
    current, batch = hand_batch()
    config = ClippedLoss(reduction=reduction, kl=None)
    before, _ = run(config, current, batch)
    batch["sample_mask"][2], batch["token_mask"][2] = 1, 0
    after, _ = run(config, current, batch)
    # Z_seq grows from 2 to 3, Z_tok stays
    factor = 2 / 3 if reduction == "sequence_mean" else 1
    assert after.item() == pytest.approx(before.item() * factor)


@pytest.mark.parametrize(
    ("kind", "value", "gradient"),
    [
        # cur = -1, ref = -1 - ln2, d = -ln2: the gradient is -d for any estimate
        ("k1", LN2, LN2),
        ("k2", LN2**2 / 2, LN2),
        ("k3", LN2 - 0.5, LN2),
    ],
)
def test_kl_penalty_by_hand(kind, value, gradient):
    current = torch.tensor([[-1.0]], dtype=torch.float64, requires_grad=True)
    batch = {
        "token_mask": torch.ones(1, 1),
        "sample_mask": torch.ones(1),
        "advantages": torch.zeros(1, 1, dtype=torch.float64),
        "prev_logprobs": current.detach(),
        "reference_logprobs": current.detach() - LN2,
    }
    loss, metrics = run(ClippedLoss(kl=KLInLoss(kind=kind, beta=0.5)), current, batch)
    loss.backward()
    assert metrics["kl"].item() == pytest.approx(value)
    assert loss.item() == pytest.approx(0.5 * value)
    assert current.grad.item() == pytest.approx(0.5 * gradient)


def test_on_policy_gradient_is_minus_the_advantage():
    current = torch.tensor([[-0.5, -2.0], [-1.0, -3.0]], requires_grad=True)
    batch = {
        "token_mask": torch.ones(2, 2),
        "sample_mask": torch.ones(2),
        "advantages": torch.tensor([[2.0, 2.0], [-1.0, -1.0]]),
        "prev_logprobs": current.detach().clone(),
    }
    loss, metrics = run(ClippedLoss(kl=None), current, batch)
    loss.backward()
    assert current.grad.tolist() == [[-0.5, -0.5], [0.25, 0.25]]
    assert metrics["ratio_mean"].item() == 1
    assert metrics["policy_kl"].item() == 0


def test_without_a_penalty_the_reference_is_not_read():
    current, batch = hand_batch()
    del batch["reference_logprobs"]
    _, metrics = run(ClippedLoss(kl=None), current, batch)
    assert "kl" not in metrics
    with pytest.raises(KeyError, match="reference_logprobs"):
        run(ClippedLoss(), current, batch)


MEANS = ["token_mean", "sequence_mean", ConstantDenominator(max_tokens=7)]
KINDS = [
    lambda **shared: ClippedLoss(clip_low=0.1, clip_high=0.3, **shared),
    lambda **shared: ClippedLoss(dual_clip=1.4, **shared),
    lambda **shared: CISPOLoss(clip_low=0.3, clip_high=0.2, **shared),
    ReinforceLoss,
    OnPolicyLoss,
    lambda **shared: GSPOLoss(clip_low=0.1, clip_high=0.1, **{**shared, "reduction": MEANS[1]}),
    lambda **shared: SAPOLoss(tau_positive=1.5, tau_negative=3.0, **shared),
]
CORRECTIONS = [
    None,
    TruncatedImportance(cap=1.2),
    BandImportance(low=0.7, high=1.3),
    SequenceMaskImportance(low=0.9, high=1.1),
]
PENALTIES = [
    None,
    *(KLInLoss(kind=kind, beta=0.3) for kind in ("k1", "k2", "k3")),
    KLInReward(beta=0.3),
]


@st.composite
def cases(draw):
    """A config with a random batch whose ratios are on both sides of the bounds."""
    num_rows, width = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))

    def normal(scale, *shape):
        return scale * torch.randn(*shape, generator=generator, dtype=torch.float64)

    current = -normal(1.0, num_rows, width).abs()
    batch = {
        "token_mask": (torch.rand(num_rows, width, generator=generator) < 0.7).float(),
        "sample_mask": (torch.rand(num_rows, generator=generator) < 0.8).float(),
        "advantages": normal(1.0, num_rows, width),
        **{name: current + normal(0.4, num_rows, width) for name in LOGPROBS},
    }
    config = draw(st.sampled_from(KINDS))(
        reduction=draw(st.sampled_from(MEANS)),
        kl=draw(st.sampled_from(PENALTIES)),
        importance=draw(st.sampled_from(CORRECTIONS)),
        entropy_bonus=draw(st.sampled_from([0.0, 0.2])),
        weighted_terms=draw(st.sampled_from(["all", "policy"])),
    )
    return config, current, batch


def clamp(number, low, high):
    return max(low, min(high, number))


def policy_loss(config, cur, anchor, prev, advantage, log_ratio):
    """L for one token; `anchor` is `stopgrad(cur)`, which differentiation holds fixed."""
    ratio = math.exp(log_ratio)
    match config.kind:
        case "clipped" | "gspo":
            clipped = clamp(ratio, 1 - config.clip_low, 1 + config.clip_high)
            loss = max(-advantage * ratio, -advantage * clipped)
            dual = getattr(config, "dual_clip", None)
            return min(loss, -advantage * dual) if dual and advantage < 0 else loss
        case "cispo":
            fixed = clamp(math.exp(anchor - prev), 1 - config.clip_low, 1 + config.clip_high)
            return -advantage * fixed * cur
        case "reinforce":
            return -advantage * cur
        case "on_policy":
            return -advantage * math.exp(cur - anchor)
        case "sapo":
            tau = config.tau_positive if advantage > 0 else config.tau_negative
            return -advantage * 4 / tau / (1 + math.exp(-tau * (ratio - 1)))


def importance(config, own, mean):
    """w of a token from its log-weight and that of its sequence."""
    own, mean = math.exp(mean if config.kind == "gspo" else own), math.exp(mean)
    match config.importance:
        case None:
            return 1.0
        case TruncatedImportance(cap=cap):
            return min(own, cap)
        case BandImportance(low=low, high=high):
            return own if low <= own <= high else 0.0
        case SequenceMaskImportance(low=low, high=high):
            return own if low <= mean <= high else 0.0


def penalty(config, cur, anchor, ref):
    """KL and entropy for one token."""
    total = config.entropy_bonus * math.exp(cur - anchor) * cur
    if config.kl is None or config.kl.place == "in_reward":
        return total
    d = clamp(ref - anchor, -20, 20)
    kl = {"k1": -d, "k2": d * d / 2, "k3": math.exp(d) - 1 - d}[config.kl.kind]
    return total + config.kl.beta * (clamp(kl, -10, 10) - d * (cur - anchor))


def plain_row(config, cur, anchor, row):
    """The losses of the valid tokens of one sequence."""
    valid = [t for t, is_valid in enumerate(row["token_mask"]) if is_valid]
    prev = anchor if config.kind == "on_policy" else row["prev_logprobs"]
    gen, count = row["generation_logprobs"], max(len(valid), 1)
    mean_ratio = sum(cur[t] - prev[t] for t in valid) / count
    mean_weight = sum(prev[t] - gen[t] for t in valid) / count
    mean_anchor = sum(anchor[t] - prev[t] for t in valid) / count
    losses = []
    for t in valid:
        log_ratio = mean_ratio if config.kind == "gspo" else cur[t] - prev[t]
        loss = policy_loss(config, cur[t], anchor[t], prev[t], row["advantages"][t], log_ratio)
        weight = importance(config, prev[t] - gen[t], mean_weight)
        fixed = math.exp(mean_anchor if config.kind == "gspo" else anchor[t] - prev[t])
        on_policy = weight * fixed if config.weighted_terms == "all" else 1.0
        extra = penalty(config, cur[t], anchor[t], row["reference_logprobs"][t])
        losses.append(weight * loss + on_policy * extra)
    return losses


def plain_loss(config, current, anchor, batch):
    columns = {name: values.tolist() for name, values in batch.items()}
    rows = [
        plain_row(
            config, current[i], anchor[i], {name: values[i] for name, values in columns.items()}
        )
        for i, is_valid in enumerate(columns["sample_mask"])
        if is_valid
    ]
    if config.reduction == "token_mean":
        return sum(map(sum, rows)) / max(sum(map(len, rows)), 1)
    if config.reduction == "sequence_mean":
        return sum(sum(row) / max(len(row), 1) for row in rows) / max(len(rows), 1)
    return sum(map(sum, rows)) / max(len(rows) * config.reduction.max_tokens, 1)


@settings(max_examples=80, deadline=None)
@given(cases())
def test_value_and_gradient_equal_the_plain_definition(case):
    config, current, batch = case
    logprobs = current.clone().requires_grad_()
    loss, _ = run(config, logprobs, batch)
    loss.backward()
    anchor, step = current.tolist(), 1e-6
    assert loss.item() == pytest.approx(plain_loss(config, anchor, anchor, batch), abs=1e-10)
    for i in range(current.shape[0]):
        for t in range(current.shape[1]):
            values = []
            for sign in (1, -1):
                moved = current.tolist()
                moved[i][t] += sign * step
                values.append(plain_loss(config, moved, anchor, batch))
            slope = (values[0] - values[1]) / (2 * step)
            assert logprobs.grad[i, t].item() == pytest.approx(slope, abs=1e-6)


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(cases(), st.data())
def test_microbatches_sum_to_the_step_in_loss_metrics_and_gradient(case, data):
    config, current, batch = case
    num_rows = current.shape[0]
    owner = torch.tensor(
        data.draw(st.lists(st.integers(0, 2), min_size=num_rows, max_size=num_rows))
    )
    parts = [owner == part for part in range(3)]
    check_microbatches(partial(run, config), current, batch, parts)


@settings(max_examples=80, deadline=None)
@given(cases(), st.sampled_from([math.nan, math.inf, -math.inf]), st.integers(0, 7))
def test_poison_at_masked_entries_changes_nothing(case, poison, extra):
    config, current, batch = case
    mask = batch["token_mask"].bool() & batch["sample_mask"].bool()[:, None]

    def poisoned(values):
        values = torch.where(mask, values, poison)
        return torch.cat([values, values.new_full((values.shape[0], extra), poison)], dim=1)

    padding = batch["token_mask"].new_zeros(mask.shape[0], extra)
    dirty_batch = {
        "token_mask": torch.cat([batch["token_mask"], padding], dim=1),
        "sample_mask": batch["sample_mask"],
        **{name: poisoned(batch[name]) for name in PER_TOKEN},
    }
    dirty = poisoned(current), dirty_batch
    check_poison(partial(run, config), (current, batch), dirty, mask)


def test_a_nan_at_a_valid_token_is_not_hidden():
    current, batch = hand_batch()
    batch["prev_logprobs"][0, 0] = math.nan
    loss, metrics = run(ClippedLoss(kl=None), current, batch)
    assert loss.isnan()
    assert metrics["ratio_mean"].isnan()


def test_metrics_are_detached_scalars():
    current, batch = hand_batch()
    check_metrics_are_detached_scalars(run(ClippedLoss(), current, batch))


def test_loss_is_picklable_and_frozen():
    loss_fn = GRPOLossFn(ClippedLoss(clip_high=0.3))
    assert pickle.loads(pickle.dumps(loss_fn)) == loss_fn  # noqa: S301
    with pytest.raises(AttributeError):
        loss_fn.config = ClippedLoss()
