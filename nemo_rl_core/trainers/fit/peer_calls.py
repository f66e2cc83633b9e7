"""Accepts TRL's names for arguments of trainers, if they mean the same here.

`GRPOTrainer(model=..., args=..., reward_funcs=..., train_dataset=...)` is `from_pretrained` and
`fit` in one. For names with a different meaning, the error of an unknown setting tells what to
write (`python_hint` in `peer_arguments.py`).
"""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel

from nemo_rl_core.config.base import FrozenConfig
from nemo_rl_core.config.functions import FIELDS
from nemo_rl_core.errors import ConfigError
from nemo_rl_core.trainers.fit.trl_configs import as_arguments, is_trl_config, translate

Hint = Callable[[str, Any], str | None]
"""Maps a setting of another framework and its value to what to write here."""

FIT_ARGUMENTS: Final = {
    "train_dataset": "dataset",
    "eval_dataset": "validation",
    "reward_funcs": "reward_fn",
}
"""Arguments of TRL's trainers by their names in TRL, with their names in `fit`."""

_OF_FIT: Final = (*FIT_ARGUMENTS, "reward_weights", "callbacks")


def read_arguments(
    settings: Any,
    overrides: Mapping[str, Any],
    *,
    trainer: str,
    section: Any,
    name: str,
) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Translates a trainer's arguments to the names of this project.

    Args:
        settings: The first argument; None if it is left out, as with TRL's `model=`.
        overrides: The other arguments.
        trainer: Name of the trainer, for errors.
        section: Class of the algorithm's section; any other object means that it has no class.
        name: Name of the section.

    Returns:
        The first argument, settings by name, and arguments of `fit`.
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
    fit = {key: values.pop(key) for key in _OF_FIT if key in values}
    if "args" in values:
        replaced = {FIELDS[each] for each in FIELDS if values.get(each) is not None}
        args = values.pop("args")
        values = {**_section_of(args, trainer, section, name, replaced), **values}
    return settings, values, pop_trl_names(fit) | fit


def pop_trl_names(
    arguments: dict[str, Any], named_here: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Removes TRL's names of arguments of `fit`; returns these arguments as named here.

    Refuses an argument that `named_here` has under the name of this project.
    """
    removed: dict[str, Any] = {}
    for trl_name, fit_name in FIT_ARGUMENTS.items():
        if trl_name not in arguments:
            continue
        if named_here is not None and named_here.get(fit_name) is not None:
            raise ConfigError(
                f"{trl_name} means {fit_name}, which is also given",
                got=f"{trl_name} and {fit_name}",
                fix=f"leave {trl_name} out",
            )
        removed[fit_name] = arguments.pop(trl_name)
    return removed


def fit_arguments(
    from_constructor: Mapping[str, Any], from_call: Mapping[str, Any], others: dict[str, Any]
) -> dict[str, Any]:
    """Merges the arguments of `fit` from the constructor and the call; the call wins.

    Args:
        from_constructor: Arguments of `fit` that the constructor was given.
        from_call: Arguments of the call; None or empty for those left out.
        others: Further arguments of the call; TRL's names are removed.
    """
    trl = pop_trl_names(others, from_call)
    explicit = {name: value for name, value in from_call.items() if not _is_left_out(value)}
    merged = {**from_call, **from_constructor, **explicit, **trl}
    if merged["dataset"] is None:
        raise ConfigError(
            "there are no rows to train on",
            expected="dataset: a hub name, a file or folder, a list of dicts, a datasets.Dataset",
            fix="pass them first: trainer.fit(rows), or train(model, rows)",
        )
    return merged


def _is_left_out(value: Any) -> bool:
    return value is None or (isinstance(value, tuple) and not value)


def _section_of(
    args: Any, trainer: str, section: Any, name: str, replaced: Collection[str]
) -> dict[str, dict[str, Any]]:
    if isinstance(args, Mapping):
        return {name: dict(args)}
    if isinstance(section, type) and isinstance(args, section) and isinstance(args, BaseModel):
        # Only explicit values; the model decides the rest.
        dump = args.model_dump()
        return {name: {key: dump[key] for key in args.model_fields_set}}
    raise ConfigError(
        f"args of {trainer} is not a section {name!r} of this project",
        expected=f"{getattr(section, '__name__', 'a mapping')}, or settings by name",
        got=f"{type(args).__module__}.{type(args).__qualname__}",
        fix=_translated(args, trainer, name, replaced),
    )


def _translated(args: Any, trainer: str, name: str, replaced: Collection[str]) -> str:
    if not is_trl_config(args, name):
        return f"give settings by name: {trainer}(model=..., seed=0)"
    translation = translate(args, name)
    settings = {key: each for key, each in translation.settings.items() if key not in replaced}
    call = f"write {trainer}(model=..., {as_arguments(settings)}) without args"
    left_out = ["not carried over:", *translation.notes] if translation.notes else []
    return "\n    ".join([call, *left_out])


def _is_transformers(value: Any) -> bool:
    return type(value).__module__.startswith(("transformers.", "peft."))
