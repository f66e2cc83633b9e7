"""A reward function found by its name, and what it returns as a list."""

import inspect
from collections.abc import Callable
from typing import Any

from nemo_rl_core.config.names import unknown_names
from nemo_rl_core.environments.rewards.signatures import RewardSignature
from nemo_rl_core.environments.targets import import_module
from nemo_rl_core.errors import ConfigError

RewardCallable = Callable[..., Any]
"""Returns a number, or of lists as many numbers; see `signatures` for what it may take."""


def load_function(target: str) -> RewardCallable:
    """The function that `module:function` names; modules of the current directory count.

    Raises:
        ConfigError: When it cannot be imported or takes no completion.
    """
    module_name, _, name = target.partition(":")
    module = import_module(module_name, of=f"the reward function {target!r}")
    fn = getattr(module, name, None)
    if hasattr(fn, "step") and (inspect.isclass(fn) or not callable(fn)):
        raise ConfigError(
            f"environment.target: {target!r} is an environment, not a reward function",
            expected="a function, with kind: function",
            got=f"{'the class' if inspect.isclass(fn) else 'an object'} {name} with a method step",
            fix=f'name it as {{kind: python, target: "{target}"}}',
        )
    if not callable(fn):
        names = [each for each, value in vars(module).items() if inspect.isfunction(value)]
        raise unknown_names(
            f"environment.target: the module {module_name!r} has no function",
            [name],
            names,
            otherwise="name one that it has",
            expected=None if names else "a function with a parameter completion",
        )
    RewardSignature.of(fn, target)
    checked_fn: RewardCallable = fn
    return checked_fn


def as_list(result: Any) -> list[Any]:
    """The result of a reward function for lists, as a list.

    Raises:
        TypeError: For one text or one mapping.
    """
    if isinstance(result, str | bytes | dict):
        raise TypeError(f"a list of rewards was expected, not {type(result).__name__}")
    return list(result)
