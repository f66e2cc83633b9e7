"""Program of the child process of `reasoning_gym.load`, which samples the questions.

Refused: tasks without a reference answer (rubiks_cube, graph_color and the like), tasks whose
entries cannot be stored as JSON (arc_agi and rearc compare tuples), and the tasks of `_LEFT_OUT`.
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

_RUNS_TEXT = "its scorer runs what the model wrote as Python, in the training process"
_LEFT_OUT = {
    "codeio": "it runs programs that sample numbers without a seed",
    "composite": "it is a mixture; name the tasks themselves",
    # Each calls eval, or sympy's parse_expr, which calls eval, on the answer (seen in 0.1.25).
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
"""Refused tasks with the reason."""

_TRIES_PER_ROW = 10
"""Samples per requested question before a task counts as too small."""


def draw(config: ReasoningGymData, *, seed: int) -> tuple[list[Row], list[Row]]:
    """The rows of `reasoning_gym.load`, equal only in processes with the same `PYTHONHASHSEED`.

    The first questions of a task are for validation and the next for training.
    """
    if len(set(config.tasks)) < len(config.tasks):
        raise DataError(
            "data.tasks names a task twice", got=", ".join(config.tasks), fix="once each"
        )
    train, validation = [], []
    # Prompts are unique in a data set, across its tasks.
    taken: set[str] = set()
    num_train = _shares(config.num_train, len(config.tasks))
    num_validation = _shares(config.num_validation, len(config.tasks))
    for task, wanted, held_out in zip(config.tasks, num_train, num_validation, strict=True):
        rows = _rows(config, task, seed=seed, num_rows=wanted + held_out, taken=taken)
        validation.append(rows[:held_out])
        train.append(rows[held_out:])
    return _take_turns(train), _take_turns(validation)


def _shares(total: int, parts: int) -> list[int]:
    return [total // parts + (index < total % parts) for index in range(parts)]


def _take_turns(parts: list[list[Row]]) -> list[Row]:
    return [row for row in chain.from_iterable(zip_longest(*parts)) if row is not None]


def _rows(
    config: ReasoningGymData, task: str, *, seed: int, num_rows: int, taken: set[str]
) -> list[Row]:
    # codeio and list_functions use the global generator too.
    random.seed(seed)
    options = config.task_options.get(task, {})
    dataset = _create(task, options, seed=seed, size=_TRIES_PER_ROW * num_rows)
    found = list(islice(_questions(config, task, dataset, taken), num_rows))
    if len(found) < num_rows:
        raise DataError(
            f"the reasoning-gym task {task!r} has too few different questions",
            expected=f"{num_rows} (its part of num_train and num_validation)",
            got=f"{len(found)} in {_TRIES_PER_ROW * num_rows} samples",
            fix="lower num_train, or widen the task through task_options",
        )
    return found


def _questions(config: ReasoningGymData, task: str, dataset: Any, taken: set[str]) -> Iterator[Row]:
    options = config.task_options.get(task, {})
    for index in range(len(dataset)):
        entry = dataset[index]
        question = entry["question"]
        if question in taken:
            continue
        taken.add(question)
        if entry["answer"] == "":  # Rows need an answer that is not empty.
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
    """The template's text, with the fields of this question in place of their names."""
    told = entry.get("metadata") or {}
    fields = {
        **{name: value for name, value in told.items() if isinstance(value, str | int | float)},
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
    # str.format reads a brace that is not closed, "{}", "{answer.x}" and "{answer:d}" as its own.
    except (ValueError, IndexError, AttributeError, TypeError) as error:
        raise DataError(
            "data.completion is no template",
            expected="text with names of fields in braces, such as '{answer}'",
            got=f"{template!r}: {error}",
            fix="write two braces, {{ and }}, where the text itself has one",
        ) from error


def _metadata(task: str, options: dict[str, Any], entry: dict[str, Any], dataset: Any) -> str:
    """Returns the entry as JSON after checking that the scorer gives the answer full marks."""
    answer = entry["answer"]
    if not isinstance(answer, str) or not answer.strip():
        raise DataError(
            f"the reasoning-gym task {task!r} has no reference answer",
            got=f"answer {answer!r}",
            fix="choose another task",
        )
    try:
        # Values without a JSON type (the fractions of gsm_symbolic) become text; the check of the
        # score below covers scorers that read them.
        stored = {"task": task, "options": options, "entry": entry}
        text = json.dumps(stored, sort_keys=True, default=str)
        score = dataset.score_answer(answer=answer, entry=json.loads(text)["entry"])
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        score = f"{type(error).__name__}: {error}"
    # Some tasks score their own answer a little below 1, as it was written with fewer digits.
    if isinstance(score, str) or score < 0.99:
        raise DataError(
            f"the reasoning-gym task {task!r} cannot be scored after its rows were stored",
            expected="a score of 1 for its own answer",
            got=str(score)[:160],
            fix="choose another task",
        )
    return text


def _create(task: str, options: dict[str, Any], *, seed: int, size: int) -> Any:
    library = load_reasoning_gym()
    if task in _LEFT_OUT:
        raise DataError(
            f"the reasoning-gym task {task!r} cannot be used: {_LEFT_OUT[task]}",
            got=task,
            fix="choose another task",
        )
    if task not in library.factory.DATASETS:
        choices = sorted(set(library.factory.DATASETS) - set(_LEFT_OUT))
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
    # Named fault boundary: each task checks its options in its own way, often by `assert`.
    except Exception as error:
        raise DataError(
            f"the reasoning-gym task {task!r} refuses its options",
            got=f"{options}: {type(error).__name__}: {str(error)[:160]}",
            fix=f"correct data.task_options[{task!r}], or lower num_train",
        ) from error


def _main() -> None:
    # The rows go out on a copy of stdout, which some tasks print to.
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
