"""Published comparisons: two or more answers, and which of them is preferred."""

from collections.abc import Callable, Mapping
from typing import Any

from nemo_rl_core.config.row_format import FormatName
from nemo_rl_core.data.datasets.content import turns_of_pairs
from nemo_rl_core.data.datasets.published import PublishedFormat, Record, has_key, renamed
from nemo_rl_core.data.json_values import parsed
from nemo_rl_core.data.turns import turns_of

Read = Callable[[Record], dict[str, Any] | None]

_TIES_DROPPED = "preference pairs of compared answers; ties are dropped"


def _compared(
    prompt: str, columns: tuple[str, str], label: str, is_first: Callable[[Any], bool | None]
) -> PublishedFormat:
    """Returns a format with two answers in two columns and a label for the better one.

    Args:
        prompt: Column of the prompt; empty if the answers contain it.
        is_first: Whether a label prefers the first answer; None for a tie, which is left out.
            Raises ValueError for any other label.
    """

    def read(record: Record) -> dict[str, Any] | None:
        try:
            first = is_first(record.get(label))
        except ValueError as error:
            raise ValueError(
                f"has the {label} {record.get(label)!r:.40}, which is {error}"
            ) from None
        if first is None:
            return None
        better, worse = columns if first else columns[::-1]
        return _pair(record.get(prompt), record.get(better), record.get(worse))

    required = (*filter(None, (prompt,)), *columns, label)
    return PublishedFormat(required, _TIES_DROPPED, read, answers=columns)


def _pair(prompt: Any, chosen: Any, rejected: Any) -> dict[str, Any]:
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def _by_strength(strength: Any) -> bool | None:
    if not isinstance(strength, int | float) or not -3 <= strength <= 3:
        raise ValueError("not in -3 (the first is better) to 3")
    return None if strength == 0 else strength < 0


def _equals(first: Any, second: Any) -> Callable[[Any], bool | None]:
    def is_first(label: Any) -> bool | None:
        if isinstance(label, str) and label.startswith(("tie", "both")):
            return None
        if label not in (first, second):
            raise ValueError(f"neither {first!r} nor {second!r}")
        return bool(label == first)

    return is_first


def _arena_55k(record: Record) -> dict[str, Any] | None:
    names = ("prompt", "response_a", "response_b")
    prompts, *answers = lists = [parsed(record.get(name), list) for name in names]
    if not all(isinstance(texts, list) for texts in lists):
        raise ValueError("has a prompt or a response that is not a list of texts")
    if record.get("winner_tie"):
        return None
    pair = [turns_of_pairs(zip(prompts, texts, strict=True)) for texts in answers]
    better, worse = pair if record.get("winner_model_a") else reversed(pair)
    return {"chosen": better, "rejected": worse}


def _ranked(prompt: str, answers: str, text: str, score: str) -> PublishedFormat:
    """Returns a format with a list of scored answers; the best and the worst make a pair.

    Args:
        score: Key of an answer's score; a `rank` is 1 for the best.
    """

    def read(record: Record) -> dict[str, Any] | None:
        rated = [answer for answer in record.get(answers) or () if _is_number(answer.get(score))]
        if not rated:
            raise ValueError(f"has no scores in {answers}")
        worst, best = (choose(rated, key=lambda answer: answer[score]) for choose in (min, max))
        if worst[score] == best[score]:
            return None
        better, worse = (worst, best) if score == "rank" else (best, worst)
        return _pair(record.get(prompt), better.get(text), worse.get(text))

    return PublishedFormat(
        (prompt, answers), _TIES_DROPPED, read, answers=(answers,), fits=has_key(answers, score)
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and value == value  # noqa: PLR0124 (nan)


def _webgpt(record: Record) -> dict[str, Any] | None:
    scores: list[Any] = [record.get(name) for name in ("score_0", "score_1")]
    if not all(map(_is_number, scores)):
        raise ValueError(f"has scores that are not numbers: {scores!r:.80}")
    if scores[0] == scores[1]:
        return None
    better, worse = ("answer_0", "answer_1") if scores[0] > scores[1] else ("answer_1", "answer_0")
    question = record.get("question")
    prompt = question.get("full_text") if isinstance(question, Mapping) else question
    return _pair(prompt, record.get(better), record.get(worse))


def _summaries(record: Record) -> dict[str, Any]:
    texts = [summary.get("text") for summary in record.get("summaries") or ()]
    choice = record.get("choice")
    if choice not in (0, 1) or len(texts) != 2:
        raise ValueError("does not have two summaries and a choice of 0 or 1")
    info = record.get("info") or {}
    marks = {"subreddit": "SUBREDDIT: r/", "title": "TITLE: ", "post": "POST: ", "article": ""}
    parts = [f"{mark}{info[name]}" for name, mark in marks.items() if info.get(name)]
    if not info.get("post") and not info.get("article"):
        raise ValueError("has neither info.post nor info.article, which is the text to summarize")
    return _pair("\n\n".join([*parts, "TL;DR:"]), texts[choice], texts[1 - choice])


def _after_messages(record: Record) -> dict[str, Any]:
    turns = turns_of(record.get("messages"))
    if not turns or turns[-1].get("role") != "assistant":
        raise ValueError("has messages that do not end with the preferred answer")
    return _pair(turns[:-1], turns[-1].get("content"), record.get("rejected_response"))


def _preferred_output(record: Record) -> dict[str, Any]:
    request = record.get("input") or {}
    outputs = (record.get(name) for name in ("preferred_output", "non_preferred_output"))
    return {**_pair(request.get("messages"), *outputs), "tools": request.get("tools")}


def _named(prompt: str, chosen: str, rejected: str) -> PublishedFormat:
    names = _pair(prompt, chosen, rejected)
    return renamed("preference pairs", names, content=("system", "history", "context", "input"))


PAIRS: dict[FormatName, PublishedFormat] = {
    "chosen_response": _named("instruction", "chosen_response", "rejected_response"),
    "stack_exchange_paired": _named("question", "response_j", "response_k"),
    "rejected_response": _named("query", "response", "rejected_response"),
    "shp": _compared("history", ("human_ref_A", "human_ref_B"), "labels", _equals(1, 0)),
    "safe_rlhf": _compared(
        "prompt", ("response_0", "response_1"), "better_response_id", _equals(0, 1)
    ),
    "helpsteer2": _compared(
        "prompt", ("response_1", "response_2"), "preference_strength", _by_strength
    ),
    "helpsteer3": _compared(
        "context", ("response1", "response2"), "overall_preference", _by_strength
    ),
    "arena": _compared(
        "", ("conversation_a", "conversation_b"), "winner", _equals("model_a", "model_b")
    ),
    "arena_55k": PublishedFormat(
        ("prompt", "response_a", "response_b", "winner_model_a", "winner_model_b"),
        _TIES_DROPPED,
        _arena_55k,
        answers=("response_a", "response_b"),
        uses=("winner_tie",),
    ),
    "nemo_rl_preferences": _ranked("context", "completions", "completion", "rank"),
    "ultrafeedback": _ranked("instruction", "completions", "response", "overall_score"),
    "nectar": _ranked("prompt", "answers", "answer", "rank"),
    "webgpt": PublishedFormat(
        ("question", "answer_0", "answer_1", "score_0", "score_1"),
        _TIES_DROPPED,
        _webgpt,
        answers=("answer_0", "answer_1"),
    ),
    "summaries": PublishedFormat(
        ("info", "summaries", "choice"), "preference pairs", _summaries, answers=("summaries",)
    ),
    "rejected_messages": PublishedFormat(
        ("messages", "rejected_response"),
        "preference pairs",
        _after_messages,
        answers=("rejected_response",),
    ),
    "preferred_output": PublishedFormat(
        ("input", "preferred_output", "non_preferred_output"),
        "preference pairs",
        _preferred_output,
        answers=("preferred_output", "non_preferred_output"),
    ),
}
"""Formats by name, which `known.FORMATS` includes."""
