"""Refuses published formats that no stage trains on as their authors intend, with a fix."""

from nemo_rl_core.data.datasets.records import Records
from nemo_rl_core.data.turns import FLAG, FLAGS
from nemo_rl_core.errors import DataError

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
