"""A user's own function as a reward."""

from collections.abc import Mapping, Sequence
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
    reads_rewards_alone,
)
from nemo_rl_core.environments.rewards.awaiting import AsyncCalls, Call, is_async
from nemo_rl_core.environments.rewards.loading import RewardCallable, as_list, load_function
from nemo_rl_core.environments.rewards.retries import Retries
from nemo_rl_core.environments.rewards.row_fields import Fields, fields_of, given_fields
from nemo_rl_core.environments.rewards.signatures import RewardSignature, Style
from nemo_rl_core.errors import RewardError
from nemo_rl_core.types import Prompt, Rollout, unscored


class FunctionalRewardWrapper(Scorer):
    """A function of a completion, and of whatever it names of the row, as an environment.

    Parameters take what they are named after: `prompt`, `completion` (or `response`), `answer`,
    `task`, `id`, `metadata`, or a column of the row; one with a default keeps it where the row has
    no such column. `prompts` and `completions` (or `responses`) make it a batch function, and so
    does a first parameter that is annotated as a list. TRL's and verl's signatures are recognised
    (`signatures`). Two parameters of other names are prompt and completion. Where neither name nor
    annotation says whether it takes texts or lists, the first call tries lists of one, then texts;
    a function with side effects should be annotated.

    A coroutine function is awaited for all completions at once. What returns None has no score.
    A call that fails in the network is repeated; see `retries`.

    Args:
        fn: The function.
        name: What to call it in messages; the function's own name, where it is left out.

    Attributes:
        name: The same, for metrics.

    Raises:
        ConfigError: When `fn` takes no completion.

    Example:
        >>> reward = FunctionalRewardWrapper(lambda prompt, response: float(len(response)))
        >>> reward.rewards(["a", "b"], ["four", "five!"])
        [4.0, 5.0]
    """

    def __init__(self, fn: RewardCallable, *, name: str | None = None) -> None:
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
        """One outcome a rollout."""
        return self._outcomes([fields_of(rollout) for rollout in rollouts])

    def missing_columns(self, prompt: Prompt) -> list[str]:
        """The required parameters for which the row has nothing."""
        needed = self._signature.needed_columns
        if not needed or (needed == {"answer"} and prompt.answer):
            return []  # without reading the row's metadata, of which there may be millions
        return self._signature.missing(fields_of(unscored(prompt)))

    def close(self) -> None:
        """Ends the loop that coroutines run in."""
        if self._awaiting is not None:
            self._awaiting.close()

    def rewards(self, prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
        """One score a pair.

        Raises:
            RewardError: When the function raises, or returns what is not a finite number.
        """
        pairs = zip(prompts, responses, strict=True)
        return raise_first(self._outcomes([given_fields(*pair, {}) for pair in pairs]))

    def step(
        self, message_log_batch: Sequence[Sequence[Message]], metadata: Sequence[Any]
    ) -> EnvironmentReturn:
        """Scores `B` conversations and ends them.

        The response is the last assistant turn, the prompt the last user turn before it; columns
        are those of the conversation's metadata.

        Raises:
            RewardError: As `rewards`; and when a conversation has no answer in it.
        """
        import torch

        about = list(metadata) if metadata else [None] * len(message_log_batch)
        rows = [
            given_fields(*_last_exchange(log), each if isinstance(each, Mapping) else {})
            for log, each in zip(message_log_batch, about, strict=True)
        ]
        rewards = raise_first(self._outcomes(rows))
        return EnvironmentReturn(
            observations=[],
            metadata=about,
            next_stop_strings=[None] * len(rows),
            rewards=torch.tensor(rewards, dtype=torch.float32),
            terminateds=torch.ones(len(rows), dtype=torch.bool),
            answers=None,
        )

    @reads_rewards_alone
    def global_post_process_and_metrics(
        self, batch: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, float]]:
        """The batch as it was, and the mean of its `rewards [B]`."""
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
            values.extend(as_list(call()))
            return 0.0

        problem = attempt(fill, **first)
        if isinstance(problem, RewardError):
            if len(rows) == 1:
                return [problem]
            # One bad row is to cost no other its score.
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
        # verl's functions may return a dict; its other entries are figures of their own.
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
            fix="annotate its first parameter with str or list[str], and mend what it raises",
        )

    def _about(self, fields: Fields) -> dict[str, str]:
        """What an error says of a row."""
        texts = {"prompt": fields["prompt"], "completion": fields["completion"]}
        return {**texts, "source": self._source}

    @property
    def _source(self) -> str:
        return f"the reward function {self.name!r}"


def _last_exchange(log: Sequence[Message]) -> tuple[str, str]:
    answers = [place for place, turn in enumerate(log) if turn["role"] == "assistant"]
    if not answers:
        raise RewardError(
            "a conversation has no assistant turn to score",
            got=f"the roles {', '.join(turn['role'] for turn in log) or 'none'}",
        )
    asked = [turn["content"] for turn in log[: answers[-1]] if turn["role"] == "user"]
    return (asked[-1] if asked else ""), log[answers[-1]]["content"]
