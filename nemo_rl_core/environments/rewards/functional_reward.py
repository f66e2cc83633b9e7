"""User-defined functions as rewards."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from nemo_rl_core.environments.interfaces import (
    EnvironmentReturn,
    Message,
    Scorer,
    attempt,
    checked,
    failure,
    raise_first,
    reads_only_rewards,
)
from nemo_rl_core.environments.rewards.awaiting import AsyncCalls, Call, is_async
from nemo_rl_core.environments.rewards.retries import Retries
from nemo_rl_core.environments.rewards.row_fields import Fields, fields_of, given_fields
from nemo_rl_core.environments.rewards.signatures import RewardSignature, Style
from nemo_rl_core.environments.targets import import_module, no_function
from nemo_rl_core.errors import ConfigError, RewardError
from nemo_rl_core.types import Prompt, Rollout, unscored


class FunctionalRewardWrapper(Scorer):
    """Wraps a function of a completion, and of columns of its row, as a scorer and environment.

    Parameters are filled by name: `prompt`, `completion` (or `response`), `answer`, `task`, `id`,
    `metadata`, or a column of the row; a parameter keeps its default if the row has no such column.
    A function with `prompts` and `completions` (or `responses`), or whose first parameter is
    annotated as a list, gets batches. TRL's and verl's signatures are supported (`signatures`). Two
    parameters of other names are prompt and completion. If neither names nor annotations decide
    between texts and lists, the first call tries lists of one, then texts; a function with side
    effects should be annotated.

    A coroutine function is awaited for all completions at once. A result of None means no score.
    A call that fails in the network is retried; see `retries`.

    Args:
        fn: Reward function.
        name: Name of the function in messages; by default the function's `__name__`.

    Attributes:
        name: Name of the function, in messages and metrics.

    Raises:
        ConfigError: If `fn` has no parameter for a completion.

    Example:
        >>> reward = FunctionalRewardWrapper(lambda prompt, response: float(len(response)))
        >>> reward.rewards(["a", "b"], ["four", "five!"])
        [4.0, 5.0]
    """

    def __init__(self, fn: Callable[..., Any], *, name: str | None = None) -> None:
        self.name = name or str(getattr(fn, "__name__", type(fn).__name__))
        self._signature = RewardSignature.of(fn, self.name)
        self._fn = fn
        self._style: Style | None = self._signature.style
        self._awaiting = AsyncCalls() if is_async(fn) else None
        self._retries = Retries()

    @classmethod
    def from_target(cls, target: str) -> "FunctionalRewardWrapper":
        """Wraps the function that `module:function` names; see `load_function`."""
        return cls(load_function(target), name=target)

    def score(self, rollouts: Sequence[Rollout]) -> list[float | RewardError]:
        """Returns one outcome per rollout."""
        return self._outcomes([fields_of(rollout) for rollout in rollouts])

    def missing_columns(self, prompt: Prompt) -> list[str]:
        """Returns the required parameters that the row has no column for."""
        needed = self._signature.needed_columns
        if not needed or (needed == {"answer"} and prompt.answer):
            return []  # without parsing the metadata, since there may be millions of rows
        return self._signature.missing(fields_of(unscored(prompt)))

    def close(self) -> None:
        """Ends the event loop of coroutine functions."""
        if self._awaiting is not None:
            self._awaiting.close()

    def rewards(self, prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
        """Returns one score per pair of prompt and response.

        Raises:
            RewardError: If the function raises, or returns something other than a finite number.
        """
        pairs = zip(prompts, responses, strict=True)
        return raise_first(self._outcomes([given_fields(*pair, {}) for pair in pairs]))

    def step(
        self, message_log_batch: Sequence[Sequence[Message]], metadata: Sequence[Any]
    ) -> EnvironmentReturn:
        """Scores `B` conversations and ends them.

        The response is the last assistant turn, the prompt the last user turn before it; columns
        come from the conversation's metadata. Any row without a score raises RewardError.
        """
        import torch

        metadata_of_rows = list(metadata) if metadata else [None] * len(message_log_batch)
        rows = [
            given_fields(*_last_exchange(log), each if isinstance(each, Mapping) else {})
            for log, each in zip(message_log_batch, metadata_of_rows, strict=True)
        ]
        rewards = raise_first(self._outcomes(rows))
        return EnvironmentReturn(
            observations=[],
            metadata=metadata_of_rows,
            next_stop_strings=[None] * len(rows),
            rewards=torch.tensor(rewards, dtype=torch.float32),
            terminateds=torch.ones(len(rows), dtype=torch.bool),
            answers=None,
        )

    @reads_only_rewards
    def global_post_process_and_metrics(
        self, batch: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, float]]:
        """Returns the unchanged batch and the mean of its `rewards [B]`."""
        return batch, {"mean_reward": float(batch["rewards"].float().mean())}

    def _outcomes(self, rows: Sequence[Fields]) -> list[float | RewardError]:
        if not rows:
            return []
        if self._style is None:
            self._style = self._tried_style(rows[0])
        self._retries.begin()
        return self._batch(rows) if self._style == "batch" else self._singles(rows)

    def _singles(self, rows: Sequence[Fields]) -> list[float | RewardError]:
        calls: list[Call] = [partial(self._call, "single", [fields]) for fields in rows]
        if self._awaiting is not None:
            calls = self._awaiting.results(calls, self._retries)
        else:
            calls = [partial(self._retries.call, call) for call in calls]
        return [
            attempt(partial(self._number, call), **self._about(fields))
            for call, fields in zip(calls, rows, strict=True)
        ]

    def _batch(self, rows: Sequence[Fields]) -> list[float | RewardError]:
        first = self._about(rows[0])
        values: list[Any] = []
        call: Call = partial(self._call, "batch", rows)
        # A batch that fails is scored row by row below.
        retries = self._retries if len(rows) == 1 else None
        if self._awaiting is not None:
            (call,) = self._awaiting.results([call], retries)
        elif retries is not None:
            call = partial(retries.call, call)

        def fill() -> float:
            values.extend(_as_list(call()))
            return 0.0

        problem = attempt(fill, **first)
        if isinstance(problem, RewardError):
            if len(rows) == 1:
                return [problem]
            # A bad row must not cost the other rows their scores.
            return [outcome for fields in rows for outcome in self._batch([fields])]
        if len(values) != len(rows):
            got = f"{len(values)} rewards for {len(rows)} completions"
            return [failure("returned a wrong number of rewards", got, **first)] * len(rows)
        return [
            checked(value, **self._about(fields))
            for value, fields in zip(values, rows, strict=True)
        ]

    def _call(self, style: Style, rows: Sequence[Fields]) -> Any:
        args, kwargs = self._signature.arguments(rows, style)
        return self._fn(*args, **kwargs)

    def _number(self, call: Call) -> Any:
        result = call()
        # verl's functions may return a dict; its other entries are extra metrics.
        is_verl = self._signature.is_verl and isinstance(result, Mapping) and "score" in result
        return result["score"] if is_verl else result

    def _tried_style(self, fields: Fields) -> Style:
        (batch,) = self._batch([fields])
        if not isinstance(batch, RewardError):
            return "batch"
        (single,) = self._singles([fields])
        if not isinstance(single, RewardError):
            return "single"
        raise RewardError(
            f"{self._source} works neither with two texts nor with two lists: "
            f"it {single.problem.removeprefix(self._source).strip()}",
            expected="(prompt, response) -> float, or two lists -> list of floats",
            got=f"with texts {single.got}; with lists {batch.got}",
            fix="annotate its first parameter with str or list[str], and fix the exception",
        )

    def _about(self, fields: Fields) -> dict[str, str]:
        texts = {"prompt": fields["prompt"], "completion": fields["completion"]}
        return {**texts, "source": self._source}

    @property
    def _source(self) -> str:
        return f"the reward function {self.name!r}"


def _last_exchange(log: Sequence[Message]) -> tuple[str, str]:
    answers = [index for index, turn in enumerate(log) if turn["role"] == "assistant"]
    if not answers:
        raise RewardError(
            "a conversation has no assistant turn to score",
            got=f"the roles {', '.join(turn['role'] for turn in log) or 'none'}",
        )
    prompts = [turn["content"] for turn in log[: answers[-1]] if turn["role"] == "user"]
    return (prompts[-1] if prompts else ""), log[answers[-1]]["content"]


def load_function(target: str) -> Callable[..., Any]:
    """Imports `module:function`, also from the current directory, and checks its signature."""
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
        expected = "a function with a parameter completion"
        raise no_function(module, name, of="environment.target", expected=expected)
    RewardSignature.of(fn, target)
    checked_fn: Callable[..., Any] = fn
    return checked_fn


def _as_list(result: Any) -> list[Any]:
    if isinstance(result, str | bytes | dict):
        raise TypeError(f"a list of rewards was expected, not {type(result).__name__}")
    return list(result)
