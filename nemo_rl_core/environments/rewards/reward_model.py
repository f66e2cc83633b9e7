"""Scores completions with a reward model.

It gets the policy's token ids: tokenizing the text again could split it differently.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_rl_core.checkpoints.hub import hub_access
from nemo_rl_core.checkpoints.weight_files import unreadable
from nemo_rl_core.checkpoints.weights import load_pretrained
from nemo_rl_core.distributed.process_group import local_device
from nemo_rl_core.environments.interfaces import Scorer, checked, error_context, failure
from nemo_rl_core.errors import ModelError, RewardError
from nemo_rl_core.planning.model_parts import independent_length, longest_sequence, reset_rotary
from nemo_rl_core.types import Rollout

if TYPE_CHECKING:
    import torch

_SCALAR_HEAD = "score"
"""Name of the head of a decoder that classifies sequences, in transformers."""


class RewardModelScorer(Scorer):
    """Scores a completion with the output of the scalar head at the last token.

    Names and vocabularies are checked at once. The weights are loaded, onto the GPU if there is
    one, when the first completion is scored; `release_memory` moves them to the host. A forward
    pass has at most `max_tokens_per_batch`, including padding, or one longer sequence.
    """

    def __init__(self, model: str, *, policy: Path, max_tokens_per_batch: int = 8192) -> None:
        folder = Path(model).expanduser()
        self._name = str(folder) if folder.is_dir() else model
        self._max_tokens_per_batch = max_tokens_per_batch
        self._context_length = _checked_context_length(self._name)
        _refuse_other_vocabulary(self._name, policy)
        self._loaded: Any = None

    def score(self, rollouts: Sequence[Rollout]) -> list[float | RewardError]:
        """Returns one outcome per rollout; a sequence beyond the model's context is an error."""
        sequences = [[*each.prompt.token_ids, *each.completion.token_ids] for each in rollouts]
        fits = [index for index, ids in enumerate(sequences) if len(ids) <= self._context_length]
        values = dict(zip(fits, self._values([sequences[index] for index in fits]), strict=True))
        return [
            self._outcome(rollout, len(sequences[index]), values.get(index))
            for index, rollout in enumerate(rollouts)
        ]

    def release_memory(self) -> None:
        """Moves the weights from the GPU to the host, and empties torch's cache."""
        import torch

        if self._loaded is not None and self._loaded.device.type == "cuda":
            self._loaded.to("cpu")
            torch.cuda.empty_cache()

    def close(self) -> None:
        """Drops the weights."""
        self._loaded = None

    def _outcome(self, rollout: Rollout, length: int, value: float | None) -> float | RewardError:
        context = error_context(rollout, f"the reward model {self._name!r}")
        if value is None:
            got = f"{length} tokens; the context length of the model is {self._context_length}"
            return failure("cannot read such a long sequence", got, **context)
        return checked(value, **context)

    def _values(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        if not sequences:
            return []
        if self._loaded is None:
            self._loaded = _load_reward_model(self._name)
        self._loaded.to(local_device())  # from the host, after `release_memory`
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
    """Yields batches of indices of sequences of similar length, longest first.

    A batch has at most `max_tokens`, padded to its longest sequence; a sequence longer than
    `alone_beyond` does not share a batch.

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
    """Returns `[B]` float32 scores of B sequences.

    The model's `forward` would use the last token that is not padding, and so skip an
    end-of-sequence token that is also the padding token.
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
        # The head is always in float32, since differences between scores are small.
        scores: torch.Tensor = getattr(model, _SCALAR_HEAD)(last.float())[:, 0]
    return scores


def _load_reward_model(name: str) -> Any:
    from transformers import AutoModelForSequenceClassification

    source_name = f"the reward model {name!r}"
    with hub_access(name):
        model, _ = load_pretrained(
            AutoModelForSequenceClassification, name, source_name=source_name, dtype="auto"
        )
    if not hasattr(model, _SCALAR_HEAD):
        raise ModelError(
            f"{source_name} cannot score sequences",
            expected=f"a decoder with a head called {_SCALAR_HEAD!r}",
            got=type(model).__name__,
            fix="use a checkpoint that RewardModelTrainer has saved",
        )
    getattr(model, _SCALAR_HEAD).float()
    return model.eval().to(local_device())


def _checked_context_length(name: str) -> float:
    """Returns the context length of a reward model; infinite if its config does not contain one."""
    from transformers import AutoConfig

    try:
        with hub_access(name):
            config = AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise unreadable(f"the reward model {name!r}", error) from error
    architecture = (config.architectures or ["no architecture"])[0]
    if not architecture.endswith("ForSequenceClassification") or config.num_labels != 1:
        raise ModelError(
            f"{name!r} is not a reward model",
            expected="a transformers sequence classifier with one label",
            got=f"{architecture} with {config.num_labels} labels",
            fix="use a checkpoint that RewardModelTrainer has saved",
        )
    return float(longest_sequence(config) or math.inf)


def _refuse_other_vocabulary(name: str, policy: Path) -> None:
    """Refuses a reward model whose token ids differ; unused embedding rows are not compared."""
    ours, theirs = _vocabulary(str(policy)), _vocabulary(name)
    if ours != theirs:
        differing = sorted({token for token, _ in ours.items() ^ theirs.items()})
        raise ModelError(
            f"the vocabulary of the reward model {name!r} differs from the policy {policy.name!r}",
            expected=f"the same ids for the same {len(ours)} tokens",
            got=f"{len(theirs)} tokens; {len(differing)} differ, such as {differing[:3]}",
            fix="train the reward model from a model with the policy's tokenizer",
        )


def _vocabulary(name: str) -> dict[str, int]:
    from transformers import AutoTokenizer

    try:
        with hub_access(name):
            vocabulary: dict[str, int] = AutoTokenizer.from_pretrained(name).get_vocab()
    except (OSError, ValueError, KeyError) as error:
        raise unreadable(f"the reward model {name!r}", error) from error
    return vocabulary
