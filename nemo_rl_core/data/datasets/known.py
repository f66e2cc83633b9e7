"""Published formats that are recognized by their columns, with what their rows become.

`known_choices.py` has multiple choice and questions about texts, `known_pairs.py` comparisons, and
`code_sets.py` programming problems. UltraFeedback, Tülu and other sets with the columns of
`row_converters.ROW_FORMATS` need no entry here.
"""

import json
from collections.abc import Sequence
from typing import Any

from nemo_rl_core.config.row_format import FormatName, RowFormat
from nemo_rl_core.data.datasets import code_sets
from nemo_rl_core.data.datasets.content import CONTENT, prompt_with_content
from nemo_rl_core.data.datasets.dialogues import as_dialogue, sharegpt_turn
from nemo_rl_core.data.datasets.known_choices import CHOICES, has_plain_answers
from nemo_rl_core.data.datasets.known_pairs import PAIRS
from nemo_rl_core.data.datasets.published import (
    PublishedFormat,
    Record,
    first_value,
    has_key,
    renamed,
)
from nemo_rl_core.data.turns import turns_of
from nemo_rl_core.errors import DataError


def published_format(
    records: Sequence[Record], present: set[str], form: RowFormat, where: str
) -> FormatName | None:
    """Returns the published format of records, or None if they have none.

    Args:
        form: Row format; its `format`, if set, is the result, and with `columns` the result is
            None.
    """
    if form.format is not None:
        chosen = FORMATS[form.format]
        if not present.issuperset(chosen.required) or not chosen.fits(records):
            raise DataError(
                f"{where} is not in the format {form.format!r}",
                expected=f"{chosen.description}, with the columns {', '.join(chosen.required)}",
                got=", ".join(sorted(present))[:160] or "no columns",
                fix="choose another data.format, or map the columns with data.columns",
            )
        return form.format
    if {"chosen", "rejected"} <= present and "prompt" not in present:
        # Also with data.columns: answers are useless without their question.
        return "question_pairs" if FORMATS["question_pairs"].fits(records) else None
    if form.columns or _is_understood(records, present):
        return None
    fitting = [
        name
        for name, published in FORMATS.items()
        if present.issuperset(published.required) and present.isdisjoint(published.absent)
        if published.fits(records)
    ]
    ways = [f"{name}: {FORMATS[name].description}" for name in fitting]
    # The column `text` of Alpaca repeats the conversation, and that of MBPP is the question.
    if fitting and fitting not in (["alpaca"], ["mbpp"]) and "text" in present:
        ways.append("text: plain text, with data.columns: {text: text}")
    if len(ways) > 1:
        raise DataError(
            f"{where} can be read in {len(ways)} different ways",
            expected="columns of one format",
            got="; ".join(ways),
            fix=f"set data.format: {' or '.join(fitting)}, or map the columns with data.columns",
        )
    return fitting[0] if fitting else None


def _is_understood(records: Sequence[Record], present: set[str]) -> bool:
    """Whether the columns are those of `formats.py`; prompts of verl have no answer."""
    if "rejected_response" in present:
        return False
    if present & {"messages", "chosen"}:
        return "ground_truth" not in present or not _ends_with_user(records)
    others = {"answer"} <= present or {"responses", "scores"} <= present
    has_completion = "completion" in present and "reward_model" not in present
    return "prompt" in present and (others or has_completion)


def _verl(record: Record) -> dict[str, Any]:
    truth = (record.get("reward_model") or {}).get("ground_truth")
    # Some rewards use a list or an object of targets.
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


def _alpaca(record: Record) -> dict[str, Any]:
    instruction, output = record.get("instruction"), record.get("output")
    if not isinstance(instruction, str) or not isinstance(output, str):
        raise ValueError("has an instruction or an output that is not text")
    content = {kind: record.get(kind) for kind in ("input", "history", "system")}
    prompt = prompt_with_content({"prompt": instruction, **content})
    turns = turns_of(prompt) or [{"role": "user", "content": prompt}]
    return {"messages": [*turns, {"role": "assistant", "content": output}]}


def _dolly(record: Record) -> dict[str, Any]:
    context, request = record.get("context"), record.get("input")
    content = {"context": context, "input": request} if request else {"input": context}
    prompt = prompt_with_content({"prompt": record.get("instruction"), **content})
    return {"prompt": prompt, "completion": record.get("response")}


_QUESTIONS = ("question", "instruction", "problem", "query", "conversations", "messages")
"""Columns that are the prompt of pairs; without any of them, one of `_FALLBACK_QUESTIONS`."""
_FALLBACK_QUESTIONS = ("input", "history", "context")


def _question_pair(record: Record) -> dict[str, Any]:
    columns = [name for name in _QUESTIONS if record.get(name)]
    if len(columns) > 1:
        raise ValueError(
            f"has the columns {' and '.join(columns)}, and each may be the prompt: choose one "
            f"with data.columns: {{{columns[0]}: prompt}}"
        )
    columns = columns or [name for name in _FALLBACK_QUESTIONS if record.get(name)]
    pair = {name: as_dialogue(record.get(name)) for name in ("chosen", "rejected")}
    if not columns:  # the turns contain the question, or it is missing and the row is refused
        return pair if turns_of(pair["chosen"]) else {**pair, "prompt": None}
    return {columns[0]: None, **pair, "prompt": as_dialogue(record.get(columns[0]))}


def _is_question_pair(records: Sequence[Record]) -> bool:
    """Whether pairs have their question in another column, or turns with senders."""
    first = next((record for record in records if record.get("chosen")), None)
    if first is None:
        return False
    chosen = as_dialogue(first["chosen"])
    turns = turns_of(chosen)
    if turns and turns[0]["role"] != "assistant":
        return chosen is not first["chosen"] and not isinstance(first["chosen"], str)
    return any(first.get(name) for name in (*_QUESTIONS, *_FALLBACK_QUESTIONS))


def _sharegpt(record: Record) -> dict[str, Any]:
    turns = [sharegpt_turn(turn) for turn in record.get("conversations") or ()]
    if not turns:
        raise ValueError("has no turns in conversations")
    return {"messages": turns}


def _has_hashes(records: Sequence[Record]) -> bool:
    return any("####" in str(record.get("answer")) for record in records)


def _without_hashes(records: Sequence[Record]) -> bool:
    is_other = _has_hashes(records) or _has_solutions(records)
    return has_plain_answers(records) and not is_other


def _has_solutions(records: Sequence[Record]) -> bool:
    """Whether records have solutions but no options, which would make the answers letters."""
    return any(r.get("solution") and not (r.get("choices") or r.get("options")) for r in records)


def _ends_with_user(records: Sequence[Record]) -> bool:
    turns = turns_of(first_value(records, "messages"))
    return turns is not None and turns[-1]["role"] == "user"


_MBPP = (
    *("text", "prompt", "test_imports", "test_setup_code", "challenge_test_list", "test"),
    "source_file",
)

FORMATS: dict[FormatName, PublishedFormat] = {
    "gsm8k": renamed(
        "prompts with answers after ####; the full text is the completion",
        {"prompt": "question", "answer": "answer"},
        answer_pattern="hashes",
        fits=_has_hashes,
        content=CONTENT,
    ),
    "math": renamed(
        "prompts with answers in the solutions' last box; the solution is the completion",
        {"prompt": "problem", "answer": "solution"},
        required=("level", "type"),
        absent=("answer",),
        answer_pattern="boxed",
    ),
    "open_math_instruct": renamed(
        "prompts with expected answers; the generated solution is the completion",
        {"prompt": "problem", "completion": "generated_solution", "answer": "expected_answer"},
    ),
    "verl": PublishedFormat(
        ("prompt", "reward_model"),
        "prompts with the answers of reward_model.ground_truth",
        _verl,
        answers=("reward_model", "completion"),
        uses=("completion",),
        fits=has_key("reward_model", "ground_truth"),
    ),
    "rlvr": renamed(
        "prompts with the answers of ground_truth",
        {"prompt": "messages", "answer": "ground_truth"},
        absent=("answer", "completion"),
        fits=_ends_with_user,
        content=("system",),
    ),
    "problem_answer": renamed(
        "prompts with answers; a solution is the completion",
        {"prompt": "problem", "answer": "answer", "completion": "solution"},
        uses=("solution",),
        content=CONTENT,
    ),
    "aime_2024": renamed(
        "prompts with answers; a solution is the completion",
        {"prompt": "Problem", "answer": "Answer", "completion": "Solution"},
        uses=("Solution",),
    ),
    "question_answer": renamed(
        "prompts with answers",
        {"prompt": "question", "answer": "answer"},
        # Columns of other sets that also have a question and an answer.
        absent=("answer_number", "answerKey"),
        fits=_without_hashes,
        content=CONTENT,
    ),
    "question_solution": renamed(
        "prompts with answers; a solution is the completion",
        {"prompt": "question", "completion": "solution", "answer": "answer"},
        absent=("choices", "options"),
        fits=lambda records: _has_solutions(records) and not _has_hashes(records),
        content=CONTENT,
    ),
    "squad": PublishedFormat(
        ("context", "question", "answers"),
        "prompts of context and question, with the first of their answers",
        _squad,
        answers=("answers",),
        absent=("answer",),
        fits=has_key("answers", "text"),
    ),
    "alpaca": PublishedFormat(
        ("instruction", "output"),
        "conversations of instruction, with input, and output",
        _alpaca,
        answers=("output",),
        uses=("input", "history", "system"),
        absent=("chosen", "conversations"),
    ),
    "sharegpt": PublishedFormat(
        ("conversations",),
        "conversations, with the turns of human and gpt",
        _sharegpt,
        answers=(),
        fits=has_key("conversations", "from", "role"),
        content=("system",),
    ),
    "question_pairs": PublishedFormat(
        ("chosen", "rejected"),
        "preference pairs with their question in another column",
        _question_pair,
        answers=("chosen", "rejected"),
        uses=(*_QUESTIONS, *_FALLBACK_QUESTIONS),
        fits=_is_question_pair,
        content=CONTENT,
    ),
    "dolly": PublishedFormat(
        ("instruction", "response"),
        "prompts of instructions, with context, and their responses",
        _dolly,
        answers=("response",),
        uses=("context", "input"),
        absent=("conversations", "output"),
        content=("system", "history"),
    ),
    "open_orca": renamed(
        "prompts with responses",
        {"prompt": "question", "completion": "response"},
        absent=("answer", "conversations", "instruction"),
        content=CONTENT,
    ),
    "meta_math": renamed(
        "prompts with responses",
        {"prompt": "query", "completion": "response"},
        absent=("rejected_response",),
        content=CONTENT,
    ),
    "prompt_response": renamed(
        "prompts with responses",
        {"prompt": "prompt", "completion": "response"},
        absent=("reward_model", "rejected_response"),
        content=("system", "choices"),
    ),
    **CHOICES,
    **PAIRS,
    "mbpp": PublishedFormat(
        ("code", "test_list"),
        "prompts with unit tests; the code is the completion",
        code_sets.mbpp,
        answers=("code",),
        uses=_MBPP,
    ),
    "human_eval": PublishedFormat(
        ("prompt", "canonical_solution", "test", "entry_point"),
        "prompts that completions continue, with unit tests; the solution is the completion",
        code_sets.human_eval,
        answers=("canonical_solution",),
        absent=("library", "libs"),
    ),
    "apps": PublishedFormat(
        ("question", "input_output"),
        "prompts with inputs and outputs, or calls; the first solution is the completion",
        code_sets.apps,
        answers=("solutions",),
        uses=("solutions", "starter_code"),
    ),
    "code_contests": PublishedFormat(
        ("description", "public_tests", "private_tests"),
        "prompts with inputs and outputs; the first solution in Python 3 is the completion",
        code_sets.code_contests,
        answers=("solutions",),
        uses=("generated_tests", "solutions", "incorrect_solutions", "input_file", "output_file"),
    ),
    "kod_code": PublishedFormat(
        ("question", "solution", "test"),
        "prompts with tests of pytest; the solution is the completion",
        code_sets.kod_code,
        answers=("solution",),
        uses=("test_info",),
    ),
    "prime_code": PublishedFormat(
        ("prompt", "verification_info"),
        "prompts with inputs and outputs, or calls; the gold solution is the completion",
        code_sets.prime_code,
        answers=("gold_standard_solution",),
        uses=("gold_standard_solution", "metadata"),
    ),
    "live_code_bench": PublishedFormat(
        ("question_content", "public_test_cases"),
        "prompts with the public tests, and with private ones that are JSON and not a pickle",
        code_sets.live_code_bench,
        answers=(),
        uses=("private_test_cases", "starter_code", "metadata"),
    ),
    "deep_coder": PublishedFormat(
        ("problem", "tests"),
        "prompts with inputs and outputs, or calls; the first solution is the completion",
        code_sets.deep_coder,
        answers=("solutions",),
        uses=("solutions", "starter_code"),
    ),
    "big_code_bench": PublishedFormat(
        ("complete_prompt", "instruct_prompt", "test", "libs"),
        "programs that need packages",
        code_sets.needs_packages,
        answers=(),
    ),
    "odex": PublishedFormat(
        ("intent", "test_start", "entry_point", "library"),
        "programs that need packages",
        code_sets.needs_packages,
        answers=(),
    ),
}
