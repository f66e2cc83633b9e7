"""Custom losses and advantages: arguments of a trainer, or functions that its section names."""

import inspect
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pydantic import BaseModel

from nemo_rl_core.config.annotations import annotated, classes_of
from nemo_rl_core.config.functions import FIELDS, CustomFunction, as_mapping
from nemo_rl_core.config.trainer import TrainerSettings
from nemo_rl_core.environments.targets import import_function
from nemo_rl_core.errors import ConfigError
from nemo_rl_core.functional.custom_advantage import (
    OF_CRITIC,
    OF_SEQUENCES,
    OF_TOKENS,
    AdvantageFunction,
)
from nemo_rl_core.functional.custom_loss import CheckedLoss

_LOSS: Final = "(next_token_logprobs, batch, *, global_valid_seqs, global_valid_tokens)"


@dataclass(frozen=True)
class CustomFunctions:
    """The custom functions of a trainer; None for those that the algorithm defines itself."""

    loss: CheckedLoss | None = None
    advantage: AdvantageFunction | None = None

    @property
    def objects(self) -> dict[str, Any]:
        """The functions by the argument in Python."""
        functions = {"loss_fn": self.loss, "advantage_fn": self.advantage}
        return {name: each.fn for name, each in functions.items() if each is not None}

    @classmethod
    def of(
        cls, algorithm: str, section: Any, arguments: Mapping[str, Any] | None = None
    ) -> "CustomFunctions":
        """Returns the functions of a section, imported unless they are among the arguments.

        Raises:
            ConfigError: If a function cannot be imported, or has other parameters.
        """
        named: dict[str, tuple[Any, str]] = {}
        for argument, field in FIELDS.items():
            config = getattr(section, field, None)
            if isinstance(config, CustomFunction):
                path = f"{algorithm}.{field}.target"
                expected = f"a function with the signature of {argument}"
                fn = (
                    arguments[argument]
                    if arguments and argument in arguments
                    else import_function(config.target, of=path, expected=expected)
                )
                _refuse_without_signature(fn, argument)
                named[field] = fn, config.target
        loss = CheckedLoss(*named["loss"]) if "loss" in named else None
        advantage = AdvantageFunction(*named["advantage"]) if "advantage" in named else None
        if loss is not None:
            _refuse_signature(loss)
        if advantage is not None:
            declared = getattr(section, "algorithm", None)
            has_critic = declared is not None and declared.has_critic
            advantage.refuse_parameters(OF_CRITIC if has_critic else (*OF_SEQUENCES, *OF_TOKENS))
        return cls(loss, advantage)


def with_functions(
    settings: Any, functions: Mapping[str, Any], section_class: Any, *, algorithm: str
) -> TrainerSettings | Mapping[str, Any]:
    """Returns settings whose section names the functions, so that they are in the run's record.

    Raises:
        ConfigError: If the algorithm has no such function, or the section has another one.
    """
    if not functions:
        return settings  # type: ignore[no-any-return]
    values = settings.model_dump() if isinstance(settings, BaseModel) else dict(settings)
    section = as_mapping(dict(settings).get(algorithm) or {})
    for argument, fn in functions.items():
        field = FIELDS[argument]
        if not _takes_function(section_class, field):
            accepted = [name for name in FIELDS if _takes_function(section_class, FIELDS[name])]
            raise ConfigError(
                f"the algorithm {algorithm!r} takes no {argument}",
                expected=" or ".join(accepted) or "no custom function",
                got=_name_of(fn),
                fix="leave it out, or write a trainer: docs/extending.md, An algorithm",
            )
        options = as_mapping(section.get(field) or {})
        if options.get("kind", "function") != "function":
            raise ConfigError(
                f"{argument} replaces {algorithm}.{field}, which is also given",
                got=f"{argument}={_name_of(fn)} and {field}={options}",
                fix="leave one of them out",
            )
        section[field] = {**options, "kind": "function", "target": _name_of(fn)}
    return {**values, algorithm: section}


def _takes_function(section_class: Any, field: str) -> bool:
    described = getattr(section_class, "model_fields", {}).get(field)
    kinds = classes_of(annotated(described)) if described is not None else []
    return any(issubclass(kind, CustomFunction) for kind in kinds)


def is_importable(fn: Any, target: str) -> bool:
    """Whether the section's target, `module:function`, is the function in other processes, too."""
    module, _, name = target.partition(":")
    return module != "__main__" and getattr(sys.modules.get(module), name, None) is fn


def _name_of(fn: Any) -> str:
    """Returns `module:name` of any function or object, with `_` for characters like `<`."""
    kind = fn if hasattr(fn, "__qualname__") else type(fn)
    name = re.sub(r"\W+", "_", kind.__qualname__).strip("_")
    return f"{kind.__module__}:{name}"


def _refuse_without_signature(fn: Any, argument: str) -> None:
    try:
        inspect.signature(fn)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{argument} has no parameters that can be read",
            expected="a Python function, or an object with __call__",
            got=f"{fn!r:.200}",
            fix="call it in a function of your own, or pass the function itself, not its name",
        ) from error


def _refuse_signature(loss: CheckedLoss) -> None:
    try:
        signature = inspect.signature(loss.fn)
        signature.bind(0, {}, global_valid_seqs=0, global_valid_tokens=0)
    except (TypeError, ValueError) as error:
        is_class = inspect.isclass(loss.fn)
        raise ConfigError(
            f"the loss {loss.name} has other parameters than a loss",
            expected=_LOSS,
            got=f"a class: {error}" if is_class else f"{inspect.signature(loss.fn)}: {error}",
            fix="name an object of the class" if is_class else f"define it with {_LOSS}",
        ) from error
