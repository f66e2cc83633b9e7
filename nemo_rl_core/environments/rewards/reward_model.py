"""Completions scored by a model that has learnt which of two is preferred.

Token ids go from the policy to the reward model as they are: text that is tokenized again may be
split in another way, and would get the score of another sequence.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_rl_core.distributed.process_group import local_device
from nemo_rl_core.environments.interfaces import Scorer, checked, failure
from nemo_rl_core.environments.rewards.reward_model_loading import (
    SCALAR_HEAD,
    checked_context_length,
    load_reward_model,
    refuse_other_vocabulary,
)
from nemo_rl_core.errors import RewardError
from nemo_rl_core.planning.model_parts import independent_length, reset_rotary
from nemo_rl_core.types import Rollout

if TYPE_CHECKING:
    import torch


class RewardModelScorer(Scorer):
    """The scalar head's output at the last token of prompt and completion.

    Names and vocabularies are checked at once; the weights are loaded, onto the GPU if there is
    one, when the first completion is scored. After `release_memory` they wait on the host.

    Args:
        model: Hub name or folder of a transformers sequence classifier with one label, as
            `RewardModelTrainer` saves it.
        policy: Folder of the model whose completions are scored.
        max_tokens_per_batch: The most tokens of a forward pass, padding included; a longer sequence
            is a batch of its own.

    Raises:
        ModelError: If `model` cannot be read, is no reward model, or has other ids for its tokens
            than `policy`.
    """

    def __init__(self, model: str, *, policy: Path, max_tokens_per_batch: int = 8192) -> None:
        folder = Path(model).expanduser()
        self._name = str(folder) if folder.is_dir() else model
        self._max_tokens_per_batch = max_tokens_per_batch
        self._context_length = checked_context_length(self._name)
        refuse_other_vocabulary(self._name, policy)
        self._loaded: Any = None

    def score(self, rollouts: Sequence[Rollout]) -> list[float | RewardError]:
        """One outcome a rollout; a sequence beyond the model's context has no score."""
        sequences = [[*each.prompt.token_ids, *each.completion.token_ids] for each in rollouts]
        fits = [index for index, ids in enumerate(sequences) if len(ids) <= self._context_length]
        values = dict(zip(fits, self._values([sequences[index] for index in fits]), strict=True))
        return [
            self._outcome(rollout, len(sequences[index]), values.get(index))
            for index, rollout in enumerate(rollouts)
        ]

    def release_memory(self) -> None:
        """Moves the weights to the host, and empties torch's cache; no-op on a CPU."""
        import torch

        if self._loaded is not None and self._loaded.device.type == "cuda":
            self._loaded.to("cpu")
            torch.cuda.empty_cache()

    def close(self) -> None:
        """Lets go of the weights."""
        self._loaded = None

    def _outcome(self, rollout: Rollout, length: int, value: float | None) -> float | RewardError:
        about = {
            "prompt": rollout.prompt.text,
            "completion": rollout.text,
            "source": f"the reward model {self._name!r}",
        }
        if value is None:
            got = f"{length} tokens; the model was made for {self._context_length}"
            return failure("cannot read so long a sequence", got, **about)
        return checked(value, **about)

    def _values(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """The score of each sequence, in order."""
        if not sequences:
            return []
        if self._loaded is None:
            self._loaded = load_reward_model(self._name)
        self._loaded.to(local_device())  # from the host, where it waited
        values = [math.nan] * len(sequences)
        lengths = [len(ids) for ids in sequences]
        batches = batches_by_length(
            lengths,
            self._max_tokens_per_batch,
            alone_beyond=independent_length(self._loaded.config),
        )
        for indices in batches:
            scores = _last_scores(self._loaded, [sequences[index] for index in indices])
            for index, value in zip(indices, scores.tolist(), strict=True):
                values[index] = value
        return values


def batches_by_length(
    lengths: Sequence[int], max_tokens: int, *, alone_beyond: int | None = None
) -> Iterator[list[int]]:
    """Indices of sequences of similar length, longest first.

    Args:
        lengths: In tokens.
        max_tokens: The most that a batch holds once padded to its longest sequence.
        alone_beyond: The longest sequence that shares a batch; None for any.

    Example:
        >>> list(batches_by_length([2, 5, 3, 3], max_tokens=6))
        [[1], [2, 3], [0]]
        >>> list(batches_by_length([2, 5, 3, 3], max_tokens=6, alone_beyond=2))
        [[1], [2], [3], [0]]
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    start = 0
    while start < len(order):
        longest = lengths[order[start]]
        is_single = alone_beyond is not None and longest > alone_beyond
        size = 1 if is_single else max(max_tokens // longest, 1)
        yield order[start : start + size]
        start += size


def _last_scores(model: Any, sequences: Sequence[Sequence[int]]) -> "torch.Tensor":
    """`[B]` float32 scores of B sequences.

    The model's own forward pass would look for the last token that is not padding, and stop short
    of an end-of-sequence token that doubles as padding.
    """
    import torch

    lengths = torch.tensor([len(ids) for ids in sequences])
    input_ids = torch.zeros(len(sequences), int(lengths.max()), dtype=torch.long)
    for row, ids in enumerate(sequences):
        input_ids[row, : len(ids)] = torch.tensor(ids)
    mask = (torch.arange(input_ids.shape[1]) < lengths[:, None]).long()
    reset_rotary(model)
    with torch.no_grad():
        hidden = model.base_model(
            input_ids=input_ids.to(model.device),
            attention_mask=mask.to(model.device),
            use_cache=False,
        ).last_hidden_state
        last = hidden[torch.arange(len(sequences)), lengths - 1]
        # The head in float32 whatever the body is: differences between scores are small beside
        # them.
        scores: torch.Tensor = getattr(model, SCALAR_HEAD)(last.float())[:, 0]
    return scores
