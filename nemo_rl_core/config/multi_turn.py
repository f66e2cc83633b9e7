"""Settings of multi-turn environments: games, tools, custom ones."""

import json
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from nemo_rl_core.config.base import FrozenConfig
from nemo_rl_core.config.judge import JudgeModel, LLMJudge
from nemo_rl_core.config.patterns import FUNCTION, LOOPBACK_URL, MEMBER_OR_NAME
from nemo_rl_core.config.single_turn import (
    CodeTests,
    ExactMatch,
    JsonSchemaMatch,
    MathVerify,
    MultipleChoice,
    ReasoningGymScore,
    RegexMatch,
    RewardFunction,
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
    """The tool `calculator(expression)`: numbers, `+ - * / // % **` and parentheses."""

    kind: Literal["calculator"] = "calculator"


class PythonTool(FrozenConfig):
    """The tool `python(program)`: a program in a sandbox; its output is the result.

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
    """The tool `retriever(query)`: the best passages of a file by BM25.

    Attributes:
        path: A jsonl file whose rows have `text`, or a text file with one passage per line.
        num_passages: Number of returned passages.
    """

    kind: Literal["retriever"] = "retriever"
    path: str = Field(min_length=1)
    num_passages: PositiveInt = 3


class FunctionTool(FrozenConfig):
    """A Python function as a tool, or a class, whose public methods are tools.

    Each episode has its own object of the class. If it has a method `reset(row)`, this is called
    once, before the first call; `close()` is called at the end of the episode.

    Attributes:
        target: The function or class as `module:name`; the module is imported from the working
            folder or from an installed package.
        arguments: Keyword arguments of the class.
    """

    kind: Literal["function"] = "function"
    target: str = Field(pattern=FUNCTION)
    arguments: dict[str, Any] = Field(default_factory=dict)


class McpServer(FrozenConfig):
    """All tools of a server that speaks the Model Context Protocol.

    Attributes:
        command: Program and arguments of a server that speaks over stdio.
        url: Address of a running server on this machine, such as http://127.0.0.1:8000/mcp.
        session: Whether all episodes of a process share one session, or each `episode` starts its
            own, for a server that keeps state.
        variables: Names of environment variables that the command gets besides HOME, PATH and USER.
    """

    kind: Literal["mcp"] = "mcp"
    command: list[str] = Field(default_factory=list)
    url: str | None = Field(default=None, pattern=LOOPBACK_URL)
    session: Literal["shared", "episode"] = "shared"
    variables: list[str] = Field(default_factory=list)

    @model_validator(mode="after")
    def _has_one_address(self) -> "McpServer":
        if bool(self.command) == (self.url is not None):
            raise ValueError("an MCP server needs either command or url")
        return self


def _as_tool(value: Any) -> Any:
    return {"kind": "function", "target": value} if isinstance(value, str) else value


ToolConfig = Annotated[
    CalculatorTool | PythonTool | RetrieverTool | FunctionTool | McpServer,
    Field(discriminator="kind"),
    BeforeValidator(_as_tool),
]

AnswerConfig = Annotated[
    ExactMatch
    | MathVerify
    | ReasoningGymScore
    | RewardFunction
    | RegexMatch
    | JsonSchemaMatch
    | LLMJudge
    | MultipleChoice
    | CodeTests,
    Field(discriminator="kind"),
]
"""Environments that score a text."""


class ToolUse(FrozenConfig):
    """A conversation in which the policy may call tools; its last turn is scored.

    Attributes:
        tools: Tools that it may call: `module:function` or `module:Class`, or by kind.
        answer: Environment that scores the turn without a call.
        max_calls: Maximum number of calls; a turn with a further call is the last and is scored.
        max_result_characters: Length to which longer results are cut.
        call_timeout_seconds: Time limit of one call.
    """

    kind: Literal["tools"] = "tools"
    tools: list[ToolConfig] = Field(default=[CalculatorTool()], min_length=1)
    answer: AnswerConfig = ExactMatch()
    max_calls: PositiveInt = 4
    max_result_characters: PositiveInt = 1000
    call_timeout_seconds: PositiveFloat = 60.0

    @model_validator(mode="after")
    def _tools_differ(self) -> "ToolUse":
        if any(tool in self.tools[:number] for number, tool in enumerate(self.tools)):
            raise ValueError("environment.tools repeats a tool")
        if isinstance(self.answer, LLMJudge) and isinstance(self.answer.judge, JudgeModel):
            raise ValueError(
                "a judge that is a model of the run cannot score answers after tools: use "
                "judge.kind endpoint"
            )
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
