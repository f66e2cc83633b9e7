"""The records that flow between layers; imports no torch."""

from dataclasses import dataclass, field, replace
from typing import Any

Row = dict[str, Any]
"""One row of a data set: `id`, `prompt`, `answer`, `completion`, `task`, `metadata` (JSON)."""
VALIDATION_PREFIX = "validation_"
"""First part of the names of figures on rows that are never trained on."""


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
    """What followed a prompt: token ids, and where the policy wrote them, the engine's logprobs.

    With an environment that answers, its turns lie between the policy's; nothing is ever tokenized
    again. `token_ids` end with the stop token where the engine stopped by itself.

    Attributes:
        token_ids: `L` of them.
        logprobs: `[L]`, in nats, under the sampling temperature; 0 where the environment wrote.
        truncated: It ran into a bound on tokens or turns instead of ending.
        generated: `[L]`: whether the policy wrote the token. Empty: it wrote all of them.
        weight_versions: `[L]`: which weights the token was drawn with, as the number of updates
            before. Empty: the caller knows, because all are of one version.
        num_unread_tokens: How long the environment's last message was, where it left no room for
            another turn and is not part of the completion.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    truncated: bool
    generated: tuple[bool, ...] = ()
    weight_versions: tuple[int, ...] = ()
    num_unread_tokens: int = 0

    @property
    def token_mask(self) -> tuple[bool, ...]:
        """`[L]`: the tokens that are trained on."""
        return self.generated or (True,) * len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Rollout:
    """A completion of a prompt with its score.

    Attributes:
        prompt: What was asked.
        completion: What the engine answered, and, with several turns, the environment.
        text: What the policy wrote, decoded, special tokens left out.
        reward: The environment's score; None until scored, or when scoring failed.
        advantage: The reward against its group's; None until computed.
        components: The rewards that `reward` is made of, where an environment gives several.
        group: Place of the prompt in its step. Rollouts of one group are compared with each other.
        sample: Place of the rollout in its group.
        turn_rewards: Of each turn of the policy, where an environment answers; they sum to
            `reward`, unless the environment has adapted it to the whole batch.
        messages: The conversation as text, `(role, content)`, where an environment answers.
        error: Why there is no reward; such a rollout is counted, and not trained on.
    """

    prompt: Prompt
    completion: Completion
    text: str
    reward: float | None = None
    advantage: float | None = None
    components: tuple[float, ...] = ()
    group: int = 0
    sample: int = 0
    turn_rewards: tuple[float, ...] = ()
    messages: tuple[tuple[str, str], ...] = ()
    error: str | None = None

    def scored(self, reward: float | None) -> "Rollout":
        """The same rollout with a reward."""
        return replace(self, reward=reward)

    def failed(self, error: str) -> "Rollout":
        """The same rollout, set aside because it could not be scored."""
        return replace(self, reward=None, error=error)


def unscored(prompt: Prompt, text: str = "") -> Rollout:
    """A rollout of texts alone, as where nothing has been sampled."""
    return Rollout(prompt, Completion((), (), truncated=False), text)


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
