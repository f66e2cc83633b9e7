"""Calls in the words of TRL: what is the same is taken, for the rest the line to write is named.

`GRPOTrainer(model=..., args=..., reward_funcs=..., train_dataset=...)` is `from_pretrained` and
`fit` in one. A word is taken where it means the same thing here; where it does not, or not quite,
the error of an unknown setting says what to write (`python_hint` in `peer_arguments.py`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel

from nemo_rl_core.config.base import FrozenConfig
from nemo_rl_core.errors import ConfigError
from nemo_rl_core.trainers.trl_configs import as_arguments, is_trl_config, translate

Hint = Callable[[str, Any], str | None]
"""From a setting of another framework and its value to what to write here."""

FIT_ARGUMENTS: Final = {
    "train_dataset": "dataset",
    "eval_dataset": "validation",
    "reward_funcs": "reward_fn",
}
"""Arguments of TRL's trainers that are arguments of `fit`, with their names there."""

_OF_FIT: Final = (*FIT_ARGUMENTS, "reward_weights", "callbacks")


@dataclass(frozen=True)
class TrainerArguments:
    """A trainer's arguments in the words of this project.

    Attributes:
        settings: What the trainer's first argument would be.
        overrides: Settings by name.
        fit: Arguments of `fit`.
    """

    settings: Any
    overrides: dict[str, Any]
    fit: dict[str, Any] = field(default_factory=dict)


def in_our_words(
    settings: Any,
    overrides: Mapping[str, Any],
    *,
    trainer: str,
    section: Any,
    name: str,
) -> TrainerArguments:
    """Reads a trainer's arguments.

    Args:
        settings: The first argument; None where it is left out, as with TRL's `model=`.
        overrides: The others.
        trainer: The trainer's name.
        section: The class of the algorithm's section; anything else has none.
        name: Of the section.

    Raises:
        ConfigError: If there is no model, or `args` is no section.
    """
    values = dict(overrides)
    if settings is None:
        settings = values.pop("model", None)
    if settings is None:
        raise ConfigError(
            f"this {trainer} has no model to train",
            expected=f"{trainer}.from_pretrained(model, ...), "
            f"or {trainer}(model=..., train_dataset=...)",
            fix="name a model: a hub name, a folder, or a config",
        )
    if not isinstance(settings, str | Path | Mapping | FrozenConfig) and _is_transformers(settings):
        raise ConfigError(
            "a model is named here, not loaded",
            expected="a hub name or a folder",
            got=type(settings).__name__,
            fix="model.save_pretrained(FOLDER), tokenizer.save_pretrained(FOLDER), and pass FOLDER",
        )
    given = {each: values.pop(each) for each in _OF_FIT if each in values}
    if "args" in values:
        values = {**_section_of(values.pop("args"), trainer, section, name), **values}
    return TrainerArguments(settings, values, pop_fit_words(given) | given)


def pop_fit_words(given: dict[str, Any], beside: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Takes TRL's words for arguments of `fit` out of a mapping.

    Args:
        given: Arguments by name; those of TRL are removed.
        beside: Arguments of `fit` that were given by their names here.

    Returns:
        The arguments by their names here.

    Raises:
        ConfigError: For one that is given twice.
    """
    found: dict[str, Any] = {}
    for word, here in FIT_ARGUMENTS.items():
        if word not in given:
            continue
        if beside is not None and beside.get(here) is not None:
            raise ConfigError(
                f"{word} is {here}, which is given too",
                got=f"{word} and {here}",
                fix=f"leave {word} out",
            )
        found[here] = given.pop(word)
    return found


def fit_arguments(
    held: Mapping[str, Any], given: Mapping[str, Any], others: dict[str, Any]
) -> dict[str, Any]:
    """What `fit` trains on, from the trainer's arguments and its own; its own count first.

    Args:
        held: Arguments of `fit` that the trainer was made with.
        given: Those of the call; None or empty for what was left out.
        others: Further arguments of the call; TRL's words are removed.

    Raises:
        ConfigError: If there are no rows, or something is given twice.
    """
    words = pop_fit_words(others, given)
    said = {name: value for name, value in given.items() if not _is_left_out(value)}
    found = {**given, **held, **said, **words}
    if found["dataset"] is None:
        raise ConfigError(
            "there are no rows to train on",
            expected="dataset: a hub name, a file or folder, a list of dicts, a datasets.Dataset",
            fix="pass them first: trainer.fit(rows), or train(model, rows)",
        )
    return found


def _is_left_out(value: Any) -> bool:
    return value is None or (isinstance(value, tuple) and not value)


def _section_of(args: Any, trainer: str, section: Any, name: str) -> dict[str, dict[str, Any]]:
    """The algorithm's section, from what TRL calls `args`."""
    if isinstance(args, Mapping):
        return {name: dict(args)}
    if isinstance(section, type) and isinstance(args, section) and isinstance(args, BaseModel):
        # Only what was given: the rest follows from the model.
        dump = args.model_dump()
        return {name: {key: dump[key] for key in args.model_fields_set}}
    raise ConfigError(
        f"args of {trainer} is no section {name!r} of this project",
        expected=f"{getattr(section, '__name__', 'a mapping')}, or settings by name",
        got=f"{type(args).__module__}.{type(args).__qualname__}",
        fix=_translated(args, trainer, name),
    )


def _translated(args: Any, trainer: str, name: str) -> str:
    """The call to write for a config of TRL, and what it leaves out."""
    if not is_trl_config(args, name):
        return f"give settings by name: {trainer}(model=..., seed=0)"
    translation = translate(args, name)
    call = f"write {trainer}(model=..., {as_arguments(translation.settings)}) without args"
    left_out = ["not carried over:", *translation.notes] if translation.notes else []
    return "\n    ".join([call, *left_out])


def _is_transformers(value: Any) -> bool:
    return type(value).__module__.startswith(("transformers.", "peft."))
