"""Every preference loss: hand-computed values, micro-batches, row order and NaN."""

import math
import pickle
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_core.algorithms.dpo.config import (
    HingeLoss,
    IPOLoss,
    KTOLoss,
    LengthNormalizedLoss,
    ORPOLoss,
    RobustLoss,
    SFTTerm,
    SigmoidLoss,
    SimPOLoss,
)
from nemo_rl_core.algorithms.dpo.loss import DPOLossFn
from tests.loss_checks import (
    call_loss,
    check_gradient,
    check_metrics_are_detached_scalars,
    check_microbatches,
    check_poison,
)

NAN = math.nan
KINDS = [
    SigmoidLoss(beta=0.5),
    SigmoidLoss(beta=0.5, label_smoothing=0.1, sft=SFTTerm(weight=0.3, per="sequence")),
    HingeLoss(beta=0.5),
    IPOLoss(beta=0.5),
    IPOLoss(beta=0.5, per="sequence"),
    RobustLoss(beta=0.5, label_smoothing=0.2),
    SimPOLoss(beta=2.0, gamma=0.5, sft=SFTTerm(weight=0.2)),
    LengthNormalizedLoss(beta=2.0, label_smoothing=0.1),
    KTOLoss(beta=0.5, desirable_weight=1.5, undesirable_weight=0.5),
    ORPOLoss(odds_weight=0.4),
]


def label(config):
    return f"{config.kind}-{getattr(config, 'per', '')}-{getattr(config, 'label_smoothing', 0)}"


every_kind = pytest.mark.parametrize("config", KINDS, ids=label)


def run(config, logprobs, batch, step=None):
    return call_loss(DPOLossFn(config), logprobs, batch, reads="sequences", step=step)


def hand_batch():
    """Pairs 3 and 7 in mixed order, and a masked pair that must not be read.

    | row | pair | side | tokens | rho                 | sum cur | mean cur |
    |   0 | 7    | r    | 2      | 0 - 0.5     = -0.5  | -3.0    | -1.5     |
    |   1 | 3    | c    | 2      | 1 - 0.5     =  0.5  | -4.0    | -2.0     |
    |   2 | 7    | c    | 1      |                1.0  | -0.5    | -0.5     |
    |   3 | 3    | r    | 3      | .2 + .1 + .3 = 0.6  | -3.0    | -1.0     |
    """
    n = NAN
    rows = [[-1, -2, n], [n, -1, -3], [-0.5, n, n], [-1, -1, -1], [n, n, n], [n, n, n]]
    reference = [[-1, -1.5, n], [n, -2, -2.5], [-1.5, n, n], [-1.2, -1.1, -1.3], [n] * 3, [n] * 3]
    batch = {
        "token_mask": torch.tensor(
            [[1, 1, 0], [0, 1, 1], [1, 0, 0], [1, 1, 1], [1, 1, 1], [1, 1, 1]]
        ),
        "sample_mask": torch.tensor([1.0, 1, 1, 1, 0, 0]),
        "pair_ids": torch.tensor([7, 3, 7, 3, 5, 5]),
        "is_chosen": torch.tensor([False, True, True, False, True, False]),
        "reference_logprobs": torch.tensor(reference, dtype=torch.float64),
        "kl_baseline": torch.tensor([0.25, 0.25, 0.25, 0.25, n, n], dtype=torch.float64),
    }
    return torch.tensor(rows, dtype=torch.float64, requires_grad=True), batch


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def nls(x):
    return -math.log(sigmoid(x))


def odds(mean_logprob):
    p = math.exp(mean_logprob)
    return math.log(p / (1 - p))


# rho_c - rho_r: pair 3: 0.5 - 0.6 = -0.1; pair 7: 1 + 0.5 = 1.5.
# Over tokens: pair 3: 0.5/2 - 0.6/3 = 0.05; pair 7: 1/1 + 0.5/2 = 1.25.
# Mean cur: pair 3: -2 + 1 = -1; pair 7: -0.5 + 1.5 = 1.
@pytest.mark.parametrize(
    ("config", "pair_3", "pair_7"),
    [
        (SigmoidLoss(beta=0.5), nls(-0.05), nls(0.75)),
        (
            SigmoidLoss(beta=0.5, label_smoothing=0.1),
            0.9 * nls(-0.05) + 0.1 * nls(0.05),
            0.9 * nls(0.75) + 0.1 * nls(-0.75),
        ),
        (HingeLoss(beta=0.5), 1.05, 0.25),
        (IPOLoss(beta=0.5, per="token"), (0.05 - 1) ** 2, (1.25 - 1) ** 2),
        (IPOLoss(beta=0.5, per="sequence"), (-0.1 - 1) ** 2, (1.5 - 1) ** 2),
        (
            RobustLoss(beta=0.5, label_smoothing=0.2),
            (0.8 * nls(-0.05) - 0.2 * nls(0.05)) / 0.6,
            (0.8 * nls(0.75) - 0.2 * nls(-0.75)) / 0.6,
        ),
        (SimPOLoss(beta=2.0, gamma=0.5), nls(2 * -1 - 0.5), nls(2 * 1 - 0.5)),
        (LengthNormalizedLoss(beta=2.0), nls(0.1), nls(2.5)),
        (
            ORPOLoss(odds_weight=0.4),
            2.0 + 0.4 * nls(odds(-2) - odds(-1)),
            0.5 + 0.4 * nls(odds(-0.5) - odds(-1.5)),
        ),
        # the supervised term: weight times the NLL of the chosen, per token or summed
        (HingeLoss(beta=0.5, sft=SFTTerm(weight=0.3)), 1.05 + 0.3 * 2, 0.25 + 0.3 * 0.5),
        (
            HingeLoss(beta=0.5, sft=SFTTerm(weight=0.3, per="sequence")),
            1.05 + 0.3 * 4,
            0.25 + 0.3 * 0.5,
        ),
    ],
)
def test_pair_losses_by_hand(config, pair_3, pair_7):
    logprobs, batch = hand_batch()
    loss, metrics = run(config, logprobs, batch)
    assert loss.item() == pytest.approx((pair_3 + pair_7) / 2)
    assert metrics["loss"].item() == loss.item()


def test_kto_by_hand():
    logprobs, batch = hand_batch()
    del batch["pair_ids"]
    config = KTOLoss(beta=0.5, desirable_weight=1.5, undesirable_weight=0.8)
    loss, metrics = run(config, logprobs, batch)
    # beta (rho - 0.25): -0.375, 0.125, 0.375, 0.175 for rows r, c, c, r
    desirable = 1.5 * (1 - sigmoid(0.125)) + 1.5 * (1 - sigmoid(0.375))
    undesirable = 0.8 * (1 - sigmoid(0.375)) + 0.8 * (1 - sigmoid(-0.175))
    assert loss.item() == pytest.approx((desirable + undesirable) / 4)
    assert {name: value.item() for name, value in metrics.items()} == pytest.approx(
        {
            "loss": loss.item(),
            "accuracy": 3 / 4,
            "margin": (0.375 + 0.125 + 0.375 - 0.175) / 4,
            "chosen_fraction": 2 / 4,
            "kl_baseline": 0.25,
        }
    )


def test_metrics_by_hand():
    logprobs, batch = hand_batch()
    _, metrics = run(SigmoidLoss(beta=0.5, sft=SFTTerm(weight=9.0)), logprobs, batch)
    del metrics["loss"]
    assert {name: value.item() for name, value in metrics.items()} == pytest.approx(
        {
            "accuracy": 1 / 2,
            "margin": (-0.05 + 0.75) / 2,
            "chosen_reward": (0.25 + 0.5) / 2,
            "rejected_reward": (0.3 - 0.25) / 2,
            "chosen_logprob": (-2 - 0.5) / 2,
            "rejected_logprob": (-1 - 1.5) / 2,
            "sft_loss": (2 + 0.5) / 2,
        }
    )


def test_rewards_of_the_kinds_without_reference():
    logprobs, batch = hand_batch()
    _, simpo = run(SimPOLoss(beta=2.0, gamma=0.5), logprobs, batch)
    assert simpo["chosen_reward"].item() == pytest.approx(2 * (-2 - 0.5) / 2)
    assert simpo["margin"].item() == pytest.approx(2 * (-1 + 1) / 2)  # gamma is not included
    _, orpo = run(ORPOLoss(), logprobs, batch)
    assert orpo["chosen_reward"].item() == pytest.approx((odds(-2) + odds(-0.5)) / 2)


def test_sigmoid_gradient_by_hand():
    logprobs, batch = hand_batch()
    run(SigmoidLoss(beta=0.5), logprobs, batch)[0].backward()
    # -beta sigmoid(-h) / 2 pairs, on each token of the chosen; the opposite on the rejected
    three, seven = 0.25 * sigmoid(0.05), 0.25 * sigmoid(-0.75)
    expected = [[seven, seven, 0], [0, -three, -three], [-seven, 0, 0], [three] * 3, [0] * 3]
    expected = torch.tensor([*expected, [0] * 3], dtype=torch.float64)
    torch.testing.assert_close(logprobs.grad, expected)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (SigmoidLoss(), math.log(2)),
        (SigmoidLoss(label_smoothing=0.3), math.log(2)),
        (RobustLoss(), math.log(2)),  # (1 - 2 e) ln 2 / (1 - 2 e)
        (LengthNormalizedLoss(), math.log(2)),
        (HingeLoss(), 1),
        (IPOLoss(beta=0.25), 4),  # (1 / (2 * 0.25))^2
        (KTOLoss(), 0.5),
    ],
)
def test_the_loss_of_a_policy_equal_to_its_reference(config, expected):
    logprobs, batch = hand_batch()
    batch["reference_logprobs"] = logprobs.detach().float()
    batch["kl_baseline"] = torch.zeros(6)
    loss, metrics = run(config, logprobs.detach().float(), batch)
    assert loss.item() == pytest.approx(expected, abs=1e-6)
    assert (metrics["margin"].item(), metrics["accuracy"].item()) == (0, 0)


def test_kinds_without_reference_do_not_read_one():
    logprobs, batch = hand_batch()
    del batch["reference_logprobs"], batch["kl_baseline"]
    for config in (SimPOLoss(), ORPOLoss()):
        assert run(config, logprobs, batch)[0].isfinite()
    with pytest.raises(KeyError, match="reference_logprobs"):
        run(SigmoidLoss(), logprobs, batch)


@pytest.mark.parametrize("config", [kind for kind in KINDS if kind.needs_pairs], ids=label)
def test_two_rows_that_are_not_a_pair_do_not_train_silently(config):
    logprobs, batch = hand_batch()
    strangers = {name: values[:2] for name, values in batch.items()}  # of pairs 7 and 3
    assert run(config, logprobs[:2], strangers)[0].isnan()


def random_step(num_pairs, width, seed):
    """Pairs with random masks, in random order; `[2 P, width]` logprobs and their batch."""
    generator = torch.Generator().manual_seed(seed)
    size = (2 * num_pairs, width)

    def uniform(*shape):
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    order = torch.randperm(2 * num_pairs, generator=generator)
    batch = {
        "token_mask": uniform(*size) < 0.7,
        "sample_mask": (uniform(num_pairs) < 0.8).repeat_interleave(2).float(),
        "pair_ids": 10 - 3 * torch.arange(num_pairs).repeat_interleave(2),
        "is_chosen": torch.tensor([True, False]).repeat(num_pairs),
        "reference_logprobs": -2 * uniform(*size),
        "kl_baseline": torch.full((2 * num_pairs,), 0.1, dtype=torch.float64),
    }
    # Every sequence has a token, so that ORPO's odds stay away from the clamp of certainty.
    batch["token_mask"][:, 0] = True
    return -2 * uniform(*size) - 0.01, {name: value[order] for name, value in batch.items()}


steps = st.builds(random_step, st.integers(1, 5), st.integers(1, 4), st.integers(0, 10_000))


@every_kind
def test_gradients(config):
    check_gradient(partial(run, config), *random_step(4, 3, seed=1))


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(KINDS), steps, st.data())
def test_microbatches_sum_to_the_step_in_loss_metrics_and_gradient(config, step, data):
    logprobs, batch = step
    ids = batch["pair_ids"].unique().tolist()
    owners = data.draw(st.lists(st.integers(0, 2), min_size=len(ids), max_size=len(ids)))
    owner = torch.tensor([owners[ids.index(pair)] for pair in batch["pair_ids"].tolist()])
    parts = [owner == part for part in range(3)]
    check_microbatches(partial(run, config), logprobs, batch, parts)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(KINDS), steps, st.randoms(use_true_random=False))
def test_the_order_of_rows_does_not_matter(config, step, random):
    logprobs, batch = step
    order = list(range(logprobs.shape[0]))
    random.shuffle(order)
    first, second = logprobs.clone().requires_grad_(), logprobs.clone().requires_grad_()
    loss, _ = run(config, first, batch)
    loss.backward()
    moved, _ = run(config, second[order], {name: values[order] for name, values in batch.items()})
    moved.backward()
    torch.testing.assert_close(moved, loss)
    torch.testing.assert_close(second.grad, first.grad)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(KINDS), steps, st.sampled_from([NAN, math.inf, -math.inf]), st.integers(0, 3)
)
def test_poison_at_masked_entries_changes_nothing(config, step, poison, extra):
    logprobs, batch = step
    mask = batch["token_mask"] & batch["sample_mask"].bool()[:, None]

    def poisoned(values):
        values = torch.where(mask, values, poison)
        return torch.cat([values, values.new_full((values.shape[0], extra), poison)], dim=1)

    padding = batch["token_mask"].new_zeros(mask.shape[0], extra)
    dirty_batch = batch | {
        "token_mask": torch.cat([batch["token_mask"], padding], dim=1),
        "reference_logprobs": poisoned(batch["reference_logprobs"]),
        "kl_baseline": torch.where(batch["sample_mask"].bool(), batch["kl_baseline"], poison),
    }
    check_poison(partial(run, config), step, (poisoned(logprobs), dirty_batch), mask)


def test_a_nan_at_a_valid_token_is_not_hidden():
    logprobs, batch = hand_batch()
    batch["reference_logprobs"][0, 0] = NAN
    assert run(SigmoidLoss(), logprobs, batch)[0].isnan()


@every_kind
def test_metrics_are_detached_scalars(config):
    logprobs, batch = hand_batch()
    check_metrics_are_detached_scalars(run(config, logprobs, batch))


def test_loss_is_picklable_and_frozen():
    loss_fn = DPOLossFn(IPOLoss(beta=0.3))
    assert pickle.loads(pickle.dumps(loss_fn)) == loss_fn  # noqa: S301
    with pytest.raises(AttributeError):
        loss_fn.config = SigmoidLoss()
    assert DPOLossFn().config == SigmoidLoss()
