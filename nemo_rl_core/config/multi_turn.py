"""Settings of multi-turn environments: games, tools, custom ones."""

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
        illegal_penalty: Penalty for a turn without a legal move; the turn is lost.
    """

    kind: Literal["sliding_puzzle"] = "sliding_puzzle"
    illegal_penalty: NonNegativeFloat = 0.0


class GuessNumberGame(FrozenConfig):
    """A hidden number over several turns: 1.0 when it is guessed in time.

    Attributes:
        illegal_penalty: Penalty for a turn without a guess within the bounds; the turn is lost.
    """

    kind: Literal["guess_number"] = "guess_number"
    illegal_penalty: NonNegativeFloat = 0.0


class CalculatorTool(FrozenConfig):
    """`<tool>calculator 3 * (4 + 5)</tool>`: numbers, `+ - * / // % **` and parentheses."""

    kind: Literal["calculator"] = "calculator"


class PythonTool(FrozenConfig):
    """`<tool>python print(6 * 7)</tool>`: a program in a sandbox; its output is the result.

    Attributes:
        cpu_seconds: CPU time limit of one program.
        wall_seconds: Wall time limit of one program.
        memory_mib: Memory limit of each process of a program.
    """

    kind: Literal["python"] = "python"
    cpu_seconds: PositiveInt = 5
    wall_seconds: PositiveFloat = 20.0
    memory_mib: int = Field(default=512, ge=64)


class RetrieverTool(FrozenConfig):
    """`<tool>retriever capital of France</tool>`: the best passages of a file by BM25.

    Attributes:
        path: A jsonl file whose rows have `text`, or a text file with one passage per line.
        num_passages: Number of returned passages.
    """

    kind: Literal["retriever"] = "retriever"
    path: str = Field(min_length=1)
    num_passages: PositiveInt = 3


ToolConfig = Annotated[CalculatorTool | PythonTool | RetrieverTool, Field(discriminator="kind")]


class ToolUse(FrozenConfig):
    """A conversation in which the policy may call tools; its last turn is scored.

    Attributes:
        tools: Tools that it may call, each by its kind.
        answer: Environment that scores the turn without a call.
        max_calls: Maximum number of calls; a turn with a further call is the last and is scored.
        max_result_characters: Length to which longer results are cut.
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
            raise ValueError(f"each tool needs a different kind, but {kinds} repeats one")
        return self


class PythonEnvironment(FrozenConfig):
    """A custom environment: any class or object with a method `step`.

    Attributes:
        target: `module:name` of a class, an object or a function that returns one; the module is
            imported from the working folder or from an installed package. Or the name of a class
            registered with `register_environment`, or of an entry point of an installed package in
            the group `nemo_rl_core.environments`.
        arguments: Keyword arguments of the class or function.
    """

    kind: Literal["python"] = "python"
    target: str = Field(pattern=MEMBER_OR_NAME)
    arguments: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _arguments_can_be_recorded(self) -> "PythonEnvironment":
        for name, value in self.arguments.items():
            try:
                is_json = json.loads(json.dumps(value, allow_nan=False)) == value
            except (TypeError, ValueError):
                is_json = False
            if not is_json:
                raise ValueError(
                    f"the argument {name!r} is {value!r:.60}, which JSON cannot record: pass "
                    "numbers, text, true or false, lists and maps, and build other objects from "
                    "them"
                )
        return self
