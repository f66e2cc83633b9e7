"""Calls in the words of TRL: what is the same is taken, for the rest the line to write is named.

`GRPOTrainer(model=..., args=..., reward_funcs=..., train_dataset=...)` is `from_pretrained` and
`fit` in one. A word is taken where it means the same thing here; where it does not, or not quite,
the error of an unknown setting says what to write (`python_hint`).
"""

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel

from nemo_rl_core.config.base import FrozenConfig
from nemo_rl_core.config.peer_names import PEER_NAMES, peer_hint
from nemo_rl_core.errors import ConfigError

Hint = Callable[[str, Any], str | None]
"""From a setting of another framework and its value to what to write here."""

FIT_ARGUMENTS: Final = {
    "train_dataset": "dataset",
    "eval_dataset": "validation",
    "reward_funcs": "reward_fn",
}
"""Arguments of TRL's trainers that are arguments of `fit`, with their names there."""

_OF_FIT: Final = (*FIT_ARGUMENTS, "reward_weights", "callbacks")
_ALGORITHMS: Final = frozenset({"grpo", "ppo", "dpo", "sft", "reward_model", "distillation"})
_NOT_IN_LORA: Final = ("lora_dropout", "use_rslora", "use_dora", "modules_to_save")
_OTHER_VALUES: Final = frozenset(
    {"keep_top_k", "num_nodes", "nnodes", "kl_loss_type", "loss_agg_mode", "loss_fn"}
    | {"lr_scheduler_type", "use_vllm", "vllm_mode", "warmup_style"}
)
"""Settings whose values are others here."""
_PLACE: Final = re.compile(r"[a-z]\w*(?:\.[a-z]\w*)+")
_IN_SECTION: Final = re.compile(r"(\w+), in the algorithm's section")
_TRACKERS: Final = {"wandb": {"kind": "wandb"}, "mlflow": {"kind": "mlflow"}} | {
    "tensorboard": {"kind": "tensorboard", "folder": "runs"}
}


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
    hint: Hint,
) -> TrainerArguments:
    """Reads a trainer's arguments.

    Args:
        settings: The first argument; None where it is left out, as with TRL's `model=`.
        overrides: The others.
        trainer: The trainer's name.
        section: The class of the algorithm's section; anything else has none.
        name: Of the section.
        hint: What to write for a setting of another framework, and its value.

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
        values = {**_section_of(values.pop("args"), trainer, section, name, hint), **values}
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


def python_hint(
    name: str, value: Any, *, section: str, names: Collection[str], sections: Collection[str]
) -> str | None:
    """What to write in Python for a setting of another framework; None if it is none.

    The line is written only for what the trainer has, and with the value only where that is a
    number which means the same here.

    Args:
        name: The setting.
        value: Its value.
        section: The algorithm's.
        names: What the trainer takes by name.
        sections: What it takes as a mapping.

    Example:
        >>> has = {"section": "grpo", "names": ["loss", "max_new_tokens"], "sections": []}
        >>> python_hint("max_completion_length", 64, **has)
        'write max_new_tokens=64'
        >>> python_hint("epsilon_high", 0.28, **has)
        "write loss={'clip_high': 0.28}"
        >>> python_hint("num_generations", 8, **has)
        'here it is grpo.num_generations_per_prompt'
    """
    if name in _OWN_LINES:
        return _OWN_LINES[name](value, section, names)
    here = PEER_NAMES.get(name)
    if here is None:
        return None
    inside = _IN_SECTION.match(here)
    text = f"{section}.{inside[1]}" if inside else here
    place = _PLACE.match(text)
    path = _argument(place[0], section, names, sections) if place else None
    if path is None:
        return peer_hint(name)
    is_whole = here == (inside or place)[0]  # type: ignore[index]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_whole and is_number and name not in _OTHER_VALUES:
        return f"write {_written(path, repr(value))}"
    return f"{peer_hint(name)}; in Python {_written(path, '…')}"


def _argument(
    place: str, section: str, names: Collection[str], sections: Collection[str]
) -> list[str] | None:
    """`grpo.loss.clip_low` as the path of an argument; None where the trainer has none."""
    first, *inner = place.split(".")
    if first == section or first not in sections:
        return inner if inner[0] in names and first not in _ALGORITHMS - {section} else None
    return inner if inner[0] in names else [first, *inner]


def _written(path: Sequence[str], value: str) -> str:
    for key in reversed(path[1:]):
        value = f"{{{key!r}: {value}}}"
    return f"{path[0]}={value}"


def _steps(value: Any, section: str, names: Collection[str]) -> str | None:
    found = [name for name in ("num_steps_per_iteration", "num_steps") if name in names]
    return f"write {found[0]}={_shown(value)}" if found else None


def _kl(value: Any, section: str, names: Collection[str]) -> str | None:
    if section == "dpo":
        return f"write loss={{'kind': 'sigmoid', 'beta': {_shown(value)}}}"
    if section != "grpo":
        return peer_hint("beta")
    kl = {"beta": value} if value else None
    return f"write loss={{'kl': {_shown(kl)}}}"


def _peft(value: Any, section: str, names: Collection[str]) -> str:
    # A LoraConfig, or its fields as a mapping.
    read = value.get if isinstance(value, Mapping) else partial(_field, value)
    rank, alpha, modules = (read(each) for each in ("r", "lora_alpha", "target_modules"))
    # What PEFT takes where a mapping says nothing; a LoraConfig says both.
    default = (8, 8) if isinstance(value, Mapping) else (16, 32)
    lora: dict[str, Any] = {"rank": rank or default[0], "alpha": float(alpha or default[1])}
    if modules is not None and not isinstance(modules, str):
        lora["target_modules"] = sorted(modules)
    without = [name for name in _NOT_IN_LORA if read(name)]
    if isinstance(modules, str) and modules != "all-linear":
        without.append("a pattern as target_modules")
    line = f"write training={{'lora': {_shown(lora)}}}"
    return f"{line}; there is no {' or '.join(without)}" if without else line


def _field(value: Any, name: str) -> Any:
    return getattr(value, name, None)


def _lora(value: Any, section: str, names: Collection[str]) -> str:
    lora = {"rank": value} if isinstance(value, int) else value
    return f"write training={{'lora': {_shown(lora)}}}"


def _report_to(value: Any, section: str, names: Collection[str]) -> str:
    asked = [value] if isinstance(value, str) else value if isinstance(value, list) else []
    trackers = [_TRACKERS[each] for each in asked if each in _TRACKERS]
    if not trackers:
        return "leave it out: the store records every run, and trackers are named by tracking"
    return f"write tracking={{'trackers': {_shown(trackers)}}}, of train or fit"


def _output_dir(value: Any, section: str, names: Collection[str]) -> str:
    return (
        "leave it out: the model lies in result.checkpoint, in the store that NEMO_RL_HOME names; "
        f"name={Path(str(value)).name!r}, of train or fit, continues an interrupted run"
    )


def _experts(value: Any, section: str, names: Collection[str]) -> str | None:
    if section in ("ppo", "reward_model"):
        return peer_hint("expert_model_parallel_size")  # the backend has no scalar head
    return f"write training={{'backend': 'megatron', 'expert_parallel_size': {_shown(value)}}}"


def _model(value: Any, section: str, names: Collection[str]) -> str:
    return f"write the model first: {_shown(value)}"


_OWN_LINES: Final[dict[str, Callable[[Any, str, Collection[str]], str | None]]] = {
    "lora": _lora,
    "max_steps": _steps,
    # Of other algorithms here.
    "num_steps": _steps,
    "num_steps_per_iteration": _steps,
    "peft_config": _peft,
    "report_to": _report_to,
    "output_dir": _output_dir,
    "beta": _kl,
    "expert_model_parallel_size": _experts,
    **dict.fromkeys(("model_name", "model_name_or_path", "pretrain"), _model),
}
"""Where the line to write depends on the value or the algorithm."""


def _section_of(
    args: Any, trainer: str, section: Any, name: str, hint: Hint
) -> dict[str, dict[str, Any]]:
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
        fix=_translated(args, hint) or f"give settings by name: {trainer}(model=..., seed=0)",
    )


def _translated(args: Any, hint: Hint) -> str:
    """What to write for each field of TRL's config that differs from its default."""
    if not dataclasses.is_dataclass(args):
        return ""
    lines = []
    for each in dataclasses.fields(args):
        value = getattr(args, each.name)
        said = hint(each.name, value) if _is_changed(each, value) else None
        if said:
            lines.append(f"{each.name}={value!r:.60}: {said}")
    return "\n    ".join(["leave args out, and of its fields", *lines]) if lines else ""


def _is_changed(each: "dataclasses.Field[Any]", value: Any) -> bool:
    if each.default_factory is not dataclasses.MISSING:
        return bool(value != each.default_factory())
    return bool(value != each.default)


def _is_transformers(value: Any) -> bool:
    return type(value).__module__.startswith(("transformers.", "peft."))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else "…"
