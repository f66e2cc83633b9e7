"""Imports user-defined modules, functions and environments that a recipe names.

An environment is named as `module:name`, by the name of a class registered with
`register_environment`, or by an entry point in the group `nemo_rl_core.environments`.
"""

import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from nemo_rl_core.config.multi_turn import PythonEnvironment
from nemo_rl_core.config.names import unknown_names
from nemo_rl_core.environments.interfaces import EnvironmentInterface, Scorer, user_location
from nemo_rl_core.errors import ConfigError, NemoRLError
from nemo_rl_core.registry import Registry

ENVIRONMENTS: Registry[Any] = Registry("environment", {}, group="nemo_rl_core.environments")

register_environment = ENVIRONMENTS.register
get_environment = ENVIRONMENTS.get


def import_module(name: str, *, of: str) -> ModuleType:
    """Imports a module of the current directory, or an installed one, for the object `of`."""
    # Last in the path, so that a local file cannot shadow an installed package. It stays there,
    # since the module may import its neighbors later.
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    # Broad on purpose: a user-defined module may raise anything, or exit, during its import.
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"the module of {of} cannot be imported",
            expected=f"{name.replace('.', '/')}.py in the current directory, or installed",
            got=f"{type(error).__name__}: {str(error)[:160]}{user_location(error)}",
            fix="correct the target, or fix the module",
        ) from error


def import_function(target: str, *, of: str, expected: str) -> Callable[..., Any]:
    """Imports the function `module:function`.

    Args:
        target: The function.
        of: Path of the target in a recipe, for messages.
        expected: Description of the function.
    """
    module_name, _, name = target.partition(":")
    module = import_module(module_name, of=f"{of} {target!r}")
    fn: Callable[..., Any] | None = getattr(module, name, None)
    if not callable(fn):
        raise no_function(module, name, of=of, expected=expected)
    return fn


def no_function(module: ModuleType, name: str, *, of: str, expected: str) -> NemoRLError:
    """Returns the error for a module without a function; see `import_function`."""
    names = [each for each, value in vars(module).items() if inspect.isfunction(value)]
    return unknown_names(
        f"{of}: the module {module.__name__!r} has no function",
        [name],
        names,
        otherwise="name an existing function",
        expected=None if names else expected,
    )


def module_of(target: str) -> str:
    """Returns the module name of a target without importing it; empty for unknown names."""
    reference = target if ":" in target else ENVIRONMENTS.reference(target) or ""
    return reference.partition(":")[0]


def find_environment(config: PythonEnvironment) -> Any:
    """Imports the class, object or function that a config names, and checks it.

    It is not called.
    """
    target = _load(config.target)
    if _is_object(target):
        if not _has_step(target):
            raise _no_environment(config.target, target)
        if config.arguments:
            raise ConfigError(
                f"environment.arguments: {config.target!r} is already an object",
                expected="no arguments, or a class or function to call with them",
                got=f"an object of {type(target).__name__}, and {', '.join(config.arguments)}",
                fix="name the class, or leave the arguments out",
            )
        return target
    if inspect.isclass(target) and not _has_step(target):
        raise _no_environment(config.target, target)
    _check_arguments(config, target)
    return target


def make_environment(config: PythonEnvironment) -> EnvironmentInterface | Scorer:
    """Makes the environment that a config names; calls a class or function with its arguments."""
    made = find_environment(config)
    if not _is_object(made):
        try:
            made = made(**config.arguments)
        # Broad on purpose: a user-defined constructor may raise anything, or exit.
        except (Exception, SystemExit) as error:
            raise ConfigError(
                f"the environment {config.target!r} cannot be made",
                got=f"{type(error).__name__}: {str(error)[:160]}{user_location(error)}",
                fix="correct environment.arguments, or fix the environment",
            ) from error
    if not _has_step(made):
        raise _no_environment(f"{config.target}(...)", made)
    environment: EnvironmentInterface | Scorer = made
    return environment


def _load(target: str) -> Any:
    module_name, colon, name = target.partition(":")
    if not colon:
        return ENVIRONMENTS.get(target)
    value: Any = import_module(module_name, of=f"the environment {target!r}")
    for part in name.split("."):
        if not hasattr(value, part):
            members = vars(value).items()
            names = [k for k, v in members if _has_step(v) and not isinstance(v, ModuleType)]
            raise unknown_names(
                f"environment.target: {module_name!r} has no",
                [part],
                names,
                otherwise="name an existing environment",
                expected=None if names else "a class or an object with a method step",
            )
        value = getattr(value, part)
    return value


def _has_step(value: Any) -> bool:
    is_scorer = issubclass(value, Scorer) if inspect.isclass(value) else isinstance(value, Scorer)
    return is_scorer or callable(getattr(value, "step", None))


def _is_object(target: Any) -> bool:
    return not callable(target) or (_has_step(target) and not inspect.isclass(target))


def _check_arguments(config: PythonEnvironment, target: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):  # a class in C may have no signature
        return
    try:
        signature.bind(**config.arguments)
    except TypeError as error:
        name = config.target.rpartition(":")[2]
        arguments = ", ".join(f"{key}={value!r:.40}" for key, value in config.arguments.items())
        takes_texts = not inspect.isclass(target) and not config.arguments
        raise ConfigError(
            f"environment.arguments do not fit {config.target!r}",
            expected=f"{name}{signature}",
            got=f"{arguments or 'no arguments'}: {error}",
            fix="correct environment.arguments"
            + ("; use kind: function for a reward function" if takes_texts else ""),
        ) from error


def _no_environment(target: str, value: Any) -> ConfigError:
    what = f"the class {value.__name__}" if inspect.isclass(value) else type(value).__name__
    names = [
        name
        for name in dir(value)
        if not name.startswith("_") and callable(getattr(value, name, None))
    ]
    return ConfigError(
        f"environment.target: {target} is not an environment",
        expected="a class or an object with a method step(message_log_batch, metadata), or a "
        "function that returns one",
        got=f"{what} with {', '.join(names[:8]) or 'no methods'}",
        fix="name the environment itself; use kind: function for a reward function",
    )
