"""Completions scored by the reasoning-gym task that asked."""

import json
import re
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

from nemo_rl_core.environments.interfaces import Scorer, attempt
from nemo_rl_core.errors import RewardError
from nemo_rl_core.games.reasoning_gym_library import load_reasoning_gym
from nemo_rl_core.types import Rollout

_OPEN, _CLOSE = "<answer>", "</answer>"
# Not inside a word or behind another number: the 3 of "x3" is no number, and "5-3" ends in 3.
_NUMBER = re.compile(r"(?<![\w.])-?[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?(?![0-9])")


def candidate_answers(completion: str, reference: str) -> list[str]:
    """What in a completion may be meant as its answer.

    - Between `<answer>` and `</answer>`, where there is such a pair: the last pair, and nothing
      else.
    - Otherwise the whole completion without the white space around it; and, when the reference is a
      number, the last number in the text too, since small models answer in sentences.

    Example:
        >>> candidate_answers("7 + 5 = 12.", "12")
        ['7 + 5 = 12.', '12']
    """
    # By hand: a regular expression would be quadratic in a megabyte of opening tags.
    end = completion.rfind(_CLOSE)
    start = completion.rfind(_OPEN, 0, max(end, 0))
    if start >= 0:
        return [completion[start + len(_OPEN) : end].strip()]
    candidates = [completion.strip()]
    if _NUMBER.fullmatch(reference.strip()):
        # The minus sign of print, as models write it, is the hyphen of a program.
        numbers = _NUMBER.findall(completion.replace("\N{MINUS SIGN}", "-"))
        candidates.extend(numbers[-1:])
    return candidates


class ReasoningGymScorer(Scorer):
    """The task's own `score_answer`, between 0 and 1: the best over `candidate_answers`.

    Some tasks raise on an answer they cannot read (prime_factorization on one that is not a list of
    numbers). Where the same scorer gives the reference answer its mark, the fault is the answer's:
    the score is 0. Where it does not, it is an error.
    """

    def score(self, rollouts: Sequence[Rollout]) -> list[float | RewardError]:
        """One outcome a rollout; a prompt without a reasoning-gym entry is an error."""
        return [
            attempt(
                partial(_score, rollout),
                prompt=rollout.prompt.text,
                completion=rollout.text,
                source=f"the scorer of reasoning-gym's {rollout.prompt.task!r}",
            )
            for rollout in rollouts
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
    # Named fault boundary: see the class; what is wrong with the task itself is raised again.
    except Exception:  # noqa: BLE001 (raised again below, where it is the task's)
        dataset.score_answer(answer=entry["answer"], entry=entry)
        return 0.0


@lru_cache(maxsize=64)
def _dataset(task: str, options: str) -> Any:
    return load_reasoning_gym().create_dataset(
        task, **{**json.loads(options), "seed": 0, "size": 1}
    )
