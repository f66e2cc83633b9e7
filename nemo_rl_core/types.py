"""Records that are passed between layers; this module does not import torch."""

from dataclasses import dataclass, field, replace
from typing import Any

Row = dict[str, Any]
"""One row of a data set: `id`, `prompt`, `answer`, `completion`, `task`, `metadata` (JSON)."""
VALIDATION_PREFIX = "validation_"
"""Prefix of the names of metrics on validation rows."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A row of a data set that the policy can sample completions for.

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
    """Tokens that follow a prompt, with the engine's logprobs of the policy's tokens.

    In a multi-turn episode, the environment's turns are between the policy's; tokens are never
    tokenized again. `token_ids` end with the stop token if the engine stopped by itself.

    Attributes:
        token_ids: `[L]` token ids.
        logprobs: `[L]` logprobs in nats under the sampling temperature; 0 for tokens of the
            environment.
        truncated: Whether a limit on tokens or turns ended the completion.
        generated: `[L]`, whether the policy wrote the token; empty if it wrote all of them.
        weight_versions: `[L]` versions of the weights that sampled the tokens, counted in updates;
            empty if the caller knows the single version of all tokens.
        num_unread_tokens: Length of the environment's last message if it is not part of the
            completion because it left no room for another turn.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    truncated: bool
    generated: tuple[bool, ...] = ()
    weight_versions: tuple[int, ...] = ()
    num_unread_tokens: int = 0

    @property
    def token_mask(self) -> tuple[bool, ...]:
        """`[L]`, whether a token is trained on."""
        return self.generated or (True,) * len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Rollout:
    """A completion of a prompt with its score.

    Attributes:
        prompt: The prompt.
        completion: Tokens of the policy and, in a multi-turn episode, of the environment.
        text: Decoded text of the policy without special tokens.
        reward: Score from the environment; None until scored, or if scoring failed.
        advantage: Advantage of the reward within its group; None until computed.
        components: Rewards that add up to `reward`, if the environment returns several.
        group: Index of the prompt in its step. Rollouts of one group are compared with each other.
        sample: Index of the rollout in its group.
        turn_rewards: Rewards of the policy's turns in a multi-turn episode; they sum to `reward`
            unless the environment has adapted it to the batch.
        messages: The turns of a multi-turn episode: `role`, `content` and, if present,
            `reasoning_content`, `tool_calls`, `tool_call_id` and `name`.
        error: Reason why there is no reward; such a rollout is counted but not trained on.
        part: Index of the training sample in its episode. An episode whose past is rewritten has
            several, with the same `group`, `sample` and `reward`, and each with its prompt tokens
            and the rewards of its turns.
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
    messages: tuple[dict[str, Any], ...] = ()
    error: str | None = None
    part: int = 0

    def scored(self, reward: float | None) -> "Rollout":
        """Returns this rollout with a reward."""
        return replace(self, reward=reward)

    def failed(self, error: str) -> "Rollout":
        """Returns this rollout marked as failed to score."""
        return replace(self, reward=None, error=error)


def unscored(prompt: Prompt, text: str = "") -> Rollout:
    """Returns a rollout that has only texts, without sampled tokens."""
    return Rollout(prompt, Completion((), (), truncated=False), text)


@dataclass(frozen=True, slots=True)
class StepReport:
    """Report of a trainer after each step.

    Attributes:
        stage: Name of the running stage, such as `train_sft`.
        step: 1-based step within the stage or run.
        num_steps: Number of steps of the stage.
        metrics: Values that are equal in every rerun.
        timings: Seconds and rates, which differ between reruns.
    """

    stage: str
    step: int
    num_steps: int
    metrics: dict[str, float]
    timings: dict[str, float] = field(default_factory=dict)
