"""What an environment offers, and the one check that every reward passes."""

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

_NOT_THE_USERS = (
    *sys.modules[__name__.partition(".")[0]].__path__,  # this library
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
    "<",
)
"""How the names of files begin whose lines say nothing of the user's code."""

_LARGEST = (2 - 2**-23) * 2.0**127
"""The largest number that float32 holds."""

Message = Mapping[str, str]
"""One turn of a conversation: `role` (`user`, `assistant` or `environment`) and `content`."""


class Scorer(ABC):
    """Gives each completion a reward; a subclass implements `score`."""

    @abstractmethod
    def score(self, rollouts: Sequence[Rollout]) -> list[float | RewardError]:
        """One outcome a rollout, in order: a finite reward, or why there is none.

        An error is not a reward of 0: the rollout is counted, and not trained on.
        """

    def missing_columns(self, prompt: Prompt) -> Sequence[str]:
        """Columns without which the row of a prompt cannot be scored, and which it lacks."""
        return ()

    def release_memory(self) -> None:  # noqa: B027 (most hold none)
        """Gives the memory of a GPU back, for others to use until the next completion is scored."""

    def close(self) -> None:  # noqa: B027 (most have nothing to release)
        """Releases what the scorer has started."""


@runtime_checkable
class RolloutScorer(Protocol):
    """A scorer that knows more of a rollout than one number, such as the parts of a sum."""

    def score_rollouts(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """The same rollouts, each with its reward and components, or with an error."""
        ...


@dataclass(frozen=True, slots=True)
class EnvironmentReturn:
    """What an environment says to a batch of `B` conversations.

    Attributes:
        observations: A message to append to each conversation, one a conversation; what is said
            to one that has ended is not read. Empty when all have ended.
        metadata: What the environment wants back at the next step, one a conversation.
        next_stop_strings: Where the next completion must stop, one list (or None) a conversation.
        rewards: `[B]` float.
        terminateds: `[B]` bool.
        answers: The answers found in the completions, or None where none were looked for.
        errors: Why a conversation could not be scored, one (or None) a conversation. It ends, its
            reward is not read, and it is not trained on: an error is not a score of 0.
        truncation_rewards: `[B]` float, or None for zeros: added to the reward of a conversation
            that goes on, if the token limit leaves no room for another turn. An environment with
            penalties for bad turns gives here those of the turns to come; otherwise using up the
            tokens would avoid them.
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
    """An environment that answers to whole conversations."""

    def step(
        self, message_log_batch: Sequence[Sequence[Message]], metadata: Sequence[Any]
    ) -> EnvironmentReturn:
        """Answers to the last turn of each of `B` conversations."""
        ...

    def global_post_process_and_metrics(
        self, batch: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, float]]:
        """Adapts the rewards of a whole rolled-out batch, and sums it up in numbers.

        Training calls it once on all valid rollouts of a draw, before advantages; evaluation does
        not. An environment may leave the method out.

        Args:
            batch: What `rollouts.batch.rollout_batch` returns, above all `rewards [B]`, and as
                lists `tasks`, `prompts`, `completions` and `answers`.

        Returns:
            The batch, in which `rewards` alone may be others, and finite numbers by name. They are
            metrics of the step, as `environment_<name>`.
        """
        ...


@runtime_checkable
class StopsFirstTurn(Protocol):
    """An environment whose first turn must stop somewhere, before it has been asked anything.

    Attributes:
        first_stop_strings: What ends the first completion; later ones stop at `next_stop_strings`.
    """

    first_stop_strings: Sequence[str]


def raise_first(outcomes: Iterable[T | RewardError]) -> list[T]:
    """What was given, when no outcome is a failure.

    Raises:
        RewardError: The first failure.
    """
    good = []
    for outcome in outcomes:
        if isinstance(outcome, RewardError):
            raise outcome
        good.append(outcome)
    return good


def score_rollouts(scorer: Scorer, rollouts: Sequence[Rollout]) -> list[Rollout]:
    """The same rollouts, each with its reward, or with the error for which it has none.

    Where the scorer adds several rewards, `components` has them, unweighted.
    """
    if isinstance(scorer, RolloutScorer):
        return scorer.score_rollouts(rollouts)
    return [
        rollout.failed(outcome.in_one_line)
        if isinstance(outcome, RewardError)
        else rollout.scored(outcome)
        for rollout, outcome in zip(rollouts, scorer.score(rollouts), strict=True)
    ]


def reads_rewards_alone(hook: Hook) -> Hook:
    """Marks a hook that reads no column of its batch but `rewards`: it is given no other.

    A subclass's own hook is not marked by that of its base.
    """
    hook.reads_rewards_alone = True  # type: ignore[attr-defined]
    return hook


def attempt(
    reward: Callable[[], Any], *, prompt: str, completion: str, source: str
) -> float | RewardError:
    """Calls a reward: the named boundary at which whatever it raises becomes an outcome."""
    try:
        value = reward()
    except RewardError as error:
        return error
    # SystemExit is caught too: a reward that calls exit() must not end a run with code 0.
    except (Exception, SystemExit) as error:  # noqa: BLE001 (becomes an outcome)
        notes = "".join(f", {note}" for note in getattr(error, "__notes__", ()))
        got = f"{type(error).__name__}: {shorten(str(error))}{innermost_place(error)}{notes}"
        return failure("raised", got, prompt=prompt, completion=completion, source=source)
    return checked(value, prompt=prompt, completion=completion, source=source)


def checked(value: Any, *, prompt: str, completion: str, source: str) -> float | RewardError:
    """A reward as a finite float (numpy's and torch's scalars count), or why it is none.

    Finite in float32, which batches hold rewards in: a larger one would be infinite there, and so
    the gradient of every rollout of its step not finite.
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
        what = "returned no number"
    got = shorten(repr(value))
    error = failure(what, got, prompt=prompt, completion=completion, source=source)
    return NotApplicableError(*error.args) if value is None else error


def innermost_place(error: BaseException) -> str:
    """Where in the user's code an exception was raised: ` (file.py:3: the line)`, or nothing."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_NOT_THE_USERS)]
    if not own:
        return ""
    place = f"{Path(own[-1].filename).name}:{own[-1].lineno}"
    return f" ({place}: {shorten(own[-1].line, 80)})" if own[-1].line else f" ({place})"


def failure(what: str, got: str, *, prompt: str, completion: str, source: str) -> RewardError:
    """An error that names the prompt and the completion."""
    return RewardError(
        f"{source} {what} for prompt {shorten(repr(prompt))}, "
        f"completion {shorten(repr(completion))}",
        expected="a finite number",
        got=got,
        fix="handle such a completion in the reward: return a low score if that is what it earns",
    )


def no_answer(what: str, rollout: Rollout) -> RewardError:
    """The error of a row without an answer, where completions are compared with it."""
    return RewardError(
        f"{what} compares completions with the row's answer, and the row has none",
        expected="the column answer",
        got=f"the prompt {shorten(repr(rollout.prompt.text))} without an answer",
        fix="add the column answer to the data, or choose a reward that needs none",
    )


def shorten(text: str, limit: int = 100) -> str:
    """One line of at most `limit` characters, from the start and, above all, the end."""
    line = " ".join(text[: 4 * limit].split()) if len(text) <= 4 * limit else text
    if len(line) <= limit:
        return line
    head, tail = limit // 3, limit - limit // 3 - 5
    return " ".join(f"{line[:head]} ... {line[-tail:]}".split())
