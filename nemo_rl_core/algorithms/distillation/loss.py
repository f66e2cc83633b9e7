"""The divergence of a student from its teacher, on sequences that the student sampled."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nemo_rl_core.algorithms.distillation.config import Divergence, ForwardKL, MixedKL, ReverseKL
from nemo_rl_core.functional.distillation import kl_divergence, renormalized
from nemo_rl_core.functional.masked import (
    masked_sum,
    masked_sums,
    valid_token_mask,
    zero_masked,
)


@dataclass(frozen=True)
class DistillationLossFn:
    """`KL` over the teacher's K most likely tokens: forward, reverse or mixed; mean over tokens.

    Both distributions are renormalized to these K tokens. The loss is then exactly 0 if student and
    teacher agree on them, and never negative, however much probability is outside the K tokens:
    with unnormalized probabilities `sum_k p_T (log p_T - log p_S)` falls below 0 as soon as the
    student has more of its mass on the K tokens than the teacher does. However, the loss does not
    reduce student mass on other tokens; `student_topk_mass` shows it, and a larger K covers more
    tokens.

    Sampled prefixes are constants: no gradient flows through the sampling. Source: on-policy
    distillation, Agarwal et al. 2023 (GKD), arXiv:2306.13649, section 3.

    Example:
        >>> topk = torch.tensor([[[0.5, 0.25]]]).log()
        >>> batch = {
        ...     "token_mask": torch.ones(1, 1),
        ...     "sample_mask": torch.ones(1),
        ...     "topk_logprobs": topk,
        ...     "current_topk_logprobs": topk.flip(-1),
        ... }
        >>> one, logprobs = torch.tensor(1.0), torch.tensor([[-1.0]])
        >>> # p_T = 2/3, 1/3 and p_S = 1/3, 2/3: 2/3 ln 2 - 1/3 ln 2
        >>> DistillationLossFn()(logprobs, batch, global_valid_seqs=one, global_valid_tokens=one)[0]
        tensor(0.2310)
    """

    config: Divergence = field(default_factory=ForwardKL)

    def __call__(
        self,
        next_token_logprobs: Tensor,
        batch: Mapping[str, Tensor],
        *,
        global_valid_seqs: Tensor,
        global_valid_tokens: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the loss of a micro-batch and metrics; see `LossFunction` for normalization.

        Args:
            next_token_logprobs: `[B, T-1]`, for the metric `approx_entropy` only.
            batch: `token_mask [B, T-1]`, `sample_mask [B]`, `topk_logprobs [B, T-1, K]` (the
                teacher's) and `current_topk_logprobs [B, T-1, K]` (the student's of the same
                tokens, requiring gradients), both under the softmax of the full vocabulary.

        Returns:
            The loss, and means over tokens; a `..._topk_mass` is the probability of the K tokens.
        """
        mask = valid_token_mask(batch["token_mask"], batch["sample_mask"])
        teacher = _zero_masked_topk(batch["topk_logprobs"], mask).detach()
        student = _zero_masked_topk(batch["current_topk_logprobs"], mask)
        forward = kl_divergence(renormalized(teacher), renormalized(student))
        reverse = kl_divergence(renormalized(student), renormalized(teacher))
        match self.config:
            case ForwardKL():
                values = forward
            case ReverseKL():
                values = reverse
            case MixedKL():
                values = torch.lerp(reverse, forward, self.config.weight)
        loss = masked_sum(values, mask, denominator=global_valid_tokens)
        metrics = {
            "loss": values,
            "forward_kl": forward,
            "reverse_kl": reverse,
            "teacher_topk_mass": teacher.exp().sum(dim=-1),
            "student_topk_mass": student.exp().sum(dim=-1),
            "approx_entropy": -next_token_logprobs,
        }
        return loss, masked_sums(metrics, mask, denominator=global_valid_tokens)


def _zero_masked_topk(logprobs: Tensor, mask: Tensor) -> Tensor:
    return zero_masked(logprobs, mask[..., None].expand_as(logprobs))
