"""Published multiple-choice sets, and questions about a text.

Sets with the columns `question`, `choices` or `options`, and `answer` (MMLU, MMLU-Pro, MedQA, RACE)
need no entry here: `question_answer` reads them, and their options are content.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nemo_rl_core.config.row_format import FormatName
from nemo_rl_core.data.datasets.content import CONTENT
from nemo_rl_core.data.datasets.published import PublishedFormat, Record, first_value, renamed

_LETTERS = "questions with lettered options; the answer is a letter"
_WITH_CONTEXT: Any = {"required": ("context",), "content": ("context",)}


def _numbered(
    prompt: str | tuple[str, ...],
    options: str | tuple[str, ...],
    answer: str,
    *,
    first: int = 0,
    required: tuple[str, ...] = (),
    content: tuple[str, ...] = (),
) -> PublishedFormat:
    """Returns a format with the number of an option as answer.

    Args:
        prompt: Column of the question, or columns of its parts.
        options: Column of the options, or one column per option.
    """
    parts = (prompt,) if isinstance(prompt, str) else prompt
    columns = (options,) if isinstance(options, str) else options

    def read(record: Record) -> dict[str, Any]:
        number: Any = record.get(answer)
        number = number[0] if isinstance(number, list) and len(number) == 1 else number
        values = [record.get(name) for name in columns]
        texts = values[0] if isinstance(options, str) else values
        if str(number).strip().removesuffix(".0").isdecimal():
            number = int(float(number)) - first
            if not 0 <= number < len(texts or ()):
                raise ValueError(
                    f"has the {answer} {record.get(answer)!r:.40}, which is not an option"
                )
        return {"prompt": _joined(record, parts), "choices": texts, "answer": number}

    return PublishedFormat(
        (*required, *parts, *columns, answer), _LETTERS, read, answers=(answer,), content=content
    )


def _distracted(prompt: str, right: str, wrong: str) -> PublishedFormat:
    """Returns a format with the right option and three wrong ones in four columns, sorted."""
    columns = (right, *(f"{wrong}{number}" for number in (1, 2, 3)))

    def read(record: Record) -> dict[str, Any]:
        options = [record.get(name) for name in columns]
        if not all(isinstance(text, str) and text.strip() for text in options):
            raise ValueError(f"lacks one of the options {', '.join(columns)}")
        texts = sorted({str(text).strip() for text in options})
        return {"prompt": record.get(prompt), "choices": texts, "answer": str(options[0]).strip()}

    return PublishedFormat((prompt, *columns), _LETTERS, read, answers=(right,))


def _truthful(record: Record) -> dict[str, Any]:
    targets = record.get("mc1_targets") or {}
    texts, labels = targets.get("choices") or [], targets.get("labels") or []
    right = [text for text, label in zip(texts, labels, strict=False) if label == 1]
    if len(right) != 1:
        raise ValueError("does not have exactly one right choice in mc1_targets")
    # Sorted, since the right choice is the first in the data.
    return {"prompt": record.get("question"), "choices": sorted(texts), "answer": right[0]}


def _yes_no(record: Record) -> dict[str, Any]:
    answer = record.get("answer", record.get("label"))
    if answer not in (0, 1):
        raise ValueError(f"has the answer {answer!r:.40}, which is neither true nor false")
    return {"prompt": record.get("question"), "answer": "yes" if answer else "no"}


def _drop(record: Record) -> dict[str, Any]:
    spans = (record.get("answers_spans") or {}).get("spans")
    if not spans:
        raise ValueError("has no answer in answers_spans.spans")
    return {"prompt": record.get("question"), "answer": ", ".join(map(str, spans))}


def _first_spelling(column: str) -> Callable[[Record], dict[str, Any]]:
    """Returns a reader of answers that are a list of spellings, or an object with a `value`."""

    def read(record: Record) -> dict[str, Any]:
        first: Any = record.get(column)
        if isinstance(first, Mapping):
            first = first.get("value")
        elif isinstance(first, list) and first:
            first = first[0]
        first = first.get("text") if isinstance(first, Mapping) else first
        if not isinstance(first, str | int | float):
            raise ValueError(f"has no text in {column}")
        return {"prompt": record.get("question"), "answer": first}

    return read


def _svamp(record: Record) -> dict[str, Any]:
    return {"prompt": _joined(record, ("Body", "Question")), "answer": record.get("Answer")}


def _joined(record: Record, columns: tuple[str, ...]) -> Any:
    texts = [record.get(name) for name in columns]
    if len(texts) == 1:
        return texts[0]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"has no text in {' or '.join(columns)}")
    return " ".join(str(text).strip() for text in texts)


def _is_yes_no(records: Sequence[Record]) -> bool:
    first = first_value(records, "answer")
    return isinstance(first, bool) or (first is None and first_value(records, "label") in (0, 1))


def has_plain_answers(records: Sequence[Record]) -> bool:
    """Whether answers are texts or numbers, or absent."""
    first = first_value(records, "answer")
    if isinstance(first, bool):
        return first_value(records, "passage") is None
    has_choices = any(record.get("choices") or record.get("options") for record in records)
    return has_choices or not isinstance(first, list | Mapping)


def _keyed(question: str, options: str, answer: str, **more: Any) -> PublishedFormat:
    """Returns a format with options in one column, and a label, a text or an index as answer."""
    names = {"prompt": question, "choices": options, "answer": answer}
    return renamed(_LETTERS, names, content=("system", "history", "context", "choices"), **more)


CHOICES: dict[FormatName, PublishedFormat] = {
    "arc": _keyed("question", "choices", "answerKey"),
    "open_book_qa": _keyed("question_stem", "choices", "answerKey"),
    "aqua_rat": _keyed("question", "options", "correct", absent=("answer",)),
    "labelled_options": _keyed("question", "options", "label", absent=("answer",)),
    "agieval": _numbered("query", "choices", "gold", content=("system", "context")),
    "hellaswag": _numbered("ctx", "endings", "label"),
    "piqa": _numbered("goal", ("sol1", "sol2"), "label"),
    "social_iqa": _numbered(
        "question", ("answerA", "answerB", "answerC"), "label", first=1, **_WITH_CONTEXT
    ),
    "winogrande": _numbered("sentence", ("option1", "option2"), "answer", first=1),
    "copa": _numbered(("premise", "question"), ("choice1", "choice2"), "label"),
    "medmcqa": _numbered("question", ("opa", "opb", "opc", "opd"), "cop"),
    "logiqa": _numbered("query", "options", "correct_option", **_WITH_CONTEXT),
    "reclor": _numbered("question", "answers", "label", **_WITH_CONTEXT),
    "sciq": _distracted("question", "correct_answer", "distractor"),
    "gpqa": _distracted("Question", "Correct Answer", "Incorrect Answer "),
    "truthful_qa_choices": PublishedFormat(
        ("question", "mc1_targets"), _LETTERS, _truthful, answers=("mc1_targets",)
    ),
    "truthful_qa": renamed(
        "prompts with their best answers",
        {"prompt": "question", "answer": "best_answer"},
        answers=("correct_answers", "incorrect_answers"),
    ),
    "boolq": PublishedFormat(
        ("question", "passage"),
        "prompts of passage and question, answered by yes or no",
        _yes_no,
        answers=("answer", "label"),
        uses=("answer", "label"),
        absent=("options", "choices"),
        fits=_is_yes_no,
        content=("context",),
    ),
    "drop": PublishedFormat(
        ("passage", "question", "answers_spans"),
        "prompts of passage and question, with the spans of the answer",
        _drop,
        answers=("answers_spans",),
        content=("context",),
    ),
    "answer_spellings": PublishedFormat(
        ("question", "answer"),
        "prompts with the first spelling of their answers",
        _first_spelling("answer"),
        answers=("answer",),
        absent=("choices", "options"),
        fits=lambda records: isinstance(first_value(records, "answer"), list | Mapping),
        content=CONTENT,
    ),
    "web_questions": PublishedFormat(
        ("question", "answers"),
        "prompts with the first of their answers",
        _first_spelling("answers"),
        answers=("answers",),
        absent=("answer", "label", "context"),
        fits=lambda records: isinstance(first_value(records, "answers"), list),
    ),
    "pubmed_qa": renamed(
        "prompts of abstract and question, with their decisions",
        {"prompt": "question", "answer": "final_decision"},
        required=("context",),
        answers=("long_answer",),
        content=("context",),
    ),
    "mgsm": renamed(
        "prompts with the numbers of their answers",
        {"prompt": "question", "answer": "answer_number", "completion": "answer"},
        uses=("answer",),
    ),
    "final_answer": renamed(
        "prompts with final answers; a solution is the completion",
        {"prompt": "question", "answer": "final_answer", "completion": "solution"},
        uses=("solution",),
        absent=("answer",),
        content=CONTENT,
    ),
    "svamp": PublishedFormat(
        ("Body", "Question", "Answer"),
        "prompts of body and question, with numbers",
        _svamp,
        answers=("Answer", "Equation"),
    ),
    "input_output": renamed(
        "prompts with outputs",
        {"prompt": "input", "answer": "output"},
        absent=("instruction", "prompt", "question", "query"),
        content=("system", "history", "context", "choices"),
    ),
    "input_target": renamed("prompts with targets", {"prompt": "input", "answer": "target"}),
}
"""Formats by name, which `known.FORMATS` includes."""
