"""Preference pairs: as a training batch, and out of scored completions."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nemo_rl_core.data.chat import SupervisedExample
from nemo_rl_core.data.collate import collate
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.errors import DataError
from nemo_rl_core.types import Rollout


@dataclass(frozen=True, slots=True)
class PairLogprobs:
    """The reference policy's logprobs of a pair, one a trained token, in nats."""

    chosen: tuple[float, ...]
    rejected: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class TokenizedPair:
    """Two completions of one prompt, of which the first is preferred.

    Attributes:
        chosen: The preferred sequence, prompt and completion.
        rejected: The other one.
        reference_logprobs: The reference policy's, where they have been computed.

    Example:
        >>> better = SupervisedExample(token_ids=(1, 5, 2), loss_mask=(False, True, True))
        >>> worse = SupervisedExample(token_ids=(1, 6, 2), loss_mask=(False, True, True))
        >>> cached = PairLogprobs(chosen=(-0.5, -0.1), rejected=(-0.7, -0.1))
        >>> TokenizedPair(better, worse, cached).chosen.token_ids
        (1, 5, 2)
    """

    chosen: SupervisedExample
    rejected: SupervisedExample
    reference_logprobs: PairLogprobs | None = None


@dataclass(frozen=True, slots=True)
class ScoredResponses:
    """Several responses to one prompt with a score each; the higher, the better.

    Example:
        >>> short = SupervisedExample(token_ids=(1, 2), loss_mask=(False, True))
        >>> ScoredResponses(examples=(short,), scores=(0.5,)).scores
        (0.5,)
    """

    examples: tuple[SupervisedExample, ...]
    scores: tuple[float, ...]


def dpo_batch(pairs: Sequence[TokenizedPair]) -> BatchedDataDict:
    """Pairs as a batch of `B = 2 P` rows: chosen, rejected, chosen, rejected, and so on.

    Args:
        pairs: `P` pairs, all of them with reference logprobs or none.

    Returns:
        What `collate` returns, `pair_ids [B]` int64, `is_chosen [B]` bool and, where the pairs have
        them, `reference_logprobs [B, T-1]` (0 where nothing is trained).

    Raises:
        DataError: If some pairs have reference logprobs and others have not, or if their number is
            not that of a sequence's trained tokens.
    """
    examples = [example for pair in pairs for example in (pair.chosen, pair.rejected)]
    batch = collate(
        [example.token_ids for example in examples], [example.loss_mask for example in examples]
    )
    batch.update(
        pair_ids=torch.arange(len(pairs)).repeat_interleave(2),
        is_chosen=torch.tensor([True, False]).repeat(len(pairs)),
    )
    cached = [pair.reference_logprobs for pair in pairs if pair.reference_logprobs is not None]
    if cached:
        if len(cached) != len(pairs):
            raise DataError(
                "some pairs have cached reference logprobs and others have not",
                expected=f"{len(pairs)} pairs with them, or none",
                got=str(len(cached)),
                fix="compute them for all pairs with the same reference",
            )
        rows = [row for logprobs in cached for row in (logprobs.chosen, logprobs.rejected)]
        batch["reference_logprobs"] = _at_trained_tokens(rows, batch["token_mask"])
    return batch


def _at_trained_tokens(rows: Sequence[Sequence[float]], token_mask: torch.Tensor) -> torch.Tensor:
    counts = token_mask.sum(dim=1).tolist()
    for index, (row, count) in enumerate(zip(rows, counts, strict=True)):
        if len(row) != count:
            raise DataError(
                f"the reference logprobs of the {('chosen', 'rejected')[index % 2]} sequence of "
                f"pair {index // 2} do not fit its tokens",
                expected=f"{count}, one a trained token",
                got=str(len(row)),
                fix="compute them again: the tokenization has changed since",
            )
    placed = torch.zeros(token_mask.shape)
    placed[token_mask] = torch.tensor([value for row in rows for value in row])
    return placed


def pairs_from_scores(groups: Sequence[ScoredResponses], *, margin: float) -> list[TokenizedPair]:
    """The best against the worst response of each prompt.

    Of equal scores the earlier response is taken, for the best and for the worst, so that the same
    groups give the same pairs. A prompt whose scores lie within `margin`, or whose two responses
    are the same tokens, gives no pair.

    Args:
        groups: One a prompt.
        margin: By more than how much the scores must differ, at least 0.

    Returns:
        At most one pair a group, in the order of the groups.
    """
    pairs = []
    for group in groups:
        scored = list(zip(group.scores, group.examples, strict=True))
        if not scored:
            continue
        best, chosen = max(scored, key=lambda item: item[0])
        worst, rejected = min(scored, key=lambda item: item[0])
        if best - worst > margin and chosen.token_ids != rejected.token_ids:
            pairs.append(TokenizedPair(chosen, rejected))
    return pairs


def pairs_from_rollouts(rollouts: Sequence[Rollout], *, margin: float) -> list[TokenizedPair]:
    """The best against the worst of the policy's own completions of each prompt.

    Rollouts belong together by the id of their prompt. Those without a reward are left out: that a
    completion could not be scored does not make it a bad one. Ties and margin are as in
    `pairs_from_scores`. The completion's tokens are trained on, a truncated one's like any other's.

    Args:
        rollouts: In any order.
        margin: By more than how much the rewards must differ, at least 0.

    Returns:
        At most one pair a prompt, in the order in which the prompts first appear.

    Raises:
        DataError: If two different prompts have the same id.
    """
    by_prompt: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        group = by_prompt.setdefault(rollout.prompt.id, [])
        group.append(rollout)
        if group[0].prompt.token_ids != rollout.prompt.token_ids:
            raise DataError(
                f"two prompts have the id {rollout.prompt.id!r}",
                expected=repr(group[0].prompt.text[:80]),
                got=repr(rollout.prompt.text[:80]),
                fix="give each prompt its own id",
            )
    return pairs_from_scores([_scored(group) for group in by_prompt.values()], margin=margin)


def _scored(group: Sequence[Rollout]) -> ScoredResponses:
    scored = [(rollout.reward, rollout) for rollout in group if rollout.reward is not None]
    return ScoredResponses(
        examples=tuple(_example(rollout) for _, rollout in scored),
        scores=tuple(reward for reward, _ in scored),
    )


def _example(rollout: Rollout) -> SupervisedExample:
    prompt, completion = rollout.prompt.token_ids, rollout.completion.token_ids
    return SupervisedExample(
        token_ids=prompt + completion,
        loss_mask=(False,) * len(prompt) + (True,) * len(completion),
    )
