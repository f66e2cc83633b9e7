"""A user's own function as a reward."""

import importlib
import inspect
import sys
import typing
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from nemo_rl_core.config.names import unknown_names
from nemo_rl_core.environments.interfaces import (
    EnvironmentReturn,
    Message,
    Scorer,
    attempt,
    checked,
    failure,
    raise_first,
)
from nemo_rl_core.errors import ConfigError, RewardError
from nemo_rl_core.types import Rollout

RewardCallable = Callable[[Any, Any], Any]
"""`(prompt, response) -> float`, or `(prompts, responses) -> list of floats`."""

Style = Literal["single", "batch"]


class FunctionalRewardWrapper(Scorer):
    """A function of prompt and response as an environment.

    Whether the function takes two texts or two lists is read off the annotation of its first
    parameter. Without one, the first call tries it with lists of one, then with texts; a function
    with side effects should be annotated.

    Args:
        fn: `(prompt: str, response: str) -> float`, or
            `(prompts: list[str], responses: list[str]) -> list[float]`.
        name: What to call it in messages; the function's own name, where it is left out.

    Raises:
        ConfigError: When `fn` cannot be called with two arguments.

    Example:
        >>> reward = FunctionalRewardWrapper(lambda prompt, response: float(len(response)))
        >>> reward.rewards(["a", "b"], ["four", "five!"])
        [4.0, 5.0]
    """

    def __init__(self, fn: RewardCallable, *, name: str | None = None) -> None:
        self.name = name or str(getattr(fn, "__name__", type(fn).__name__))
        _check_signature(fn, self.name)
        self._fn = fn
        self._style: Style | None = _annotated_style(fn)

    @classmethod
    def from_target(cls, target: str) -> "FunctionalRewardWrapper":
        """Wraps the function that `module:function` names; see `load_function`."""
        return cls(load_function(target), name=target)

    def score(self, rollouts: Sequence[Rollout]) -> list[float | RewardError]:
        """One outcome a rollout."""
        prompts = [rollout.prompt.text for rollout in rollouts]
        return self._outcomes(prompts, [rollout.text for rollout in rollouts])

    def rewards(self, prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
        """One score a pair.

        Raises:
            RewardError: When the function raises, or returns what is not a finite number.
        """
        return raise_first(self._outcomes(prompts, responses))

    def step(
        self, message_log_batch: Sequence[Sequence[Message]], metadata: Sequence[Any]
    ) -> EnvironmentReturn:
        """Scores `B` conversations and ends them.

        The response is the last assistant turn, the prompt the last user turn before it.

        Raises:
            RewardError: As `rewards`; and when a conversation has no answer in it.
        """
        import torch

        pairs = [_last_exchange(log) for log in message_log_batch]
        rewards = self.rewards([prompt for prompt, _ in pairs], [text for _, text in pairs])
        return EnvironmentReturn(
            observations=[],
            metadata=list(metadata) if metadata else [None] * len(pairs),
            next_stop_strings=[None] * len(pairs),
            rewards=torch.tensor(rewards, dtype=torch.float32),
            terminateds=torch.ones(len(pairs), dtype=torch.bool),
            answers=None,
        )

    def global_post_process_and_metrics(
        self, batch: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, float]]:
        """The batch as it was, and the mean of its `rewards [B]`."""
        return batch, {"mean_reward": float(batch["rewards"].float().mean())}

    def _outcomes(
        self, prompts: Sequence[str], responses: Sequence[str]
    ) -> list[float | RewardError]:
        if not prompts:
            return []
        if self._style is None:
            self._style = self._tried_style(prompts[0], responses[0])
        if self._style == "batch":
            return self._batch(prompts, responses)
        return [
            attempt(
                partial(self._fn, prompt, response),
                prompt=prompt,
                completion=response,
                source=self._source,
            )
            for prompt, response in zip(prompts, responses, strict=True)
        ]

    def _batch(self, prompts: Sequence[str], responses: Sequence[str]) -> list[float | RewardError]:
        first = {"prompt": prompts[0], "completion": responses[0], "source": self._source}
        values: list[Any] = []

        def fill() -> float:
            result = self._fn(list(prompts), list(responses))
            values.extend(_as_list(result))
            return 0.0

        problem = attempt(fill, **first)
        if isinstance(problem, RewardError):
            if len(prompts) == 1:
                return [problem]
            # One bad row is to cost no other its score.
            pairs = zip(prompts, responses, strict=True)
            return [
                outcome for pair in pairs for outcome in self._batch(*([each] for each in pair))
            ]
        if len(values) != len(prompts):
            got = f"{len(values)} rewards for {len(prompts)} completions"
            return [failure("returned a wrong number of rewards", got, **first)] * len(prompts)
        return [
            checked(value, prompt=prompt, completion=response, source=self._source)
            for value, prompt, response in zip(values, prompts, responses, strict=True)
        ]

    def _tried_style(self, prompt: str, response: str) -> Style:
        pair = {"prompt": prompt, "completion": response, "source": self._source}
        (batch,) = self._batch([prompt], [response])
        if not isinstance(batch, RewardError):
            return "batch"
        single = attempt(partial(self._fn, prompt, response), **pair)
        if not isinstance(single, RewardError):
            return "single"
        raise RewardError(
            f"{self._source} works neither with two texts nor with two lists: "
            f"it {single.problem.removeprefix(self._source).strip()}",
            expected="(prompt, response) -> float, or two lists -> list of floats",
            got=f"with texts {single.got}; with lists {batch.got}",
            fix="annotate its first parameter with str or list[str], and mend what it raises",
        )

    @property
    def _source(self) -> str:
        return f"the reward function {self.name!r}"


def load_function(target: str) -> RewardCallable:
    """The function that `module:function` names; modules of the current directory count.

    Raises:
        ConfigError: When it cannot be imported or is no function of two arguments.
    """
    module_name, _, name = target.partition(":")
    # At the end, so that a file of the user's cannot stand in for an installed package. It stays,
    # since the module may import its neighbours later.
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(module_name)
    # Named fault boundary: a user's module may raise anything, and exit, while it is imported.
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"the module of the reward function {target!r} cannot be imported",
            expected=f"{module_name.replace('.', '/')}.py in the current directory, or installed",
            got=f"{type(error).__name__}: {str(error)[:160]}",
            fix="correct environment.target, or mend the module",
        ) from error
    fn = getattr(module, name, None)
    if not callable(fn):
        names = [each for each, value in vars(module).items() if inspect.isfunction(value)]
        raise unknown_names(
            f"environment.target: the module {module_name!r} has no function",
            [name],
            names,
            otherwise="name one that it has",
            expected=None if names else "a function of two arguments",
        )
    _check_signature(fn, target)
    checked_fn: RewardCallable = fn
    return checked_fn


def _check_signature(fn: RewardCallable, name: str) -> None:
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # Some built-ins have none; the first call will tell.
        return
    try:
        signature.bind("prompt", "response")
    except TypeError as error:
        raise ConfigError(
            f"the reward function {name!r} cannot be called with a prompt and a response",
            expected="two positional arguments",
            got=f"{name.rpartition(':')[2]}{signature}: {error}",
            fix="give the other arguments defaults",
        ) from error


def _annotated_style(fn: RewardCallable) -> Style | None:
    target = fn if inspect.isroutine(fn) else getattr(fn, "__call__", fn)  # noqa: B004
    try:
        hints = typing.get_type_hints(target)
        first = next(iter(inspect.signature(fn).parameters))
    except (NameError, TypeError, ValueError, AttributeError, StopIteration):
        return None
    hint = hints.get(first)
    if hint is str:
        return "single"
    base = typing.get_origin(hint) or hint
    return "batch" if isinstance(base, type) and issubclass(base, Sequence) else None


def _as_list(result: Any) -> list[Any]:
    if isinstance(result, str | bytes | dict):
        raise TypeError(f"a list of rewards was expected, not {type(result).__name__}")
    return list(result)


def _last_exchange(log: Sequence[Message]) -> tuple[str, str]:
    answers = [place for place, turn in enumerate(log) if turn["role"] == "assistant"]
    if not answers:
        raise RewardError(
            "a conversation has no assistant turn to score",
            got=f"the roles {', '.join(turn['role'] for turn in log) or 'none'}",
        )
    asked = [turn["content"] for turn in log[: answers[-1]] if turn["role"] == "user"]
    return (asked[-1] if asked else ""), log[answers[-1]]["content"]
