"""Settings of the environments that answer: games, tools, a user's own."""

import json
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from nemo_rl_core.config.base import FrozenConfig
from nemo_rl_core.config.patterns import MEMBER_OR_NAME
from nemo_rl_core.config.single_turn import (
    ExactMatch,
    MathVerify,
    MultipleChoice,
)


class SlidingPuzzleGame(FrozenConfig):
    """A sliding puzzle over several turns: 1.0 when it is solved in time.

    Attributes:
        illegal_penalty: Taken off for a turn that is no legal move; such a turn is lost.
    """

    kind: Literal["sliding_puzzle"] = "sliding_puzzle"
    illegal_penalty: NonNegativeFloat = 0.0


class GuessNumberGame(FrozenConfig):
    """A hidden number over several turns: 1.0 when it is guessed in time.

    Attributes:
        illegal_penalty: Taken off for a turn that is no guess within the bounds; it is lost.
    """

    kind: Literal["guess_number"] = "guess_number"
    illegal_penalty: NonNegativeFloat = 0.0


class CalculatorTool(FrozenConfig):
    """`<tool>calculator 3 * (4 + 5)</tool>`: numbers, `+ - * / // % **` and parentheses."""

    kind: Literal["calculator"] = "calculator"


class PythonTool(FrozenConfig):
    """`<tool>python print(6 * 7)</tool>`: a program in a sandbox; what it prints is the result.

    Attributes:
        cpu_seconds: Processor time of one program.
        wall_seconds: Wall-clock time of one program.
        memory_mib: Memory of each process of a program.
    """

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


class PythonEnvironment(FrozenConfig):
    """Your own environment: any class or object with a method `step`.

    Attributes:
        target: `module:name` of a class, an object or a function that returns one; the module is
            imported from the working folder or from an installed package. Or a name: of a class
            registered with `register_environment`, or of an entry point of an installed package in
            the group `nemo_rl_core.environments`.
        arguments: Keyword arguments that the class or function is called with.
    """

    kind: Literal["python"] = "python"
    target: str = Field(pattern=MEMBER_OR_NAME)
    arguments: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _arguments_can_be_recorded(self) -> "PythonEnvironment":
        for name, value in self.arguments.items():
            try:
                same = json.loads(json.dumps(value, allow_nan=False)) == value
            except (TypeError, ValueError):
                same = False
            if not same:
                raise ValueError(
                    f"the argument {name!r} is {value!r:.60}, which JSON cannot record: pass "
                    "numbers, text, true or false, lists and maps, and make the rest of them"
                )
        return self
