"""Majority voting: the answers that completions vote for, and consensus at k."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from nemo_rl_core.config.environment import ByTask, EnvironmentConfig, WeightedSum
from nemo_rl_core.config.single_turn import (
    MathVerify,
    MultipleChoice,
    ReasoningGymScore,
    SingleEnvironmentConfig,
)
from nemo_rl_core.environments.rewards.final_answers import answering_text, final_answer
from nemo_rl_core.environments.rewards.math import MathScorer
from nemo_rl_core.environments.rewards.multiple_choice import chosen_letter
from nemo_rl_core.environments.rewards.reasoning_gym import candidate_answers
from nemo_rl_core.types import Rollout

GetVotes = Callable[[Sequence[Rollout]], list[str]]
"""Returns the answer that each completion of a prompt votes for; equal answers are equal texts."""


@contextmanager
def voting(environment: EnvironmentConfig) -> Iterator[GetVotes]:
    """Yields the function that returns the votes in this environment.

    In environments that score the complete text (`exact`, a custom function) the vote is the text.
    With several environments, the environment of the row's task decides, or the first part of a sum
    that extracts an answer.
    """
    match environment:
        case MathVerify():
            scorer = MathScorer(environment)
            try:
                yield lambda rollouts: math_votes(scorer, [each.text for each in rollouts])
            finally:
                scorer.close()
        case MultipleChoice(num_choices=count):
            yield lambda rollouts: [chosen_letter(r.text, count) or "" for r in rollouts]
        case ReasoningGymScore():
            yield lambda rollouts: [candidate_answers(r.text, "")[0] for r in rollouts]
        case WeightedSum(parts=parts):
            kinds = (MathVerify, MultipleChoice, ReasoningGymScore)
            environments = [part.environment for part in parts]
            extracting: list[SingleEnvironmentConfig] = [
                each for each in environments if isinstance(each, kinds)
            ]
            with voting((extracting or environments)[0]) as get_votes:
                yield get_votes
        case ByTask(tasks=tasks):
            with ExitStack() as stack:
                by_task = {
                    each.task: stack.enter_context(voting(each.environment)) for each in tasks
                }
                yield lambda rollouts: by_task.get(rollouts[0].prompt.task, _texts)(rollouts)
        case _:
            yield _texts


def _texts(rollouts: Sequence[Rollout]) -> list[str]:
    return [rollout.text.strip() for rollout in rollouts]


def math_votes(scorer: MathScorer, completions: Sequence[str]) -> list[str]:
    r"""Returns the final answer of each completion; equal ones are written like the first."""
    answers = [final_answer(answering_text(each)) for each in completions]
    first_equal: dict[str, str] = {}
    for answer in dict.fromkeys(answers):
        equal_answers = (each for each in first_equal.values() if scorer.are_equal(each, answer))
        first_equal[answer] = next(equal_answers, answer)
    return [first_equal[answer] for answer in answers]


def majority(answers: Sequence[str]) -> int:
    """Returns the index of the first completion with the most frequent answer.

    Ties go to the first answer, so that a rerun, which samples the same completions in the same
    order, has the same winner.

    Example:
        >>> majority(["4", "5", "5"]), majority(["4", "5", "5", "4"])
        (1, 0)
    """
    # Counter keeps the order of insertion, and `most_common` sorts stably.
    winner = Counter(answers).most_common(1)[0][0]
    return list(answers).index(winner)


def consensus_at_k(answers: Sequence[str], correct: Sequence[bool], k: int) -> bool:
    """Returns whether the majority answer of the first k samples is correct.

    Samples of a prompt are independent, so any k samples will do; the mean over all subsets of k,
    which others report, has the same expectation and less variance. Source: Wang et al. 2022,
    arXiv:2203.11171 (self-consistency).
    """
    return bool(correct[majority(answers[:k])])
