"""Preference losses of margins between two sequences, or of single scores.

A reward is one number per sequence, in nats; a margin is the chosen sequence's reward minus the
rejected one's. The algorithms compute rewards from logprobs or a scalar head.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def pair_rows(pair_ids: Tensor, is_chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Finds the two rows of every pair, for rows in any order.

    Args:
        pair_ids: `[B]` int64, each id on two rows; ids need not be dense.
        is_chosen: `[B]` bool, True on one row of each pair.

    Returns:
        `chosen [P]` and `rejected [P]` row indices with `P = B / 2`, by ascending id, and
        `is_pair [P]` bool: whether the rows have the same id, one chosen, one rejected. The check
        is a tensor, not an exception, to avoid a device synchronization.

    Example:
        >>> ids, is_chosen = torch.tensor([9, 4, 4, 9]), torch.tensor([False, True, False, True])
        >>> pair_rows(ids, is_chosen)[:2]
        (tensor([1, 3]), tensor([2, 0]))
    """
    if pair_ids.numel() % 2:
        raise ValueError(
            f"pairs need an even number of rows, got {pair_ids.numel()}; "
            "keep both rows of a pair in one micro-batch"
        )
    order = torch.argsort(~is_chosen.bool(), stable=True)
    order = order[torch.argsort(pair_ids[order], stable=True)]
    chosen, rejected = order.view(-1, 2).unbind(dim=1)
    is_pair = (pair_ids[chosen] == pair_ids[rejected]) & is_chosen[chosen].bool()
    return chosen, rejected, is_pair & ~is_chosen[rejected].bool()


def sigmoid_loss(margins: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
    """`-(1 - e) log sigmoid(h) - e log sigmoid(-h)` for margins h, with e the label smoothing.

    With e = 0 it is the Bradley-Terry likelihood: DPO, Rafailov et al. 2023, arXiv:2305.18290,
    equation 7. With 0 < e < 0.5 it is "conservative DPO" (Mitchell 2023), the cross-entropy against
    labels that are wrong with probability e: minimal at `sigmoid(h) = 1 - e`, so that no margin
    grows without bound. It is a biased estimate of the loss on clean labels; `robust_loss` is not.
    """
    wrong = F.softplus(margins) * label_smoothing
    return F.softplus(-margins) * (1 - label_smoothing) + wrong


def robust_loss(margins: Tensor, *, label_smoothing: float) -> Tensor:
    """`[-(1 - e) log sigmoid(h) + e log sigmoid(-h)] / (1 - 2 e)` for margins h.

    Its mean over labels that were flipped with probability e < 0.5 is `-log sigmoid(h)` of the
    clean ones. It may be negative. Source: robust DPO, Chowdhury et al. 2024, arXiv:2403.00409,
    section 3.2.
    """
    wrong = F.softplus(margins) * label_smoothing
    return (F.softplus(-margins) * (1 - label_smoothing) - wrong) / (1 - 2 * label_smoothing)


def hinge_loss(margins: Tensor) -> Tensor:
    """`max(0, 1 - h)` for margins h (SLiC-HF, arXiv:2305.10425; as in RSO, arXiv:2309.06657)."""
    return F.relu(1 - margins)


def ipo_loss(log_ratio_differences: Tensor, *, beta: float) -> Tensor:
    """`(d - 1 / (2 beta))^2`: regression of the difference of log-ratios to a finite target.

    `d` is the chosen log-ratio minus the rejected one, without beta. Source: IPO, Azar et al. 2023,
    arXiv:2310.12036, equation 17 (beta is its tau).
    """
    return (log_ratio_differences - 1 / (2 * beta)).square()


def log_odds(mean_logprobs: Tensor) -> Tensor:
    """`log(p / (1 - p))` of the geometric-mean probability of a sequence's tokens.

    `mean_logprobs [B]` are nats per token. A probability of 1 is replaced by the next smaller
    float, so that the odds are finite. Source: ORPO, Hong et al. 2024, arXiv:2403.07691, section 4.
    """
    below_one = mean_logprobs.clamp(max=-torch.finfo(mean_logprobs.dtype).eps)
    return below_one - torch.log(-torch.expm1(below_one))


def kto_loss(
    advantages: Tensor,
    is_desirable: Tensor,
    *,
    desirable_weight: float,
    undesirable_weight: float,
) -> Tensor:
    """`w_D (1 - sigmoid(a))` for desirable sequences and `w_U (1 - sigmoid(-a))` for the others.

    The advantages a, `[B]`, are rewards minus the baseline: `beta (rho - z0)`. Source: KTO,
    Ethayarajh et al. 2024, arXiv:2402.01306, equation 8.
    """
    # 1 - sigmoid(a) is sigmoid(-a), without loss of precision in the subtraction.
    return torch.where(
        is_desirable,
        desirable_weight * torch.sigmoid(-advantages),
        undesirable_weight * torch.sigmoid(advantages),
    )


def kto_baseline(log_ratios: Tensor, sample_mask: Tensor) -> Tensor:
    """KTO's `z0 = max(0, mean log-ratio)`, an estimate of `KL(policy || reference)`.

    Computed over the full optimizer step before it is split, without gradient. The paper uses
    log-ratios of completions with mismatched prompts (section 4.1); those of the batch itself are
    cheaper, and biased towards its completions. Every row of the result `[B]` has the same value.

    Args:
        log_ratios: `[B]` `sum_t (log pi - log pi_ref)` of all sequences of the step, in nats.
        sample_mask: `[B]`, any dtype; nonzero for valid sequences.
    """
    is_valid = sample_mask.bool()
    total = torch.where(is_valid, log_ratios.detach(), 0.0).sum()
    mean = total / is_valid.sum().clamp(min=1)
    return mean.clamp(min=0).expand(log_ratios.shape[0]).clone()
