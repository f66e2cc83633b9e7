"""Majority voting: extraction of answers from completions, and consensus at k."""

import re
from collections import Counter
from collections.abc import Callable, Sequence

from nemo_rl_core.config.environment import EnvironmentConfig
from nemo_rl_core.environments.rewards.reasoning_gym import candidate_answers

ExtractAnswer = Callable[[str], str]
"""Extracts the answer of a completion as text that can be compared."""

_BOXED = "\\boxed{"
_FINAL = re.compile(r"(?:####|answer(?: is)?\s*:?)\s*([^\n]+)", re.IGNORECASE)
_NUMBER = re.compile(r"(?<![\w.])-?[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?(?![0-9])")


def extractor(environment: EnvironmentConfig) -> ExtractAnswer:
    """Returns the function that extracts answers from completions for this environment.

    Environments that score the whole text (`exact`, your own function) vote with the whole text.
    """
    match environment.kind:
        case "math":
            return math_answer
        case "reasoning_gym":
            return tagged_answer
        case _:
            return str.strip


def math_answer(completion: str) -> str:
    r"""The final answer of a solution: the last box, else the text after "answer is" or `####`.

    Without either, the last number, else the whole text. Only the spelling is normalised (spaces,
    dollars, the commas of thousands): `1/2` and `0.5` are different answers, though they are equal
    in math-verify, so a vote can only be too strict.

    Example:
        >>> math_answer(r"so 3 + 4 = 7 and we get \boxed{\frac{1}{2}}")
        '\\frac{1}{2}'
        >>> math_answer("It costs 1,200 dollars.")
        '1200'
    """
    found = _last_box(completion)
    if found is None:
        finals = _FINAL.findall(completion)
        numbers = _NUMBER.findall(finals[-1] if finals else completion)
        found = numbers[-1] if numbers else (finals[-1] if finals else completion)
    plain = "".join(found.replace("$", "").split()).rstrip(".")
    return plain.replace(",", "") if _NUMBER.fullmatch(plain) else plain


def tagged_answer(completion: str) -> str:
    """Returns the text between the last `<answer>` and `</answer>`, else the whole text.

    Example:
        >>> tagged_answer("I think <answer> 12 </answer>")
        '12'
    """
    return candidate_answers(completion, "")[0]


def majority(answers: Sequence[str]) -> int:
    """Returns the index of the first completion with the most frequent answer.

    Ties go to the first answer, so that a rerun, which samples the same completions in the same
    order, has the same winner.

    Args:
        answers: At least one.

    Example:
        >>> majority(["4", "5", "5"]), majority(["4", "5", "5", "4"])
        (1, 0)
    """
    # Counter keeps the order of insertion, and `most_common` sorts stably.
    winner = Counter(answers).most_common(1)[0][0]
    return list(answers).index(winner)


def consensus_at_k(answers: Sequence[str], correct: Sequence[bool], k: int) -> bool:
    """Returns whether the majority answer of the first k samples is correct.

    Samples of a prompt are independent, so the first k are as good as any k; the mean over all
    subsets of k, which others report, has the same expectation and less variance. Source: Wang et
    al. 2022, arXiv:2203.11171 (self-consistency).

    Args:
        answers: The answer of each sample, in order of sampling.
        correct: Whether each is correct.
        k: Number of samples that vote; all if there are fewer.
    """
    return bool(correct[majority(answers[:k])])


def _last_box(text: str) -> str | None:
    start = text.rfind(_BOXED)
    if start < 0:
        return None
    depth, first = 1, start + len(_BOXED)
    for index in range(first, len(text)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if depth == 0:
            return text[first:index]
    return None
