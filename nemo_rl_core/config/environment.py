"""How a completion is scored."""

from typing import Annotated, Literal

from pydantic import Field, FiniteFloat, PositiveFloat, PositiveInt, model_validator

from nemo_rl_core.config.base import FrozenConfig


class ExactMatch(FrozenConfig):
    """1.0 when the completion, stripped, equals the answer."""

    kind: Literal["exact"] = "exact"


class MathVerify(FrozenConfig):
    """1.0 when math-verify finds the completion's final answer equal to the reference."""

    kind: Literal["math"] = "math"
    timeout_seconds: PositiveFloat = 5.0


class ReasoningGymScore(FrozenConfig):
    """The score of the reasoning-gym task that made the prompt, between 0 and 1."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"


class RewardFunction(FrozenConfig):
    """Your own function `(prompt, response) -> float`, or of two lists, named `module:function`."""

    kind: Literal["function"] = "function"
    target: str = Field(pattern=r"^[\w.]+:\w+$")


class RewardModelScore(FrozenConfig):
    """The score that a reward model gives to the last token of prompt and completion.

    `model` is a hub name or a folder; it is left out where a pipeline hands over the reward model
    that it has trained. `max_tokens_per_batch` bounds the memory of one forward pass; it changes
    scores only by rounding.
    """

    kind: Literal["reward_model"] = "reward_model"
    model: str | None = Field(default=None, min_length=1)
    max_tokens_per_batch: PositiveInt = 8192


class MultipleChoice(FrozenConfig):
    """1.0 when the letter that the completion chooses is the answer.

    Attributes:
        num_choices: How many letters there are to choose from, beginning with A.
    """

    kind: Literal["multiple_choice"] = "multiple_choice"
    num_choices: int = Field(default=4, ge=2, le=26)


class CodeTests(FrozenConfig):
    """The unit tests of the row that the completion's program passes, run in a sandbox.

    The row's metadata has `tests`, and may have `setup`; `nemo_rl_core.environments.code` says in
    which form.

    Attributes:
        reward: The fraction of tests that pass, or 1.0 for all and 0.0 for fewer.
        cpu_seconds: For the tests of one completion that call its functions, or for each test that
            gives it an input.
        wall_seconds: The same by the clock, for programs that wait.
        memory_mib: Of each of at most four processes.
        num_parallel: How many completions are tested at once.
    """

    kind: Literal["code"] = "code"
    reward: Literal["fraction", "all"] = "fraction"
    cpu_seconds: PositiveInt = 5
    wall_seconds: PositiveFloat = 20.0
    memory_mib: int = Field(default=512, ge=64)
    num_parallel: PositiveInt = 2


SingleEnvironmentConfig = Annotated[
    ExactMatch
    | MathVerify
    | ReasoningGymScore
    | RewardFunction
    | RewardModelScore
    | MultipleChoice
    | CodeTests,
    Field(discriminator="kind"),
]


class WeightedPart(FrozenConfig):
    """One of several rewards."""

    weight: FiniteFloat = 1.0
    environment: SingleEnvironmentConfig


class WeightedSum(FrozenConfig):
    """Several rewards, weighted and summed; the advantage `gdpo` reads them apart.

    Its parts are no sums themselves: a sum of sums is one longer sum, and Flyte, which describes a
    config's fields by following them, has no end of a type that contains itself.
    """

    kind: Literal["weighted_sum"] = "weighted_sum"
    parts: list[WeightedPart] = Field(min_length=1)


class CalculatorTool(FrozenConfig):
    """`<tool>calculator 3 * (4 + 5)</tool>`: numbers, `+ - * / // % **` and parentheses."""

    kind: Literal["calculator"] = "calculator"


class PythonTool(FrozenConfig):
    """`<tool>python print(6 * 7)</tool>`: a program in a sandbox; what it prints is the result."""

    kind: Literal["python"] = "python"
    cpu_seconds: PositiveInt = 5
    wall_seconds: PositiveFloat = 20.0
    memory_mib: int = Field(default=512, ge=64)


class RetrieverTool(FrozenConfig):
    """`<tool>retriever capital of France</tool>`: the passages of a file that fit best, by BM25.

    Attributes:
        path: A jsonl file whose rows have `text`, or a text file with a passage a line.
        num_passages: How many are given.
    """

    kind: Literal["retriever"] = "retriever"
    path: str = Field(min_length=1)
    num_passages: PositiveInt = 3


ToolConfig = Annotated[CalculatorTool | PythonTool | RetrieverTool, Field(discriminator="kind")]


class ToolUse(FrozenConfig):
    """A conversation in which the policy may call tools; its last turn is scored.

    Attributes:
        tools: What it may call, each by its kind.
        answer: How the turn without a call is scored.
        max_calls: A turn with a call beyond these is the last, and scored as it is.
        max_result_characters: A longer result is cut.
    """

    kind: Literal["tools"] = "tools"
    tools: list[ToolConfig] = Field(default=[CalculatorTool()], min_length=1)
    answer: Annotated[ExactMatch | MathVerify | MultipleChoice, Field(discriminator="kind")] = (
        ExactMatch()
    )
    max_calls: PositiveInt = 4
    max_result_characters: PositiveInt = 1000

    @model_validator(mode="after")
    def _tools_differ(self) -> "ToolUse":
        kinds = [tool.kind for tool in self.tools]
        if len(set(kinds)) < len(kinds):
            raise ValueError(f"a tool is called by its kind, but {kinds} names one twice")
        return self


EnvironmentConfig = Annotated[
    ExactMatch
    | MathVerify
    | ReasoningGymScore
    | RewardFunction
    | RewardModelScore
    | MultipleChoice
    | CodeTests
    | ToolUse
    | WeightedSum,
    Field(discriminator="kind"),
]


def single_environments(config: EnvironmentConfig) -> list[SingleEnvironmentConfig]:
    """The environments that score on their own: those of a sum, or the one that there is.

    Tools answer, and are not among them.
    """
    if isinstance(config, WeightedSum):
        return [part.environment for part in config.parts]
    return [] if isinstance(config, ToolUse) else [config]


def reads_reward_model(config: EnvironmentConfig) -> bool:
    """Whether it scores with a reward model that it does not name itself."""
    return any(
        isinstance(each, RewardModelScore) and each.model is None
        for each in single_environments(config)
    )
