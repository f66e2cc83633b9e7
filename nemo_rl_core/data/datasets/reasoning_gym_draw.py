"""Program of the child process of `reasoning_gym.load`, which samples the questions.

It refuses tasks without a reference answer (rubiks_cube, graph_color and others), tasks whose
entries cannot be stored as JSON (arc_agi and rearc compare tuples), and the tasks of `_REFUSED`.
"""

import json
import os
import random
import sys
from collections.abc import Iterator
from itertools import chain, islice, zip_longest
from typing import Any

from nemo_rl_core.config.generated_data import ReasoningGymData
from nemo_rl_core.config.names import unknown_names
from nemo_rl_core.errors import DataError
from nemo_rl_core.games.reasoning_gym_library import load_reasoning_gym
from nemo_rl_core.types import Row

_RUNS_TEXT = "its scorer runs the model's text as Python, in the training process"
_REFUSED = {
    "codeio": "it runs programs that sample numbers without a seed",
    "composite": "it is a mixture of tasks; name these instead",
    # Each calls eval, or sympy's parse_expr, which calls eval, on the answer (in version 0.1.25).
    **dict.fromkeys(
        (
            "binary_matrix",
            "countdown",
            "intermediate_integration",
            "n_queens",
            "polynomial_multiplication",
            "puzzle24",
            "simple_integration",
            "spiral_matrix",
            "string_insertion",
        ),
        _RUNS_TEXT,
    ),
}
"""Refused tasks with their reasons."""

_TRIES_PER_ROW = 10
"""Samples per requested question before a task counts as too small."""


def draw(config: ReasoningGymData, *, seed: int) -> tuple[list[Row], list[Row]]:
    """Samples the rows of `reasoning_gym.load`, reproducibly for a fixed `PYTHONHASHSEED`.

    The first questions of a task are for validation and the next for training.
    """
    if len(set(config.tasks)) < len(config.tasks):
        raise DataError(
            "data.tasks names a task twice", got=", ".join(config.tasks), fix="name each task once"
        )
    train, validation = [], []
    # Prompts are unique in a data set, across its tasks.
    seen: set[str] = set()
    num_train = _shares(config.num_train, len(config.tasks))
    num_validation = _shares(config.num_validation, len(config.tasks))
    for task, count, num_first in zip(config.tasks, num_train, num_validation, strict=True):
        rows = _rows(config, task, seed=seed, num_rows=count + num_first, seen=seen)
        validation.append(rows[:num_first])
        train.append(rows[num_first:])
    return _interleave(train), _interleave(validation)


def _shares(total: int, parts: int) -> list[int]:
    return [total // parts + (index < total % parts) for index in range(parts)]


def _interleave(parts: list[list[Row]]) -> list[Row]:
    return [row for row in chain.from_iterable(zip_longest(*parts)) if row is not None]


def _rows(
    config: ReasoningGymData, task: str, *, seed: int, num_rows: int, seen: set[str]
) -> list[Row]:
    # codeio and list_functions also use the global generator.
    random.seed(seed)
    options = config.task_options.get(task, {})
    dataset = _create(task, options, seed=seed, size=_TRIES_PER_ROW * num_rows)
    rows = list(islice(_questions(config, task, dataset, seen), num_rows))
    if len(rows) < num_rows:
        raise DataError(
            f"the reasoning-gym task {task!r} has too few different questions",
            expected=f"{num_rows} (its share of num_train and num_validation)",
            got=f"{len(rows)} in {_TRIES_PER_ROW * num_rows} samples",
            fix="lower num_train, or widen the task through task_options",
        )
    return rows


def _questions(config: ReasoningGymData, task: str, dataset: Any, seen: set[str]) -> Iterator[Row]:
    options = config.task_options.get(task, {})
    for index in range(len(dataset)):
        entry = dataset[index]
        question = entry["question"]
        if question in seen:
            continue
        seen.add(question)
        if entry["answer"] == "":  # rows need a non-empty answer
            continue
        metadata = _metadata(task, options, entry, dataset)
        yield {
            "id": f"{task}-{index}",
            "prompt": f"{question}\n{config.instruction}" if config.instruction else question,
            "answer": entry["answer"],
            "completion": _completion(config.completion, task, entry),
            "task": task,
            "metadata": metadata,
        }


def _completion(template: str, task: str, entry: dict[str, Any]) -> str:
    metadata = entry.get("metadata") or {}
    fields = {
        **{name: value for name, value in metadata.items() if isinstance(value, str | int | float)},
        "question": entry["question"],
        "answer": entry["answer"],
    }
    try:
        return template.format_map(fields)
    except KeyError as error:
        raise unknown_names(
            f"data.completion: a question of {task} has no field",
            [str(error.args[0])],
            sorted(fields),
            otherwise="choose one from its fields",
            expected="a field of the question, in braces",
            error=DataError,
        ) from error
    # str.format interprets an unclosed brace, "{}", "{answer.x}" and "{answer:d}".
    except (ValueError, IndexError, AttributeError, TypeError) as error:
        raise DataError(
            "data.completion is not a valid template",
            expected="text with field names in braces, such as '{answer}'",
            got=f"{template!r}: {error}",
            fix="write two braces, {{ and }}, for one brace in the text",
        ) from error


def _metadata(task: str, options: dict[str, Any], entry: dict[str, Any], dataset: Any) -> str:
    """Returns the entry as JSON, after checking that the answer scores about 1."""
    answer = entry["answer"]
    if not isinstance(answer, str) or not answer.strip():
        raise DataError(
            f"the reasoning-gym task {task!r} has no reference answer",
            got=f"answer {answer!r}",
            fix="choose another task",
        )
    try:
        # Values without a JSON type (the fractions of gsm_symbolic) become text; the score below
        # detects scorers that read them.
        stored = {"task": task, "options": options, "entry": entry}
        text = json.dumps(stored, sort_keys=True, default=str)
        score = dataset.score_answer(answer=answer, entry=json.loads(text)["entry"])
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        score = f"{type(error).__name__}: {error}"
    # Some reference answers score slightly below 1, since they are rounded.
    if isinstance(score, str) or score < 0.99:
        raise DataError(
            f"the reasoning-gym task {task!r} cannot score its rows after they were stored",
            expected="a score of 1 for the reference answer",
            got=str(score)[:160],
            fix="choose another task",
        )
    return text


def _create(task: str, options: dict[str, Any], *, seed: int, size: int) -> Any:
    library = load_reasoning_gym()
    if task in _REFUSED:
        raise DataError(
            f"the reasoning-gym task {task!r} cannot be used: {_REFUSED[task]}",
            got=task,
            fix="choose another task",
        )
    if task not in library.factory.DATASETS:
        choices = sorted(set(library.factory.DATASETS) - set(_REFUSED))
        raise unknown_names(
            "data.tasks: reasoning-gym has no task",
            [task],
            choices,
            otherwise="choose one from it",
            expected="a name in its gallery",
            error=DataError,
        )
    try:
        return library.create_dataset(task, **{**options, "seed": seed, "size": size})
    # Fault boundary: tasks check their options in different ways, often by `assert`.
    except Exception as error:
        raise DataError(
            f"the reasoning-gym task {task!r} refuses its options",
            got=f"{options}: {type(error).__name__}: {str(error)[:160]}",
            fix=f"correct data.task_options[{task!r}], or lower num_train",
        ) from error


def _main() -> None:
    # The rows are written to a copy of stdout, since some tasks print to stdout.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answer:
        os.dup2(2, 1)
        request = json.load(sys.stdin)
        config = ReasoningGymData.model_validate(request["config"])
        try:
            result = {"rows": draw(config, seed=request["seed"])}
        except DataError as error:
            result = {"error": error.args}
        json.dump(result, answer)


if __name__ == "__main__":
    _main()
