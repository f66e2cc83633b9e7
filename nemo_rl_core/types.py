"""The records that flow between layers; imports no torch."""

from dataclasses import dataclass, field, replace
from typing import Any

Row = dict[str, Any]
"""One row of a data set: `id`, `prompt`, `answer`, `completion`, `task`, `metadata` (JSON)."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A row of a data set, ready to be sampled from.

    Example:
        >>> Prompt(id="7", text="12+34=", token_ids=(1, 2), answer="46", task="arithmetic").answer
        '46'
    """

    id: str
    text: str
    token_ids: tuple[int, ...]
    answer: str
    task: str
    metadata: str = "{}"


@dataclass(frozen=True, slots=True)
class Completion:
    """What an engine made of a prompt: token ids with the engine's own logprobs.

    `token_ids` end with the stop token where the engine stopped by itself; `truncated` says that it
    ran into `max_new_tokens` instead. `logprobs[i]` is that of `token_ids[i]`, in nats, under the
    sampling temperature.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    truncated: bool


@dataclass(frozen=True, slots=True)
class Rollout:
    """A completion of a prompt with its score.

    Attributes:
        prompt: What was asked.
        completion: What the engine answered.
        text: The completion decoded, special tokens left out.
        reward: The environment's score; None until scored, or when scoring failed.
        advantage: The reward against its group's; None until computed.
        components: The rewards that `reward` is made of, where an environment gives several.
    """

    prompt: Prompt
    completion: Completion
    text: str
    reward: float | None = None
    advantage: float | None = None
    components: tuple[float, ...] = ()

    def scored(self, reward: float | None) -> "Rollout":
        """The same rollout with a reward."""
        return replace(self, reward=reward)


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a trainer says after each step.

    Attributes:
        stage: The stage that runs, such as `train_sft`.
        step: 1-based step within the whole stage or run.
        num_steps: How many steps the stage has.
        metrics: Values that are equal in every rerun.
        timings: Seconds and rates, which are not.
    """

    stage: str
    step: int
    num_steps: int
    metrics: dict[str, float]
    timings: dict[str, float] = field(default_factory=dict)
