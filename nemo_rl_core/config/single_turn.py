"""Settings of the environments that score a single completion."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from nemo_rl_core.config.base import FrozenConfig
from nemo_rl_core.config.judge import LLMJudge
from nemo_rl_core.config.patterns import FUNCTION
from nemo_rl_core.config.placement import OwnBundles, Placement, own_bundles


class ExactMatch(FrozenConfig):
    """1.0 when the completion equals the answer.

    Attributes:
        white_space: What of it counts: none around the text (`strip`); nor how much there is
            between words (`collapse`); all of it (`keep`).
        ignore_case: Whether capital and small letters are the same.
    """

    kind: Literal["exact"] = "exact"
    white_space: Literal["strip", "collapse", "keep"] = "strip"
    ignore_case: bool = False


class RegexMatch(FrozenConfig):
    """1.0 when the completion has the form of a regular expression (of the `regex` library).

    Attributes:
        pattern: What to find; `(?i)` at its start ignores case, `(?s)` lets a dot match line ends.
        match: Whether the whole completion, without white space around it, must match, or a part.
        match_timeout_seconds: For one completion; one that takes longer has no score.
    """

    renamed: ClassVar[Mapping[str, str]] = {"timeout_seconds": "match_timeout_seconds"}

    kind: Literal["regex"] = "regex"
    pattern: str = Field(min_length=1)
    match: Literal["whole", "part"] = "whole"
    match_timeout_seconds: PositiveFloat = 1.0


class JsonSchemaMatch(FrozenConfig):
    """1.0 when the completion is JSON that a JSON Schema accepts.

    Attributes:
        json_schema: The schema, as JSON text.
        where: Whether the whole completion must be JSON, or its last fenced code block.
    """

    kind: Literal["json_schema"] = "json_schema"
    json_schema: str = Field(min_length=2)
    where: Literal["whole", "code_block"] = "whole"


class MathVerify(FrozenConfig):
    """1.0 when math-verify finds the completion's final answer equal to the reference.

    Attributes:
        max_calls: The most Python calls of one comparison; a million take about a second, and
            usual answers need at most half of that. A completion that needs more is wrong, on a
            fast machine as on a slow one.
        cpu_seconds: The same for a comparison that takes its time in few calls.
        num_parallel: How many completions are compared at once.
    """

    kind: Literal["math"] = "math"
    max_calls: PositiveInt = 2_000_000
    cpu_seconds: PositiveInt = 10
    num_parallel: PositiveInt = 2


class ReasoningGymScore(FrozenConfig):
    """The score of the reasoning-gym task that made the prompt, between 0 and 1."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"


class RewardFunction(FrozenConfig):
    """Your own function of a completion and of what it names of the row, as `module:function`.

    `def reward(prompt, completion, answer, metadata) -> float`, in any part and order, and any
    column of the row; `def reward(prompts, completions, answer)` takes and returns lists.

    Attributes:
        target: The function, as `module:function`; the module is imported from the working folder
            or from an installed package.
    """

    kind: Literal["function"] = "function"
    target: str = Field(pattern=FUNCTION)


class RewardModelScore(FrozenConfig):
    """The score that a reward model gives to the last token of prompt and completion.

    `model` is a hub name or a folder; it is left out where a pipeline hands over the reward model
    that it has trained. `max_tokens_per_batch` bounds the memory of one forward pass; it changes
    scores only by rounding.

    Attributes:
        model: A hub name or a folder; None takes the reward model that the pipeline has trained.
        max_tokens_per_batch: Bounds the memory of one forward pass; it changes scores only by
            rounding.
        placement: Where it runs. `colocated`: on a share of a trainer's GPU, or without GPUs in the
            trainer's process. `{own: 2}`: two copies in actors on two GPUs besides those of
            `cluster.num_workers`, where their weights stay; without GPUs, in two processes.
    """

    kind: Literal["reward_model"] = "reward_model"
    model: str | None = Field(default=None, min_length=1)
    max_tokens_per_batch: PositiveInt = 8192
    # Left out by default, so that keys of stages are what they were without it.
    placement: Placement = Field(default="colocated", exclude_if=lambda said: said == "colocated")

    def own_bundles(self, name: str, path: str) -> tuple[OwnBundles, ...]:
        """Its bundles besides the trainer's; none for one that shares those.

        Args:
            name: Of its workers.
            path: Of this section in a recipe.
        """
        return own_bundles(self.placement, name, path)


class MultipleChoice(FrozenConfig):
    """1.0 when the letter that the completion chooses is the answer.

    Attributes:
        num_choices: How many letters there are to choose from, beginning with A.
    """

    kind: Literal["multiple_choice"] = "multiple_choice"
    num_choices: int = Field(default=4, ge=2, le=26)


class CodeTests(FrozenConfig):
    """The unit tests of the row that the completion's program passes, run in a sandbox.

    The row's metadata has `tests`, and may have `setup`, in the form that
    `nemo_rl_core.environments.rewards.code` describes.

    Attributes:
        reward: The fraction of tests that pass, or 1.0 for all and 0.0 for fewer.
        cpu_seconds: For the tests of one completion that call its functions, or for each test that
            gives it an input.
        wall_seconds: The same by the clock, for programs that wait.
        memory_mib: Of each of at most four processes.
        num_parallel: Maximum number of completions whose programs compute at once. Programs that
            sleep do not count.
    """

    kind: Literal["code"] = "code"
    reward: Literal["fraction", "all"] = "fraction"
    cpu_seconds: PositiveInt = 5
    wall_seconds: PositiveFloat = 20.0
    memory_mib: int = Field(default=512, ge=64)
    num_parallel: PositiveInt = 2


AnySingle = (
    ExactMatch
    | MathVerify
    | ReasoningGymScore
    | RewardFunction
    | RewardModelScore
    | RegexMatch
    | JsonSchemaMatch
    | LLMJudge
    | MultipleChoice
    | CodeTests
)
SingleEnvironmentConfig = Annotated[AnySingle, Field(discriminator="kind")]
