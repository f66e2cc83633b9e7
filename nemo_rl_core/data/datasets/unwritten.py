"""Refusal of columns that may be the question, and of formats that no stage trains on."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from nemo_rl_core.config.row_format import RowFormat
from nemo_rl_core.data.chunks import chunks_of, rows_of
from nemo_rl_core.data.datasets.content import CONTENT, PLAIN, SPELLINGS, contains, refuse_lost
from nemo_rl_core.data.datasets.dialogues import as_dialogue
from nemo_rl_core.data.datasets.published import PublishedFormat
from nemo_rl_core.data.datasets.records import Records
from nemo_rl_core.data.datasets.row_converters import RecordFormat, text_row
from nemo_rl_core.data.turns import FLAG, FLAGS, as_turns, turns_of
from nemo_rl_core.errors import DataError
from nemo_rl_core.types import Row

_FALSE = (False, 0, "false", "0", "no")
_TRUE = (True, 1, "true", "1", "yes")
_VERDICTS = ("kto_tag", "label", "is_safe", "is_correct", "correct")
_COMPLETIONS = {
    *("completion", "response", "output", "generated_solution", "messages", "conversations")
}
_RATINGS = ("helpfulness", "correctness", "coherence", "complexity", "verbosity")


def refuse_unsupported_formats(records: Records, present: set[str], where: str) -> None:
    """Raises for rows with labels or ratings, which include completions not to imitate.

    Raises:
        DataError: For KTO labels of which some are false, labels of steps, and single responses
            with the ratings of HelpSteer.
    """
    if {"chosen", "rejected"} & present:
        return
    _refuse_masks(records, present, where)
    label = _kto_label(records, present)
    if label is not None:
        raise _label_error(label, where, "a label for each completion, as KTO has")
    if "answer" in present:
        return
    if {"prompt", "completions", "labels"} <= present:
        raise _label_error("labels", where, "a label for each step of a completion")
    if {"prompt", "response", "helpfulness"} <= present and "completion" not in present:
        rated = [name for name in _RATINGS if name in present]
        raise DataError(
            f"{where} has one response per row with ratings, and no stage trains on ratings",
            expected="preference pairs, or responses that may all be imitated",
            got=f"prompt, response, {', '.join(rated)}",
            fix="write one row per prompt with responses and scores, of which the best and the "
            "worst make a pair; or train with sft on all responses: "
            "data.columns: {response: completion}",
        )


def _refuse_masks(records: Records, present: set[str], where: str) -> None:
    if not {"messages", "conversations"} & present:
        return
    for column in sorted({*FLAGS, "mask"} & present):
        if any(isinstance(record.get(column), list) for record in records):
            raise DataError(
                f"{where} lists the turns to train on in {column}, which is not supported",
                expected=f"a key {FLAG} in the turns",
                got=f"lists in the column {column}",
                fix=f"set {FLAG}: false in the turns not to train on, if any, and "
                f"data.drop_columns: [{column}]",
            )


def _kto_label(records: Records, present: set[str]) -> str | None:
    """Returns the column of KTO labels if some of them are false."""
    columns = [name for name in _VERDICTS if name in present and _COMPLETIONS & present]
    for column in columns:
        values = [record.get(column) for record in records]
        labels = [value.lower() if isinstance(value, str) else value for value in values]
        labels = [label for label in labels if label is not None]
        are_verdicts = all(label in (*_FALSE, *_TRUE) for label in labels)
        if are_verdicts and any(label in _FALSE for label in labels):
            return column
    return None


def _label_error(column: str, where: str, meaning: str) -> DataError:
    return DataError(
        f"{where} has {meaning}, and no stage trains on labels",
        expected="preference pairs (chosen, rejected), or completions that may all be imitated",
        got=f"the column {column}, which is false in some rows",
        fix=f"keep the rows with {column} true and train on them with sft, or write pairs of a "
        "true and a false one as prompt, chosen, rejected; if the column does not rate the "
        f"completion, data.drop_columns: [{column}]",
    )


_ABOUT = re.compile(
    r"(.*[_-])?(id|idx|index|source|dataset|model|category|type|lang|language|subset|split|domain"
    r"|topic|subject|task|url|link|hash|date|time|license|author|user|label|rating|score|version"
    r"|level|difficulty|tags?|origin|name|status)s?",
    re.IGNORECASE,
)
"""Names of columns that describe a row and are never its question."""
_NUM_INSPECTED = 64


def written_content(
    present: set[str], row_format: RecordFormat, published: PublishedFormat | None, form: RowFormat
) -> dict[str, str]:
    """Returns, for each kind of content, the column that prompts contain next to the question."""
    kinds = {*PLAIN, *form.columns.values()} & {*row_format.optional}
    if published is not None:
        kinds = {*published.content}
    names = present - shown_columns(form)  # a template writes these
    columns = {kind: [name for name in SPELLINGS[kind] if name in names] for kind in CONTENT}
    return {kind: spelled[0] for kind, spelled in columns.items() if spelled and kind in kinds}


def contained_content(
    records: Records,
    unused: set[str],
    row_format: RecordFormat,
    published: PublishedFormat | None,
    form: RowFormat,
    where: str,
    dropped: dict[int, str] | None,
) -> set[str]:
    """Returns the unused columns of content, and refuses them if the prompts lack their texts."""
    if row_format.row is text_row:  # all of it is trained on
        return set()
    content = {name for spellings in SPELLINGS.values() for name in spellings}
    columns = (content & unused) - shown_columns(form)

    def is_lost(record: Mapping[str, Any], value: Any) -> bool:
        try:
            readable = record if published is None else published.read(record)
        except ValueError:  # the row does not fit and is dropped
            return False
        return not contains(_text_seen(readable or {}), value)

    def fix(column: str) -> str:
        drop = f"train without it: {drop_line(form, column)}"
        kind = next(kind for kind, names in SPELLINGS.items() if column in names)
        mapped = {**form.columns, column: kind}
        is_mapped = kind in form.columns.values()
        if published is None and kind in row_format.optional and not is_mapped:
            return f"write it into the prompt: {mapping_line(mapped)}, or {drop}"
        if "prompt" in row_format.required:
            return f'write it: data.prompt_template: "{{{column}}}\\n\\n{{prompt}}", or {drop}'
        return drop

    refuse_lost(
        records,
        columns,
        is_lost,
        where=where,
        expected="columns that are written into the prompt, or dropped",
        fix=fix,
        dropped=dropped,
    )
    return columns


def mapping_line(columns: Mapping[str, str]) -> str:
    """Returns the line of a recipe that maps columns."""
    return f"data.columns: {{{', '.join(f'{name}: {target}' for name, target in columns.items())}}}"


def drop_line(form: RowFormat, *columns: str) -> str:
    """Returns the line of a recipe that drops columns in addition to those of `form`."""
    return f"data.drop_columns: [{', '.join([*form.drop_columns, *columns])}]"


def shown_columns(form: RowFormat) -> set[str]:
    """Returns the columns that the prompt template writes."""
    return {*re.findall(r"\{(\w+)", form.prompt_template or "")}


def _text_seen(readable: Mapping[str, Any]) -> str:
    values = (readable.get(name) for name in ("prompt", "messages", "chosen"))
    turns = [turn for value in values for turn in as_turns(value, role="user")]
    return "\n\n".join(str(turn.get("content")) for turn in turns)


def text_columns(records: Records, columns: Sequence[str]) -> list[str]:
    """Returns the columns that have text in the first rows."""
    rows = _first_rows(records) if columns else []
    return [name for name in columns if any(_is_text(row.get(name)) for row in rows)]


def refuse_lost_questions(
    records: Records, others: Sequence[str], where: str, form: RowFormat
) -> None:
    """Raises for pairs without a prompt if another column may be their question."""
    candidates = [name for name in others if not _ABOUT.fullmatch(name)]
    first: Mapping[str, Any] = next((row for row in _first_rows(records) if row.get("chosen")), {})
    turns = turns_of(as_dialogue(first.get("chosen")))
    if not candidates or (turns and turns[0].get("role") != "assistant"):
        return
    mapped = {**form.columns, candidates[0]: "prompt"}
    raise DataError(
        f"{where}: pairs without a prompt, with text that may be their question: "
        f"{', '.join(candidates)}",
        expected="a column prompt, or no text other than chosen and rejected",
        got=f"{candidates[0]}: {str(first.get(candidates[0]))[:80]!r}",
        fix=f"{mapping_line(mapped)}; or, if the answers begin with their question, "
        f"{drop_line(form, *candidates)}",
    )


def _first_rows(records: Records) -> list[Row]:
    chunk = next(iter(chunks_of(records)))
    part = chunk[:_NUM_INSPECTED] if isinstance(chunk, list) else chunk.slice(0, _NUM_INSPECTED)
    return list(rows_of(part))


def _is_text(value: Any) -> bool:
    if isinstance(value, list) and value:
        return isinstance(value[0], Mapping) or _is_text(value[0])
    return isinstance(value, str) and bool(value.strip()) and not _is_number(value)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
