"""Log-likelihoods of continuations: sums of the trainer's logprobs."""

from collections.abc import Sequence
from pathlib import Path

from nemo_rl_core.backends.training.base import TrainingSetup
from nemo_rl_core.config.optimizer import OptimizerConfig
from nemo_rl_core.config.trainer import TrainerSettings
from nemo_rl_core.data.pretrained import context_length
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict, collate
from nemo_rl_core.distributed.session import ClusterSession
from nemo_rl_core.errors import ModelError
from nemo_rl_core.models.policy import Policy

TokenPair = tuple[Sequence[int], Sequence[int]]
"""A context of at least one token, and the continuation to score."""

_ROWS_AT_ONCE = 256
_MICROBATCH_TOKENS = 8192
_UNBOUNDED = 4096
"""The longest sequence for models without a length in their config."""


class Loglikelihoods:
    """Logprobs of a model in a training worker.

    The most likely tokens come from a reference policy with the same weights, since workers compute
    them for the reference only; this costs the memory of a second copy.

    Args:
        model_folder: Weights, config and tokenizer.
        session: The cluster of the worker.
        settings: Backend and dtype of the matrix products.

    Attributes:
        max_tokens: Longest context and continuation together.
    """

    def __init__(
        self, model_folder: Path, session: ClusterSession, *, settings: TrainerSettings
    ) -> None:
        self.max_tokens = context_length(model_folder) or _UNBOUNDED
        self._policy = Policy(
            session,
            TrainingSetup(
                model_folder=model_folder,
                optimizer=OptimizerConfig(),
                max_tokens_per_microbatch=max(_MICROBATCH_TOKENS, self.max_tokens),
                training=settings.training,
                dtype=settings.dtype,
                reference_folder=model_folder,
            ),
        )

    def score(self, pairs: Sequence[TokenPair]) -> list[tuple[float, bool]]:
        """Scores every continuation; contexts that are too long are truncated on the left.

        Returns:
            For each pair the continuation's logprob in nats, summed over its tokens, and whether
            each of its tokens is the most likely one. An empty continuation has `(0.0, True)`.

        Raises:
            ModelError: If a continuation leaves no position for a token of context.
        """
        results = [(0.0, True)] * len(pairs)
        filled = [index for index, (_, continuation) in enumerate(pairs) if continuation]
        for start in range(0, len(filled), _ROWS_AT_ONCE):
            indices = filled[start : start + _ROWS_AT_ONCE]
            scored = self._scored([self._fitting(pairs[index]) for index in indices])
            for index, result in zip(indices, scored, strict=True):
                results[index] = result
        return results

    def _fitting(self, pair: TokenPair) -> TokenPair:
        context, continuation = pair
        room = self.max_tokens - len(continuation)
        if room < 1 or not context:
            raise ModelError(
                "a continuation cannot be scored after at least one token of context",
                expected=f"a context, and fewer than {self.max_tokens} tokens to score",
                got=f"{len(context)} and {len(continuation)} tokens",
                fix="take a model with a longer context, or shorter texts",
            )
        return context[-room:], continuation

    def _scored(self, pairs: Sequence[TokenPair]) -> list[tuple[float, bool]]:
        batch = collate(
            [[*context, *continuation] for context, continuation in pairs],
            [[False] * len(context) + [True] * len(scored) for context, scored in pairs],
        )
        mask = batch["token_mask"]
        logprobs = self._policy.get_logprobs(batch)["logprobs"]
        sums = (logprobs.double() * mask).sum(dim=1).tolist()
        return list(zip(sums, self._is_greedy(batch), strict=True))

    def _is_greedy(self, batch: BatchedDataDict) -> list[bool]:
        likeliest = self._policy.get_reference_topk_logprobs(batch, k=1)["topk_ids"][..., 0]
        same = (likeliest == batch["input_ids"][:, 1:]) | ~batch["token_mask"]
        greedy: list[bool] = same.all(dim=1).tolist()
        return greedy
