"""Losses and metrics of each kind, correction, reduction and bonus, computed by hand."""

import math

import pytest
import torch

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

LN2 = math.log(2)


def run(config, current, advantages, **logprobs):
    """The loss and metrics over `[B, T-1]` nested lists, all tokens valid, and the gradient."""
    current = torch.tensor(current, dtype=torch.float64, requires_grad=True)
    batch = {
        "token_mask": torch.ones(current.shape),
        "sample_mask": torch.ones(current.shape[0]),
        "advantages": torch.tensor(advantages, dtype=torch.float64),
        **{
            f"{name}_logprobs": torch.tensor(values, dtype=torch.float64)
            for name, values in logprobs.items()
        },
    }
    loss, metrics = GRPOLossFn(config)(
        current,
        batch,
        global_valid_seqs=torch.tensor(float(current.shape[0])),
        global_valid_tokens=torch.tensor(float(current.numel())),
    )
    loss.backward()
    return loss.item(), {k: v.item() for k, v in metrics.items()}, current.grad.tolist()


def test_dual_clip():
    config = ClippedLoss(dual_clip=3.0, kl=None)
    loss, metrics, _ = run(config, [[2 * LN2, LN2]], [[-1.0, -1.0]], prev=[[0.0, 0.0]])
    # ratios 4 (bounded to 3) and 2
    assert loss == pytest.approx((3 + 2) / 2)
    assert metrics["clip_fraction_dual"] == 0.5
    assert metrics["clip_fraction_low"] == metrics["clip_fraction_high"] == 0


def test_cispo():
    config = CISPOLoss(clip_low=0.4, clip_high=0.5, kl=None)
    loss, metrics, gradient = run(config, [[-LN2, -2.0]], [[1.0, 4.0]], prev=[[0.0, -2 - LN2]])
    # ratios 1/2 -> 0.6 and 2 -> 1.5: -0.6 * -ln2 and -4 * 1.5 * -2
    assert loss == pytest.approx((0.6 * LN2 + 12) / 2)
    assert gradient[0] == pytest.approx([-0.3, -3])
    # for both signs of the advantage, the bound changes the weight
    assert (metrics["clip_fraction_low"], metrics["clip_fraction_high"]) == (0.5, 0.5)


def test_reinforce():
    config = ReinforceLoss(kl=None)
    loss, metrics, gradient = run(config, [[-1.0, -2.0]], [[3.0, -1.0]], prev=[[-1.0, -1.0]])
    assert loss == pytest.approx((3 - 2) / 2)
    assert gradient == [[-1.5, 0.5]]
    assert metrics["ratio_mean"] == pytest.approx((1 + math.exp(-1)) / 2)
    assert "clip_fraction_low" not in metrics


def test_on_policy_reads_no_prev_logprobs():
    loss, metrics, gradient = run(OnPolicyLoss(kl=None), [[-1.0, -2.0]], [[3.0, -1.0]])
    assert loss == -1
    assert gradient == [[-1.5, 0.5]]
    assert (metrics["ratio_mean"], metrics["policy_kl"]) == (1, 0)


def test_on_policy_with_a_correction_uses_current_logprobs_as_prev():
    config = OnPolicyLoss(kl=None, importance=TruncatedImportance(cap=1.5))
    loss, metrics, _ = run(config, [[0.0, 0.0]], [[1.0, 1.0]], generation=[[-LN2, LN2]])
    # weights 2 -> 1.5 and 1/2
    assert loss == pytest.approx(-(1.5 + 0.5) / 2)
    assert metrics["importance_weight"] == pytest.approx(1)
    assert metrics["importance_cut_fraction"] == 0.5


def test_gspo():
    config = GSPOLoss(clip_low=0.2, clip_high=0.2, kl=None)
    current = [[3 * LN2, -LN2], [0.1, -0.1]]
    loss, metrics, gradient = run(config, current, [[1.0] * 2, [3.0] * 2], prev=[[0.0] * 2] * 2)
    # ratios exp(ln 2) = 2 -> 1.2, although the tokens have 8 and 1/2; and 1
    assert loss == pytest.approx((-1.2 - 3) / 2)
    assert gradient[0] == [0, 0]
    # -3 * ratio 1, half to each token, half to each sequence
    assert gradient[1] == pytest.approx([-0.75, -0.75])
    assert metrics["ratio_mean"] == pytest.approx(1.5)
    assert metrics["clip_fraction_high"] == 0.5


def test_gspo_is_corrected_by_the_weight_of_the_sequence():
    config = GSPOLoss(kl=None, importance=BandImportance(low=0.9, high=3.0))
    generation = [[-3 * LN2, LN2], [0.0, 2 * LN2]]
    loss, metrics, _ = run(
        config, [[0.0] * 2] * 2, [[1.0] * 2] * 2, prev=[[0.0] * 2] * 2, generation=generation
    )
    # geometric means sqrt(8 / 2) = 2 and sqrt(1 / 4) = 1/2, the latter outside
    assert loss == pytest.approx(-(2 + 0) / 2)
    assert metrics["importance_weight"] == pytest.approx(1)
    assert metrics["importance_cut_fraction"] == 0.5


def test_sapo():
    config = SAPOLoss(tau_positive=1.0, tau_negative=2.0, kl=None)
    loss, _, gradient = run(config, [[0.0, 0.0]], [[1.0, -1.0]], prev=[[0.0, 0.0]])
    # on policy 2 / tau in value, and the plain gradient
    assert loss == pytest.approx((-2 + 1) / 2)
    assert gradient[0] == pytest.approx([-0.5, 0.5])


@pytest.mark.parametrize(
    ("importance", "weights"),
    [
        # w = 4, 1/4 (geometric mean 1); 2, 2 (2)
        (TruncatedImportance(cap=3.0), [3, 0.25, 2, 2]),
        (BandImportance(low=0.5, high=2.5), [0, 0, 2, 2]),
        (SequenceMaskImportance(low=0.5, high=1.5), [4, 0.25, 0, 0]),
    ],
)
def test_corrections(importance, weights):
    config = ClippedLoss(kl=KLInLoss(kind="k1", beta=1.0), importance=importance)
    zeros = [[0.0] * 2] * 2
    loss, metrics, gradient = run(
        config,
        [[-1.0] * 2] * 2,
        [[1.0] * 2] * 2,
        prev=[[-1.0] * 2] * 2,
        generation=[[-1 - 2 * LN2, -1 + 2 * LN2], [-1 - LN2, -1 - LN2]],
        reference=zeros,
    )
    # The penalty, k1 = -1 with gradient -1, has the same weight.
    assert loss == pytest.approx(-2 * sum(weights) / 4)
    flat = [value for row in gradient for value in row]
    assert flat == pytest.approx([-2 * weight / 4 for weight in weights])
    assert metrics["importance_weight"] == pytest.approx(sum(weights) / 4)
    changed = [w != raw for w, raw in zip(weights, [4, 0.25, 2, 2], strict=True)]
    assert metrics["importance_cut_fraction"] == pytest.approx(sum(changed) / 4)
    assert metrics["approx_entropy"] == pytest.approx(sum(weights) / 4)


def test_a_token_the_engine_found_impossible_is_cut_and_counted():
    config = ReinforceLoss(kl=None, importance=TruncatedImportance(cap=2.0))
    loss, metrics, gradient = run(
        config,
        [[-1.0, -1.0]],
        [[1.0, 1.0]],
        prev=[[-1.0, -1.0]],
        generation=[[-math.inf, -1.0]],
    )
    assert loss == 0.5
    assert gradient == [[0, -0.5]]
    assert metrics["importance_cut_fraction"] == 0.5


def test_constant_denominator():
    config = ReinforceLoss(kl=None, reduction=ConstantDenominator(max_tokens=10))
    current = [[-1.0, -2.0], [-3.0, -4.0]]
    loss, metrics, _ = run(config, current, [[1.0] * 2] * 2, prev=current)
    # ten tokens for each of two sequences
    assert loss == pytest.approx((1 + 2 + 3 + 4) / 20)
    # metrics stay per token
    assert metrics["approx_entropy"] == pytest.approx(10 / 4)


def test_entropy_bonus():
    config = ReinforceLoss(kl=None, entropy_bonus=0.1)
    loss, metrics, gradient = run(config, [[-1.0, -3.0]], [[0.0, 0.0]], prev=[[-1.0, -3.0]])
    # -0.1 * (1 + 3) / 2; the gradient of exp(cur - stopgrad) cur is cur + 1
    assert loss == pytest.approx(-0.2)
    assert gradient[0] == pytest.approx([0, -0.1])
    assert metrics["approx_entropy"] == 2


def test_kl_in_the_reward_is_reported_but_adds_nothing():
    kl = KLInReward(beta=5.0)
    config = ReinforceLoss(kl=kl)
    loss, metrics, _ = run(config, [[-1.0]], [[2.0]], prev=[[-1.0]], reference=[[-3.0]])
    assert loss == 2
    assert metrics["kl"] == 2
