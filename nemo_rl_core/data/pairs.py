"""Preference pairs as token sequences: from a data set, from scored completions, as a batch, as
files with their reference logprobs.

A folder of pairs contains tokens, not text, so that sampled completions are trained on with exactly
the sampled tokens: encoding their text again may give other tokens.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from nemo_rl_core.data.lengths import refuse_longer
from nemo_rl_core.data.loader import load_records, load_tokenized, save_frame
from nemo_rl_core.data.loss_masks import SupervisedExample
from nemo_rl_core.data.pretrained import load_tokenizer, pair_length
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict, collate
from nemo_rl_core.distributed.packing.plan import plan_microbatches
from nemo_rl_core.errors import DataError
from nemo_rl_core.types import Rollout


@dataclass(frozen=True, slots=True)
class PreferencePair:
    """Two completions of one prompt, of which the first is preferred.

    Attributes:
        id: Id of the prompt's row.
        chosen: Preferred sequence, prompt and completion.
        rejected: The other sequence.
        margin: Required score margin of the chosen completion, in the units of a reward model.
        reference_logprobs: Logprobs of the chosen and of the rejected sequence under the reference
            policy, one per trained token, in nats; None if not computed.

    Example:
        >>> better = SupervisedExample(token_ids=(1, 5, 2), loss_mask=(False, True, True))
        >>> worse = SupervisedExample(token_ids=(1, 6, 2), loss_mask=(False, True, True))
        >>> PreferencePair("a", better, worse).margin
        0.0
    """

    id: str
    chosen: SupervisedExample
    rejected: SupervisedExample
    margin: float = 0.0
    reference_logprobs: tuple[tuple[float, ...], tuple[float, ...]] | None = None


def pair_batch(pairs: Sequence[PreferencePair]) -> BatchedDataDict:
    """Collates pairs into a batch of `B = 2 P` rows: chosen, rejected, chosen, rejected, and so on.

    Args:
        pairs: `P` pairs, all with reference logprobs or all without.

    Returns:
        The batch of `collate` with `pair_ids [B]` int64, `is_chosen [B]` bool, `margins [B]` and,
        if the pairs have them, `reference_logprobs [B, T-1]` (0 at masked tokens).
    """
    examples = [example for pair in pairs for example in (pair.chosen, pair.rejected)]
    batch = collate(
        [example.token_ids for example in examples], [example.loss_mask for example in examples]
    )
    batch.update(
        pair_ids=torch.arange(len(pairs)).repeat_interleave(2),
        is_chosen=torch.tensor([True, False]).repeat(len(pairs)),
        margins=torch.tensor([pair.margin for pair in pairs]).repeat_interleave(2),
    )
    cached = [pair.reference_logprobs for pair in pairs if pair.reference_logprobs is not None]
    if cached:
        if len(cached) != len(pairs):
            raise DataError(
                "some pairs have cached reference logprobs and others have none",
                expected=f"{len(pairs)} pairs with them, or none",
                got=str(len(cached)),
                fix="compute them for all pairs with the same reference",
            )
        rows = [row for pair in cached for row in pair]
        batch["reference_logprobs"] = _at_trained_tokens(rows, batch["token_mask"])
    return batch


def _at_trained_tokens(rows: Sequence[Sequence[float]], token_mask: torch.Tensor) -> torch.Tensor:
    counts = token_mask.sum(dim=1).tolist()
    for index, (row, count) in enumerate(zip(rows, counts, strict=True)):
        if len(row) != count:
            raise DataError(
                f"the reference logprobs of the {('chosen', 'rejected')[index % 2]} sequence of "
                f"pair {index // 2} do not fit its tokens",
                expected=f"{count}, one per trained token",
                got=str(len(row)),
                fix="compute them again, since the tokenization has changed",
            )
    aligned = torch.zeros(token_mask.shape)
    aligned[token_mask] = torch.tensor([value for row in rows for value in row])
    return aligned


def tokenized_pairs(folder: Path, tokenizer: Any) -> list[PreferencePair]:
    """Tokenizes the rows of a data set folder of preferences."""
    rows = load_records(folder)
    if rows and "chosen" not in rows[0]:
        raise DataError(
            "the data set has no preference pairs",
            expected="the columns prompt, chosen and rejected, or responses and scores",
            got=f"the columns {', '.join(rows[0])}",
            fix="use such data, or build pairs from sampled completions of the policy",
        )
    return [
        PreferencePair(row["id"], both["chosen"], both["rejected"], row.get("margin") or 0.0)
        for row, both in zip(rows, load_tokenized(folder, rows, tokenizer), strict=True)
    ]


def pairs_from_rollouts(rollouts: Iterable[Rollout], *, margin: float) -> list[PreferencePair]:
    """Pairs the best and the worst sampled completion of each prompt.

    Ties go to the earlier completion, for the best and for the worst, so that the same rollouts
    give the same pairs. A prompt gives no pair if its rewards differ by at most `margin` or its
    best and worst completions have the same tokens. Completions without a reward are skipped: a
    failed score is not a low score.

    Args:
        margin: Reward difference that a pair must exceed, at least 0.

    Returns:
        At most one pair per prompt, in the order in which the prompts first appear.
    """
    by_prompt: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        group = by_prompt.setdefault(rollout.prompt.id, [])
        if group and group[0].prompt.token_ids != rollout.prompt.token_ids:
            raise DataError(
                f"two prompts have the id {rollout.prompt.id!r}",
                expected=repr(group[0].prompt.text[:80]),
                got=repr(rollout.prompt.text[:80]),
                fix="give each prompt a unique id",
            )
        group.append(rollout)
    pairs = []
    for name, group in by_prompt.items():
        scored = [(rollout.reward, rollout) for rollout in group if rollout.reward is not None]
        if not scored:
            continue
        best, chosen = max(scored, key=lambda item: item[0])
        worst, rejected = min(scored, key=lambda item: item[0])
        if best - worst > margin and chosen.completion.token_ids != rejected.completion.token_ids:
            pairs.append(PreferencePair(name, _example(chosen), _example(rejected)))
    return pairs


def _example(rollout: Rollout) -> SupervisedExample:
    prompt, completion = rollout.prompt.token_ids, rollout.completion
    return SupervisedExample(
        token_ids=prompt + completion.token_ids,
        loss_mask=(False,) * len(prompt) + completion.token_mask,
    )


def refuse_beyond_budget(pairs: Sequence[PreferencePair], *, max_tokens: int) -> None:
    """Raises before workers start if a pair does not fit into a micro-batch."""
    longest = max(max(len(pair.chosen.token_ids), len(pair.rejected.token_ids)) for pair in pairs)
    plan_microbatches([longest, longest], max_tokens=max_tokens, bundles=[0, 0])


def save_pairs(pairs: Sequence[PreferencePair], folder: Path) -> None:
    """Writes a folder of pairs; equal pairs give equal bytes."""
    frame = pd.DataFrame(
        [
            {
                "id": pair.id,
                "chosen_token_ids": list(pair.chosen.token_ids),
                "chosen_loss_mask": list(pair.chosen.loss_mask),
                "rejected_token_ids": list(pair.rejected.token_ids),
                "rejected_loss_mask": list(pair.rejected.loss_mask),
                "margin": pair.margin,
            }
            for pair in pairs
        ]
    )
    save_frame(frame, folder)


def load_pairs(
    folder: Path, tokenizer: Any, *, reference_logprobs: Path | None = None
) -> list[PreferencePair]:
    """Loads the pairs of a folder, from tokens or from text.

    Args:
        folder: A folder that `save_pairs` wrote, or a data set folder of preferences.
        reference_logprobs: A folder that `save_logprobs` wrote for the same pairs, or None.
    """
    rows = load_records(folder)
    if rows and "chosen_token_ids" in rows[0]:
        pairs = [
            PreferencePair(
                row["id"], _stored(row, "chosen"), _stored(row, "rejected"), row["margin"]
            )
            for row in rows
        ]
    else:
        pairs = tokenized_pairs(folder, tokenizer)
    return pairs if reference_logprobs is None else _with_logprobs(pairs, reference_logprobs)


def load_pairs_for(
    model_folder: Path, folder: Path, *, name: str, reference_logprobs: Path | None = None
) -> list[PreferencePair]:
    """Loads the pairs that a model is trained or validated on."""
    tokenizer = load_tokenizer(model_folder)
    pairs = load_pairs(folder, tokenizer, reference_logprobs=reference_logprobs)
    lengths = (max(len(pair.chosen.token_ids), len(pair.rejected.token_ids)) for pair in pairs)
    refuse_longer(lengths, pair_length(model_folder), name=name)
    return pairs


def _stored(row: dict[str, Any], side: str) -> SupervisedExample:
    return SupervisedExample(
        token_ids=tuple(int(token) for token in row[f"{side}_token_ids"]),
        loss_mask=tuple(bool(trained) for trained in row[f"{side}_loss_mask"]),
    )


def save_logprobs(pairs: Sequence[PreferencePair], folder: Path) -> None:
    """Writes the reference logprobs of pairs; all pairs must have them."""
    rows = []
    for pair in pairs:
        assert pair.reference_logprobs is not None, f"pair {pair.id} has no reference logprobs"
        chosen, rejected = pair.reference_logprobs
        rows.append({"id": pair.id, "chosen": list(chosen), "rejected": list(rejected)})
    save_frame(pd.DataFrame(rows), folder)


def _with_logprobs(pairs: Sequence[PreferencePair], folder: Path) -> list[PreferencePair]:
    rows = load_records(folder)
    if [row["id"] for row in rows] != [pair.id for pair in pairs]:
        raise DataError(
            "the cached reference logprobs belong to other pairs",
            expected=f"the ids of {len(pairs)} pairs, in the same order",
            got=f"{len(rows)} rows",
            fix="compute them again for these pairs",
        )
    return [
        replace(
            pair,
            reference_logprobs=(
                tuple(map(float, row["chosen"])),
                tuple(map(float, row["rejected"])),
            ),
        )
        for pair, row in zip(pairs, rows, strict=True)
    ]
