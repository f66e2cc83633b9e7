"""Interfaces of scorers and environments, and the check that every reward passes."""

import math
import numbers
import sys
import sysconfig
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from nemo_rl_core.errors import NotApplicableError, RewardError
from nemo_rl_core.types import Prompt, Rollout

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
Hook = TypeVar("Hook", bound=Callable[..., Any])

_LIBRARY_PATHS = (
    *sys.modules[__name__.partition(".")[0]].__path__,  # this library
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
    "<",  # such as <frozen runpy>
)
"""Path prefixes of files that are not user code."""

_LARGEST = (2 - 2**-23) * 2.0**127
"""The largest finite float32."""

Message = Mapping[str, Any]
"""One turn of a conversation: `role`, `content` and, if present, `tool_calls` and so on."""


class Scorer(ABC):
    """Gives each completion a reward; a subclass implements `score`."""

    @abstractmethod
    def score(self, rollouts: Sequence[Rollout]) -> list[float | RewardError]:
        """Returns one outcome per rollout, in order: a finite reward, or an error.

        An error is not a reward of 0: the rollout is counted, but not trained on.
        """

    def missing_columns(self, prompt: Prompt) -> Sequence[str]:
        """Returns the columns that scoring needs and that the row of a prompt lacks."""
        return ()

    def release_memory(self) -> None:  # noqa: B027 (most use none)
        """Frees GPU memory until the next completion is scored."""

    def close(self) -> None:  # noqa: B027 (most have nothing to release)
        """Ends the processes and threads that the scorer has started."""


@runtime_checkable
class RolloutScorer(Protocol):
    """A scorer that returns more than one number per rollout, such as the parts of a sum."""

    def score_rollouts(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Returns the rollouts, each with its reward and components, or with an error."""
        ...


@dataclass(frozen=True, slots=True)
class EnvironmentReturn:
    """Result of one step of an environment on a batch of `B` conversations.

    Attributes:
        observations: Messages to append, one per conversation; that of a conversation that has
            ended is ignored. Empty if all have ended.
        metadata: State that the environment gets back at the next step, one per conversation.
        next_stop_strings: Stop strings of the next completion, one list (or None) per conversation.
        rewards: `[B]` float.
        terminateds: `[B]` bool.
        answers: Answers extracted from the completions, or None.
        errors: Reasons why a conversation could not be scored, one (or None) per conversation. Such
            a conversation ends, its reward is ignored, and it is not trained on: an error is not a
            score of 0.
        truncation_rewards: `[B]` float, or None for zeros. Added to the reward of an unfinished
            conversation if the token limit leaves no room for another turn. An environment that
            penalizes bad turns returns the penalties of the remaining turns here; otherwise the
            policy could avoid them by using up its tokens.
    """

    observations: list[dict[str, str]]
    metadata: list[Any]
    next_stop_strings: list[list[str] | None]
    rewards: "torch.Tensor"
    terminateds: "torch.Tensor"
    answers: list[str | None] | None = None
    errors: list[str | None] | None = None
    truncation_rewards: "torch.Tensor | None" = None


class EnvironmentInterface(Protocol):
    """An environment that answers conversations."""

    def step(
        self, message_log_batch: Sequence[Sequence[Message]], metadata: Sequence[Any]
    ) -> EnvironmentReturn:
        """Answers the last turn of each of `B` conversations."""
        ...

    def global_post_process_and_metrics(
        self, batch: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, float]]:
        """Adapts the rewards of a full batch of rollouts, and computes metrics.

        Training calls it once on all valid rollouts of a draw, before advantages; evaluation does
        not. The method is optional.

        Args:
            batch: Result of `rollouts.batch.rollout_batch`: `rewards [B]` and other tensors, and
                the lists `tasks`, `prompts`, `completions` and `answers`.

        Returns:
            The batch, in which only `rewards` may change, and finite numbers by name, which become
            the metrics `environment_<name>` of the step.
        """
        ...


@runtime_checkable
class StopsFirstTurn(Protocol):
    """An environment with stop strings for the first turn, which is sampled before any step.

    Attributes:
        first_stop_strings: Stop strings of the first completion; later ones stop at
            `next_stop_strings`.
    """

    first_stop_strings: Sequence[str]


def raise_first(outcomes: Iterable[T | RewardError]) -> list[T]:
    """Returns the outcomes if none of them is a failure.

    Raises:
        RewardError: The first failure.
    """
    successes = []
    for outcome in outcomes:
        if isinstance(outcome, RewardError):
            raise outcome
        successes.append(outcome)
    return successes


def score_rollouts(scorer: Scorer, rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Returns the rollouts, each with its reward or its error.

    If the scorer adds several rewards, `components` contains them, unweighted.
    """
    if isinstance(scorer, RolloutScorer):
        return scorer.score_rollouts(rollouts)
    return [
        rollout.failed(outcome.in_one_line)
        if isinstance(outcome, RewardError)
        else rollout.scored(outcome)
        for rollout, outcome in zip(rollouts, scorer.score(rollouts), strict=True)
    ]


def reads_only_rewards(hook: Hook) -> Hook:
    """Marks a hook that reads only the column `rewards` of its batch, and gets no other.

    A subclass that overrides the hook must mark it again.
    """
    hook.reads_only_rewards = True  # type: ignore[attr-defined]
    return hook


def attempt(
    reward: Callable[[], Any], *, prompt: str, completion: str, source: str
) -> float | RewardError:
    """Calls a reward. Any exception becomes an outcome."""
    try:
        value = reward()
    # SystemExit too, since a reward that calls exit() must not end a run with code 0.
    except (Exception, SystemExit) as error:  # noqa: BLE001 (becomes an outcome)
        return raised(error, prompt=prompt, completion=completion, source=source)
    return checked(value, prompt=prompt, completion=completion, source=source)


def raised(error: BaseException, *, prompt: str, completion: str, source: str) -> RewardError:
    """Returns the outcome of a reward that has raised an exception."""
    if isinstance(error, RewardError):
        return error
    notes = "".join(f", {note}" for note in getattr(error, "__notes__", ()))
    got = f"{type(error).__name__}: {shorten(str(error))}{user_location(error)}{notes}"
    return failure("raised", got, prompt=prompt, completion=completion, source=source)


def checked(value: Any, *, prompt: str, completion: str, source: str) -> float | RewardError:
    """Returns a reward as a finite float, or an error. Scalars of numpy and torch are numbers too.

    The reward must be finite in float32, the type of rewards in batches. A larger one would be
    infinite there, and make the gradients of its step infinite or NaN.
    """
    if not isinstance(value, numbers.Real) and getattr(value, "shape", None) == ():
        value = value.item()
    if isinstance(value, numbers.Real):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if abs(number) <= _LARGEST:
            return number
        is_finite = math.isfinite(number)
        what = f"returned a number that is not finite{' in float32' if is_finite else ''}"
    else:
        what = "returned something that is not a number"
    got = shorten(repr(value))
    error = failure(what, got, prompt=prompt, completion=completion, source=source)
    return NotApplicableError(*error.args) if value is None else error


def user_location(error: BaseException) -> str:
    """Returns the innermost line of user code in a traceback: ` (file.py:3: the line)`, or ""."""
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [frame for frame in frames if not frame.filename.startswith(_LIBRARY_PATHS)]
    if not user_frames:
        return ""
    last = user_frames[-1]
    location = f"{Path(last.filename).name}:{last.lineno}"
    return f" ({location}: {shorten(last.line, 80)})" if last.line else f" ({location})"


def error_context(rollout: Rollout, source: str) -> dict[str, str]:
    """Returns the arguments of `attempt`, `checked` and `failure` that name a completion."""
    return {"prompt": rollout.prompt.text, "completion": rollout.text, "source": source}


def failure(what: str, got: str, *, prompt: str, completion: str, source: str) -> RewardError:
    """Returns an error that names the prompt and the completion."""
    return RewardError(
        f"{source} {what} for prompt {shorten(repr(prompt))}, "
        f"completion {shorten(repr(completion))}",
        expected="a finite number",
        got=got,
        fix="handle such completions in the reward, for instance with a low score",
    )


def no_answer(what: str, rollout: Rollout) -> RewardError:
    """Returns the error for a row without an answer in an environment that needs one."""
    return RewardError(
        f"{what} compares completions with the row's answer, and the row has none",
        expected="the column answer",
        got=f"the prompt {shorten(repr(rollout.prompt.text))} without an answer",
        fix="add the column answer to the data, or choose a reward that needs none",
    )


def shorten(text: str, limit: int = 100) -> str:
    """Returns one line of at most `limit` characters: a third from the start, the rest the end."""
    line = " ".join(text[: 4 * limit].split()) if len(text) <= 4 * limit else text
    if len(line) <= limit:
        return line
    head, tail = limit // 3, limit - limit // 3 - 5
    return " ".join(f"{line[:head]} ... {line[-tail:]}".split())
