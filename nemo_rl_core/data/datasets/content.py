"""Columns that belong to the prompt in addition to its question, and how they are written.

A prompt has, in this order: a system turn, the turns of the history, and a turn of context,
question, input and lettered choices; with choices, the answer becomes a letter. A column `prompt`
is assumed to be complete: a context, an input or a history next to it is written only if
`data.columns` maps it, and otherwise refused unless the prompt contains its text.
"""

import re
import string
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final

from nemo_rl_core.config.row_policy import MAX_DROPPED
from nemo_rl_core.data.chunks import chunks_of, rows_of
from nemo_rl_core.data.datasets.dialogues import as_dialogue
from nemo_rl_core.data.datasets.records import Records
from nemo_rl_core.data.json_values import parsed
from nemo_rl_core.data.turns import Turn, turns_of
from nemo_rl_core.errors import DataError

SPELLINGS: Final = {
    "system": ("system", "system_prompt", "system_message"),
    "history": ("history",),
    "context": (
        *("context", "contexts", "passage", "article", "paragraph", "story", "document"),
        *("passages", "paragraphs", "documents", "docs", "evidence", "knowledge"),
        *("retrieved_docs", "retrieved_documents", "retrieved_passages", "search_results"),
        *("pre_text", "table", "post_text"),
    ),
    "input": ("input",),
    "choices": ("choices", "options"),
}
"""Columns of each kind of content."""
CONTENT: Final = (*SPELLINGS,)
_TEXTS: Final = ("text", "content", "contents", "paragraph_text", "passage", "passage_text")
PLAIN: Final = ("system", "choices")
"""Content that is also written if rows have a column `prompt`."""
_MIN_REPEATED = 40
"""Minimum characters of a text that does not occur in another by chance."""
_MARKED = re.compile(r"\s*\(?([A-Z])[).:]\s*")


def has_content(value: Any) -> bool:
    """Whether a value is not null, not empty, and not the JSON of an empty list or object."""
    if isinstance(value, Mapping):
        return any(map(has_content, value.values()))
    if value is None or isinstance(value, str | bytes | list | tuple):
        return bool(value) and value not in ("[]", "{}", "null")
    return True


def prompt_with_content(record: Mapping[str, Any]) -> Any:
    """Returns the prompt of a record with its content: a text, or turns if there are several."""
    prompt = as_dialogue(record.get("prompt"), is_prompt=True)
    content = {kind: record[kind] for kind in CONTENT if has_content(record.get(kind))}
    if not content:
        return prompt
    turns = turns_of(prompt)
    text = turns[-1].get("content") if turns else prompt
    if not isinstance(text, str):
        return prompt  # the check of its column reports the row
    if "context" in content:
        text = _joined(_text(content["context"], "context"), text)
    if "input" in content:
        text = _joined(text, _text(content["input"], "input"))
    if "choices" in content:
        text = _with_letters(text, options_of(content["choices"])[0])
    before = turns[:-1] if turns else []
    if "history" in content:
        before = [*_history(content["history"]), *before]
    if "system" in content:
        before = with_system(before, _text(content["system"], "system"))
    last = {**turns[-1], "content": text} if turns else {"role": "user", "content": text}
    return [*before, last] if before or turns else text


def answer_or_letter(record: Mapping[str, Any]) -> Any:
    """Returns the answer of a record, or its letter if the record has choices."""
    if not has_content(record.get("choices")) or record.get("answer") is None:
        return record.get("answer")
    return letter_of(record["answer"], *options_of(record["choices"]))


def with_system(turns: Sequence[Turn], system: str) -> list[Turn]:
    """Returns the turns after a system turn."""
    if turns and turns[0].get("role") in ("system", "developer"):
        if turns[0].get("content") not in (system, ""):
            raise ValueError(
                "has a system turn and a different text in its column system "
                "(data.drop_columns: [system] keeps the turn)"
            )
        turns = turns[1:]
    return [{"role": "system", "content": system}, *turns]


def refuse_lost(
    records: Records,
    columns: Collection[str],
    is_lost: Callable[[Mapping[str, Any], Any], bool] = lambda record, value: True,
    *,
    where: str,
    expected: str,
    fix: Callable[[str], str],
    dropped: dict[int, str] | None = None,
) -> None:
    """Raises if columns have content that would not reach the model.

    Args:
        is_lost: Whether a value is lost, given the record and the value.
        fix: Returns the fix for a column.
        dropped: Filled with the lost column by index of the row, if so many rows may be dropped;
            None drops no row.
    """
    rows: dict[str, list[int]] = {column: [] for column in sorted(columns)}
    start = 0
    for chunk in chunks_of(records) if columns else ():
        for number, record in enumerate(rows_of(chunk), start=start):
            for column, lost in rows.items():
                value = record.get(column)
                if has_content(value) and is_lost(record, value):
                    lost.append(number)
        start += len(chunk)
    for column, lost in rows.items():
        if dropped is not None and len(lost) <= MAX_DROPPED * len(records):
            dropped.update(dict.fromkeys(lost, column))
        elif lost:
            raise DataError(
                f"{where}: {len(lost)} rows have {column}, which would not reach the model",
                expected=expected,
                got=f"the column {column}, first in row {lost[0]} (counted from 0)",
                fix=fix(column),
            )


def contains(text: str, value: Any) -> bool:
    """Whether a text contains a value, or all texts of a list or an object."""
    if isinstance(value, Mapping):
        value = [*value.values()]
    if isinstance(value, list | tuple):
        return all(contains(text, item) for item in value)
    return value is None or str(value).strip() in text


def _joined(one: str, other: str) -> str:
    if _repeats(other, one.strip()):
        return other
    return one if _repeats(one, other.strip()) else f"{one}\n\n{other}"


def _repeats(text: str, part: str) -> bool:
    """Whether a text contains another that is long enough or a full line, so not by chance."""
    lines = [line.strip() for line in text.splitlines()]
    return part in text and (not part or len(part) >= _MIN_REPEATED or part in lines)


def _text(value: Any, kind: str) -> str:
    """Returns content as text: lists of paragraphs, and the objects of HotpotQA and PubMedQA."""
    if isinstance(value, Mapping):
        if isinstance(value.get("sentences"), list):
            titles = value.get("title") or [""] * len(value["sentences"])
            pairs = zip(titles, value["sentences"], strict=False)
            value = [f"{title}\n{''.join(texts)}".strip() for title, texts in pairs]
        else:
            value = value.get("contexts") or value.get("passage_text")
    if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        texts = [next((item[name] for name in _TEXTS if item.get(name)), None) for item in value]
        titles = [item.get("title") or "" for item in value]
        if all(isinstance(text, str) for text in texts):
            value = [f"{title}\n{text}".strip() for title, text in zip(titles, texts, strict=True)]
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        value = "\n\n".join(value)
    if not isinstance(value, str):
        raise ValueError(f"has a {kind} that is not text (data.drop_columns removes it)")
    return value


def _history(value: Any) -> list[Turn]:
    turns = turns_of(value)
    if turns is not None:
        return turns
    pairs: list[Any] = value if isinstance(value, list) else [None]
    if not all(
        isinstance(pair, list | tuple) and [type(text) for text in pair] == [str, str]
        for pair in pairs
    ):
        raise ValueError("has a history that is neither pairs of question and answer nor messages")
    return turns_of_pairs(pairs)


def turns_of_pairs(pairs: Iterable[Sequence[Any]]) -> list[Turn]:
    """Returns user and assistant turns for pairs of question and answer."""
    return [
        {"role": role, "content": text}
        for pair in pairs
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]


def options_of(value: Any) -> tuple[list[str], list[str]]:
    """Returns the texts of options and their labels, by default letters.

    Args:
        value: A list of texts (`A) Rome` loses its letter); a list of
            `{"key": "A", "value": "Rome"}`; `{"text": [...], "label": [...]}`;
            `{"A": "Rome", "B": "Oslo"}`; or the JSON of one of these.

    Raises:
        ValueError: If it has another form.

    Example:
        >>> options_of({"text": ["Rome", "Oslo"], "label": ["1", "2"]})
        (['Rome', 'Oslo'], ['1', '2'])
    """
    value = parsed(value, (list, dict))
    labels: list[Any] = []
    if isinstance(value, Mapping) and isinstance(value.get("text"), list):
        value, labels = value["text"], value.get("label") or []
    elif isinstance(value, Mapping):
        filled = {key: text for key, text in value.items() if text is not None}
        value, labels = [*filled.values()], [*filled]
    elif isinstance(value, list) and all(isinstance(option, Mapping) for option in value):
        labels = [option.get("label", option.get("key")) for option in value]
        value = [option.get("text", option.get("value")) for option in value]
    is_list = isinstance(value, list) and {*map(type, value)} <= {str, int, float}
    if not is_list or not 2 <= len(value) <= len(string.ascii_uppercase):
        raise ValueError("has choices that are not a list of 2 to 26 texts")
    texts = [str(text).strip() for text in value]
    letters = [*string.ascii_uppercase[: len(texts)]]
    marks = [_MARKED.match(text) for text in texts]
    if [mark.group(1) if mark else None for mark in marks] == letters:
        texts = [_MARKED.sub("", text, count=1) for text in texts]
    text_labels = [str(label) for label in labels]
    return texts, text_labels if len({*text_labels}) == len(texts) else letters


def letter_of(answer: Any, texts: Sequence[str], labels: Sequence[str]) -> str:
    """Returns the letter of the option that an answer names.

    Args:
        answer: A label, the text of an option, or its index from 0; a list of one of these.

    Raises:
        ValueError: If it matches no option or several.

    Example:
        >>> letter_of(1, ["Rome", "Oslo"], ["A", "B"]), letter_of("Rome", ["Rome", "Oslo"], "AB")
        ('B', 'A')
    """
    if isinstance(answer, list) and len(answer) == 1:
        answer = answer[0]
    matches: set[int] = set()
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        matches = _indices(str(answer), labels)
        if not matches and answer in range(len(texts)):
            matches = {int(answer)}
        matches = matches or _indices(str(answer), texts)
    elif isinstance(answer, str):
        text = answer.strip()
        matches = _indices(text, labels)
        # Labels such as 1 to 4 are not texts.
        matches |= _indices(text, texts) if labels[0] == "A" or not matches else set()
        matches = matches or _indices(text.strip("().").upper(), labels)
        if not matches and text.isdecimal() and int(text) < len(texts):
            matches = {int(text)}
    if len(matches) != 1:
        problem = "matches several of the choices" if matches else "is none of the choices"
        raise ValueError(
            f"has the answer {answer!r:.40}, which {problem} {list(texts)!r:.80} "
            "(data.drop_columns removes the choices)"
        )
    return string.ascii_uppercase[matches.pop()]


def _with_letters(question: str, texts: Sequence[str]) -> str:
    options = [*zip(string.ascii_uppercase, texts, strict=False)]
    if all(re.search(rf"\b{mark}\b\W{{1,4}}{re.escape(text)}", question) for mark, text in options):
        return question
    return "\n".join([f"{question}\n", *(f"{mark}. {text}" for mark, text in options)])


def _indices(value: str, among: Sequence[str]) -> set[int]:
    return {index for index, text in enumerate(among) if text == value}
