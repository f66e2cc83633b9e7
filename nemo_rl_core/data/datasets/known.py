"""The published formats that are recognised by their columns.

| format | recognised by | rows become |
|---|---|---|
| `gsm8k` | `question`, `answer` with `####` | prompts; the answer follows `####` |
| `math` | `problem`, `solution`, `level`, `type` | prompts; the last box is the answer |
| `open_math_instruct` | `problem`, `generated_solution`, `expected_answer` | prompts |
| `verl` | `prompt`, `reward_model.ground_truth` | prompts |
| `problem_answer` | `problem`, `answer`, often `solution` (DeepScaleR, AIME, MATH-500) | prompts |
| `aime_2024` | `Problem`, `Answer`, often `Solution` | prompts |
| `question_answer` | `question`, `answer` without `####` | prompts |
| `squad` | `context`, `question`, `answers.text` | prompts; the first answer counts |
| `helpsteer3` | `context`, `response1`, `response2`, `overall_preference` | preference pairs |
| `alpaca` | `instruction`, `output`, often `input` | conversations |
| `sharegpt` | `conversations` with `from` and `value` | conversations |

UltraFeedback, Tülu and other sets whose columns are understood as they are need no line here.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nemo_rl_core.config.row_format import FormatName, RowFormat
from nemo_rl_core.errors import DataError

Record = Mapping[str, Any]


@dataclass(frozen=True)
class PublishedFormat:
    """One line of the table above.

    Attributes:
        required: Columns that every such set has.
        absent: Columns that mean another format.
        uses: Columns that `read` reads, besides the required ones.
        answers: Columns that a prompt must not show.
        description: For the log and the record of a run.
        read: The columns that are understood, of a record; None leaves the row out. Raises
            ValueError for a row that does not fit.
        answer_pattern: The pattern that takes the answer out, where the user gives none.
        fits: A further condition, on the records.
        names: The names of columns by those that are understood, where `read` does no more than
            to give these.
    """

    required: tuple[str, ...]
    description: str
    read: Callable[[Record], dict[str, Any] | None]
    answers: tuple[str, ...]
    uses: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    answer_pattern: str | None = None
    fits: Callable[[Sequence[Record]], bool] = lambda records: True
    names: Mapping[str, str] = field(default_factory=dict)


def published_format(
    records: Sequence[Record], present: set[str], form: RowFormat, where: str
) -> FormatName | None:
    """Returns the published format of records, or None if they are of none.

    Args:
        records: At least one.
        present: The columns that have a value somewhere.
        form: Its `format` is taken if the columns are there; with `columns` nothing is looked for.
        where: Name of the source in messages.

    Raises:
        DataError: If several formats fit, or the one that `form` names does not.
    """
    if form.format is not None:
        missing = [name for name in FORMATS[form.format].required if name not in present]
        if missing or not FORMATS[form.format].fits(records):
            raise DataError(
                f"{where} is not of the format {form.format!r}",
                expected=f"{FORMATS[form.format].description}, with the columns "
                f"{', '.join(FORMATS[form.format].required)}",
                got=", ".join(sorted(present))[:160] or "no columns",
                fix="choose another data.format, or map the columns with data.columns",
            )
        return form.format
    if form.columns or _is_understood(present):
        return None
    found = [name for name, each in FORMATS.items() if _fits(each, records, present)]
    ways = [f"{name}: {FORMATS[name].description}" for name in found]
    # Alpaca's own column `text` repeats the conversation.
    if found and found != ["alpaca"] and "text" in present:
        ways.append("text: plain text, with data.columns: {text: text}")
    if len(ways) > 1:
        raise DataError(
            f"{where} can be read in {len(ways)} ways, and they differ",
            expected="columns of one format",
            got="; ".join(ways),
            fix=f"say data.format: {' or '.join(found)}, or map the columns with data.columns",
        )
    return found[0] if found else None


def _is_understood(present: set[str]) -> bool:
    """Whether the columns say themselves what rows are; verl's prompts have no answer beside."""
    if present & {"messages", "chosen", "responses"} or {"prompt", "answer"} <= present:
        return True
    return {"prompt", "completion"} <= present and "reward_model" not in present


def _fits(each: PublishedFormat, records: Sequence[Record], present: set[str]) -> bool:
    if not present.issuperset(each.required) or present.intersection(each.absent):
        return False
    return each.fits(records)


def _by_name(names: Mapping[str, str]) -> dict[str, Any]:
    """The options of a format whose columns have other names."""

    def read(record: Record) -> dict[str, Any]:
        return {target: record.get(source) for target, source in names.items()}

    return {"read": read, "names": names}


def _verl(record: Record) -> dict[str, Any]:
    truth = (record.get("reward_model") or {}).get("ground_truth")
    # Some rewards have a list or an object of targets.
    text = json.dumps(truth, ensure_ascii=False) if isinstance(truth, list | dict) else truth
    return {"prompt": record.get("prompt"), "answer": text, "completion": record.get("completion")}


def _squad(record: Record) -> dict[str, Any]:
    texts = (record.get("answers") or {}).get("text")
    if texts is None or not len(texts):
        raise ValueError("has no answer in answers.text (an unanswerable question of SQuAD 2)")
    context, question = record.get("context"), record.get("question")
    if not isinstance(context, str) or not isinstance(question, str):
        raise ValueError("has a context or a question that is not text")
    return {"prompt": f"{context}\n\n{question}", "answer": texts[0]}


def _helpsteer3(record: Record) -> dict[str, Any] | None:
    preference = record.get("overall_preference")
    if not isinstance(preference, int | float) or not -3 <= preference <= 3:
        raise ValueError(f"has an overall_preference that is not in -3 to 3: {preference!r:.40}")
    if preference == 0:
        return None
    # Below 0 the first response is the better one.
    better, worse = ("response1", "response2") if preference < 0 else ("response2", "response1")
    return {
        "prompt": record.get("context"),
        "chosen": record.get(better),
        "rejected": record.get(worse),
    }


def _alpaca(record: Record) -> dict[str, Any]:
    instruction, given = record.get("instruction"), record.get("input")
    if not isinstance(instruction, str) or not isinstance(record.get("output"), str):
        raise ValueError("has an instruction or an output that is not text")
    asked = f"{instruction}\n\n{given}" if given else instruction
    turns = [("user", asked), ("assistant", record["output"])]
    return {"messages": [{"role": role, "content": text} for role, text in turns]}


_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "system": "system",
}


def _sharegpt(record: Record) -> dict[str, Any]:
    turns = []
    for turn in record.get("conversations") or ():
        if not isinstance(turn, Mapping) or "value" not in turn:
            raise ValueError("has a turn without from and value")
        if turn.get("from") not in _ROLES:
            raise ValueError(
                f"has a turn from {turn.get('from')!r:.40}, not one of {', '.join(_ROLES)}"
            )
        turns.append({"role": _ROLES[turn["from"]], "content": turn["value"]})
    if not turns:
        raise ValueError("has no turns in conversations")
    return {"messages": turns}


def _has_hashes(records: Sequence[Record]) -> bool:
    return any("####" in str(record.get("answer")) for record in records)


def _without_hashes(records: Sequence[Record]) -> bool:
    return not _has_hashes(records)


def _has_ground_truth(records: Sequence[Record]) -> bool:
    models = (record.get("reward_model") for record in records)
    return any(isinstance(each, Mapping) and "ground_truth" in each for each in models)


def _has_texts(records: Sequence[Record]) -> bool:
    answers = (record.get("answers") for record in records)
    return any(isinstance(each, Mapping) and "text" in each for each in answers)


def _has_senders(records: Sequence[Record]) -> bool:
    first = next((turns for each in records if (turns := each.get("conversations"))), [None])
    return isinstance(first[0], Mapping) and "from" in first[0]


FORMATS: dict[FormatName, PublishedFormat] = {
    "gsm8k": PublishedFormat(
        ("question", "answer"),
        "prompts with answers after ####; the whole text is the completion",
        **_by_name({"prompt": "question", "answer": "answer"}),
        answers=("answer",),
        answer_pattern="hashes",
        fits=_has_hashes,
    ),
    "math": PublishedFormat(
        ("problem", "solution", "level", "type"),
        "prompts with answers in the solutions' last box; the solution is the completion",
        **_by_name({"prompt": "problem", "answer": "solution"}),
        answers=("solution",),
        absent=("answer",),
        answer_pattern="boxed",
    ),
    "open_math_instruct": PublishedFormat(
        ("problem", "generated_solution", "expected_answer"),
        "prompts with expected answers; the generated solution is the completion",
        **_by_name(
            {"prompt": "problem", "answer": "expected_answer", "completion": "generated_solution"}
        ),
        answers=("generated_solution", "expected_answer"),
    ),
    "verl": PublishedFormat(
        ("prompt", "reward_model"),
        "prompts with the answers of reward_model.ground_truth",
        _verl,
        answers=("reward_model", "completion"),
        uses=("completion",),
        fits=_has_ground_truth,
    ),
    "problem_answer": PublishedFormat(
        ("problem", "answer"),
        "prompts with answers; a solution is the completion",
        **_by_name({"prompt": "problem", "answer": "answer", "completion": "solution"}),
        answers=("answer", "solution"),
        uses=("solution",),
    ),
    "aime_2024": PublishedFormat(
        ("Problem", "Answer"),
        "prompts with answers; a solution is the completion",
        **_by_name({"prompt": "Problem", "answer": "Answer", "completion": "Solution"}),
        answers=("Answer", "Solution"),
        uses=("Solution",),
    ),
    "question_answer": PublishedFormat(
        ("question", "answer"),
        "prompts with answers",
        **_by_name({"prompt": "question", "answer": "answer"}),
        answers=("answer",),
        fits=_without_hashes,
    ),
    "helpsteer3": PublishedFormat(
        ("context", "response1", "response2", "overall_preference"),
        "preference pairs by overall_preference; ties are dropped",
        _helpsteer3,
        answers=("response1", "response2"),
    ),
    "squad": PublishedFormat(
        ("context", "question", "answers"),
        "prompts of context and question, with the first of their answers",
        _squad,
        answers=("answers",),
        absent=("answer",),
        fits=_has_texts,
    ),
    "alpaca": PublishedFormat(
        ("instruction", "output"),
        "conversations of instruction, with input, and output",
        _alpaca,
        answers=("output",),
        uses=("input",),
    ),
    "sharegpt": PublishedFormat(
        ("conversations",),
        "conversations, with the turns of human and gpt",
        _sharegpt,
        answers=(),
        fits=_has_senders,
    ),
}
