"""What a user names in a recipe: modules, functions and environments of their own.

An environment is named as `module:name`, or by a name: that of a class registered with
`register_environment`, or of an entry point in the group `nemo_rl_core.environments` of an
installed package.
"""

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from nemo_rl_core.config.multi_turn import PythonEnvironment
from nemo_rl_core.config.names import unknown_names
from nemo_rl_core.environments.interfaces import EnvironmentInterface, Scorer, innermost_place
from nemo_rl_core.errors import ConfigError
from nemo_rl_core.registry import Registry

ENVIRONMENTS: Registry[Any] = Registry("environment", {}, group="nemo_rl_core.environments")

register_environment = ENVIRONMENTS.register
get_environment = ENVIRONMENTS.get


def import_module(name: str, *, of: str) -> ModuleType:
    """A module of the current directory, or an installed one.

    Args:
        name: Its import name.
        of: What it holds, for the error.

    Raises:
        ConfigError: When it cannot be imported.
    """
    # At the end, so that a file of the user's cannot stand in for an installed package. It stays,
    # since the module may import its neighbours later.
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    # Named fault boundary: a user's module may raise anything, and exit, while it is imported.
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"the module of {of} cannot be imported",
            expected=f"{name.replace('.', '/')}.py in the current directory, or installed",
            got=f"{type(error).__name__}: {str(error)[:160]}{innermost_place(error)}",
            fix="correct environment.target, or mend the module",
        ) from error


def module_of(target: str) -> str:
    """The module that a target lies in, found without importing it; empty for unknown names."""
    reference = target if ":" in target else ENVIRONMENTS.reference(target) or ""
    return reference.partition(":")[0]


def find_environment(config: PythonEnvironment) -> Any:
    """The class, object or function that a config names, checked as far as a look at it allows.

    Raises:
        ConfigError: When there is none, or it is neither an environment nor makes one of the
            config's `arguments`.
    """
    found = _named(config.target)
    if not callable(found) or (_has_step(found) and not inspect.isclass(found)):
        if not _has_step(found):
            raise _no_environment(config.target, found)
        if config.arguments:
            raise ConfigError(
                f"environment.arguments: {config.target!r} is made already",
                expected="no arguments, or the name of a class or function to make it of them",
                got=f"an object of {type(found).__name__}, and {', '.join(config.arguments)}",
                fix="name the class, or leave the arguments out",
            )
        return found
    if inspect.isclass(found) and not _has_step(found):
        raise _no_environment(config.target, found)
    _check_arguments(config, found)
    return found


def make_environment(config: PythonEnvironment) -> EnvironmentInterface | Scorer:
    """The environment that a config names; a class or function is called with its arguments.

    Raises:
        ConfigError: As `find_environment`; when the call raises, or returns no environment.
    """
    found = find_environment(config)
    if not callable(found) or (_has_step(found) and not inspect.isclass(found)):
        made = found
    else:
        made = _made(found, config)
    if not _has_step(made):
        raise _no_environment(f"{config.target}(...)", made)
    environment: EnvironmentInterface | Scorer = made
    return environment


def _named(target: str) -> Any:
    module_name, colon, name = target.partition(":")
    if not colon:
        return ENVIRONMENTS.get(target)
    found: Any = import_module(module_name, of=f"the environment {target!r}")
    for part in name.split("."):
        if not hasattr(found, part):
            names = [each for each, value in vars(found).items() if _may_be_meant(value)]
            raise unknown_names(
                f"environment.target: {module_name!r} has no",
                [part],
                names,
                otherwise="name one that it has",
                expected=None if names else "a class or an object with a method step",
            )
        found = getattr(found, part)
    return found


def _may_be_meant(value: Any) -> bool:
    return _has_step(value) and not isinstance(value, ModuleType)


def _has_step(found: Any) -> bool:
    is_scorer = issubclass(found, Scorer) if inspect.isclass(found) else isinstance(found, Scorer)
    return is_scorer or callable(getattr(found, "step", None))


def _check_arguments(config: PythonEnvironment, found: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):  # a class in C may have none; the call shows it
        return
    try:
        signature.bind(**config.arguments)
    except TypeError as error:
        name = config.target.rpartition(":")[2]
        takes_texts = not inspect.isclass(found) and not config.arguments
        raise ConfigError(
            f"environment.arguments do not fit {config.target!r}",
            expected=f"{name}{signature}",
            got=f"{_shown(config.arguments)}: {error}",
            fix="correct environment.arguments"
            + ("; a reward function is named with kind: function" if takes_texts else ""),
        ) from error


def _shown(arguments: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r:.40}" for name, value in arguments.items()) or "no arguments"


def _made(found: Callable[..., Any], config: PythonEnvironment) -> Any:
    try:
        return found(**config.arguments)
    # Named fault boundary: a user's constructor may raise anything, and exit.
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"the environment {config.target!r} cannot be made",
            got=f"{type(error).__name__}: {str(error)[:160]}{innermost_place(error)}",
            fix="correct environment.arguments, or mend it",
        ) from error


def _no_environment(target: str, found: Any) -> ConfigError:
    what = f"the class {found.__name__}" if inspect.isclass(found) else type(found).__name__
    names = [
        name
        for name in dir(found)
        if not name.startswith("_") and callable(getattr(found, name, None))
    ]
    return ConfigError(
        f"environment.target: {target} is no environment",
        expected="a class or an object with a method step(message_log_batch, metadata), or a "
        "function that returns one",
        got=f"{what} with {', '.join(names[:8]) or 'no methods'}",
        fix="name the environment itself; a reward function is named with kind: function",
    )
