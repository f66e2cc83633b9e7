"""Settings of the environments that score a single completion."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from nemo_rl_core.config.base import FrozenConfig
from nemo_rl_core.config.judge import LLMJudge
from nemo_rl_core.config.patterns import FUNCTION
from nemo_rl_core.config.placement import DedicatedBundles, Placement, dedicated_bundles


class ExactMatch(FrozenConfig):
    """1.0 when the completion equals the answer.

    Attributes:
        white_space: Handling of white space: ignored around the text (`strip`), its amount also
            ignored between words (`collapse`), or compared (`keep`).
        ignore_case: Whether upper and lower case are equal.
    """

    kind: Literal["exact"] = "exact"
    white_space: Literal["strip", "collapse", "keep"] = "strip"
    ignore_case: bool = False


class RegexMatch(FrozenConfig):
    """1.0 when the completion matches a regular expression (of the `regex` library).

    Attributes:
        pattern: Regular expression; `(?i)` at its start ignores case, `(?s)` lets a dot match line
            ends.
        match: Whether the full completion, without surrounding white space, must match, or a part.
        match_timeout_seconds: Time limit per completion; one that takes longer has no score.
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
        where: Whether the full completion must be JSON, or its last fenced code block.
    """

    kind: Literal["json_schema"] = "json_schema"
    json_schema: str = Field(min_length=2)
    where: Literal["whole", "code_block"] = "whole"


class MathVerify(FrozenConfig):
    """1.0 when math-verify finds the completion's final answer equal to the reference.

    Attributes:
        max_calls: Maximum number of Python calls per comparison. A million take about a second, and
            usual answers need at most half of that. A completion that needs more is wrong,
            regardless of the speed of the machine.
        cpu_seconds: CPU time limit, for comparisons that take long with few calls.
        num_parallel: Number of completions that are compared at once.
        version: Version of the grader. It is part of cache keys and manifests; evaluations by
            different versions are not compared.
    """

    kind: Literal["math"] = "math"
    max_calls: PositiveInt = 2_000_000
    cpu_seconds: PositiveInt = 10
    num_parallel: PositiveInt = 2
    version: Literal[2] = 2


class ReasoningGymScore(FrozenConfig):
    """The score of the reasoning-gym task that made the prompt, between 0 and 1."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"


class RewardFunction(FrozenConfig):
    """A custom reward function of a completion and any columns of its row.

    `def reward(prompt, completion, answer, metadata) -> float` with any of these parameters and any
    column of the row; `def reward(prompts, completions, answer)` takes and returns lists.

    Attributes:
        target: The function, as `module:function`; the module is imported from the working folder
            or from an installed package.
    """

    kind: Literal["function"] = "function"
    target: str = Field(pattern=FUNCTION)


class RewardModelScore(FrozenConfig):
    """The score of a reward model at the last token of prompt and completion.

    Attributes:
        model: A hub name or a folder; None takes the reward model that the pipeline has trained.
        max_tokens_per_batch: Token budget of one forward pass, which bounds its memory; it affects
            scores only by rounding.
        placement: Location of the model. `colocated`: on a fraction of a trainer's GPU, or without
            GPUs in the trainer's process. `{own: 2}`: two copies in actors on two dedicated GPUs in
            addition to those of `cluster.num_workers`, where their weights stay; without GPUs, in
            two processes.
    """

    kind: Literal["reward_model"] = "reward_model"
    model: str | None = Field(default=None, min_length=1)
    max_tokens_per_batch: PositiveInt = 8192
    # The default is not dumped, so that cache keys from before the setting stay valid.
    placement: Placement = Field(default="colocated", exclude_if=lambda value: value == "colocated")

    def dedicated_bundles(self, name: str, path: str) -> tuple[DedicatedBundles, ...]:
        """Returns its dedicated bundles; empty if it shares the trainer's."""
        return dedicated_bundles(self.placement, name, path)


class MultipleChoice(FrozenConfig):
    """1.0 when the letter that the completion chooses is the answer.

    Attributes:
        num_choices: Number of letters to choose from, starting with A.
        version: Version of the grader; see `MathVerify`.
    """

    kind: Literal["multiple_choice"] = "multiple_choice"
    num_choices: int = Field(default=4, ge=2, le=26)
    version: Literal[2] = 2


class CodeTests(FrozenConfig):
    """The unit tests of the row that the completion's program passes, run in a sandbox.

    The row's metadata has `tests`, and may have `setup`, in the form that
    `nemo_rl_core.environments.rewards.code` describes.

    Attributes:
        reward: The fraction of tests that pass, or 1.0 for all and 0.0 for fewer.
        cpu_seconds: CPU time limit for all tests of a completion that call its functions, or for
            each test that passes an input.
        wall_seconds: Wall time limit of the same, for programs that wait.
        memory_mib: Memory limit of each of at most four processes.
        num_parallel: Maximum number of completions whose programs compute at once. Programs that
            sleep do not count.
        output_kib: Maximum size of a program's output for a test in KiB. None takes twice the size
            of the expected output, and at least 64.
        version: Version of the grader; see `MathVerify`.
    """

    kind: Literal["code"] = "code"
    reward: Literal["fraction", "all"] = "fraction"
    cpu_seconds: PositiveInt = 5
    wall_seconds: PositiveFloat = 20.0
    memory_mib: int = Field(default=512, ge=64)
    num_parallel: PositiveInt = 2
    output_kib: PositiveInt | None = None
    version: Literal[2] = 2


TextScorer = (
    ExactMatch
    | MathVerify
    | ReasoningGymScore
    | RewardFunction
    | RegexMatch
    | JsonSchemaMatch
    | LLMJudge
    | MultipleChoice
    | CodeTests
)
"""Environments that score a text without its token ids."""
AnySingle = TextScorer | RewardModelScore
SingleEnvironmentConfig = Annotated[AnySingle, Field(discriminator="kind")]
