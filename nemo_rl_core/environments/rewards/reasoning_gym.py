"""Scores completions with the reasoning-gym task of their prompt."""

import json
import re
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

from nemo_rl_core.environments.interfaces import Scorer, attempt, error_context
from nemo_rl_core.errors import RewardError
from nemo_rl_core.games.reasoning_gym_library import load_reasoning_gym
from nemo_rl_core.types import Rollout

_OPEN, _CLOSE = "<answer>", "</answer>"
# Not inside a word or after another number: the 3 of "x3" does not count, and "5-3" ends in 3.
_NUMBER = re.compile(r"(?<![\w.])-?[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?(?![0-9])")


def candidate_answers(completion: str, reference: str) -> list[str]:
    """Returns the parts of a completion that may be its answer.

    - If there is a pair of `<answer>` and `</answer>`: only the contents of the last pair.
    - Otherwise the full completion, stripped; and, if the reference is a number, also the last
      number in the text, since small models answer in sentences.

    Example:
        >>> candidate_answers("7 + 5 = 12.", "12")
        ['7 + 5 = 12.', '12']
    """
    # A regular expression would be quadratic in a megabyte of opening tags.
    end = completion.rfind(_CLOSE)
    start = completion.rfind(_OPEN, 0, max(end, 0))
    if start >= 0:
        return [completion[start + len(_OPEN) : end].strip()]
    candidates = [completion.strip()]
    if _NUMBER.fullmatch(reference.strip()):
        # Models may write the typographic minus sign instead of a hyphen.
        numbers = _NUMBER.findall(completion.replace("\N{MINUS SIGN}", "-"))
        candidates.extend(numbers[-1:])
    return candidates


class ReasoningGymScorer(Scorer):
    """Scores completions with the task's `score_answer`: the maximum over `candidate_answers`.

    Some tasks raise on an answer they cannot read. If the task can score its reference answer, the
    answer is at fault and scores 0; otherwise it is an error.
    """

    def score(self, rollouts: Sequence[Rollout]) -> list[float | RewardError]:
        """Returns one outcome per rollout; a prompt without a reasoning-gym entry is an error."""
        return [
            attempt(
                partial(_score, each),
                **error_context(each, f"the scorer of reasoning-gym's {each.prompt.task!r}"),
            )
            for each in rollouts
        ]


def _score(rollout: Rollout) -> float:
    stored = json.loads(rollout.prompt.metadata)
    if not {"task", "options", "entry"} <= stored.keys():
        raise RewardError(
            f"prompt {rollout.prompt.id!r} does not come from reasoning-gym",
            expected="metadata with task, options and entry",
            got=f"the keys {', '.join(sorted(stored)) or 'none'}",
            fix="use data.kind reasoning_gym, or another environment",
        )
    dataset = _dataset(stored["task"], json.dumps(stored["options"], sort_keys=True))
    entry = stored["entry"]
    candidates = candidate_answers(rollout.text, entry["answer"])
    return max(_score_one(dataset, candidate, entry) for candidate in candidates)


def _score_one(dataset: Any, answer: str, entry: dict[str, Any]) -> float:
    try:
        return float(dataset.score_answer(answer=answer, entry=entry))
    # Broad on purpose, see the class: a fault of the task itself is raised again.
    except Exception:  # noqa: BLE001 (raised again below if the task is at fault)
        dataset.score_answer(answer=entry["answer"], entry=entry)
        return 0.0


@lru_cache(maxsize=64)
def _dataset(task: str, options: str) -> Any:
    return load_reasoning_gym().create_dataset(
        task, **{**json.loads(options), "seed": 0, "size": 1}
    )
