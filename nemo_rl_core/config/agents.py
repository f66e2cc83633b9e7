"""Settings of agents: programs that call the policy through an endpoint of the run."""

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from nemo_rl_core.config.base import FrozenConfig
from nemo_rl_core.config.patterns import FUNCTION, VARIABLE
from nemo_rl_core.config.single_turn import TextScorer


class AgentEnvironment(FrozenConfig):
    """An agent: a program that calls the policy as an OpenAI or Anthropic model.

    Set either `command` or `target`. Each episode is one process, which gets the row as JSON on
    its standard input, and the address and the key of its session in `OPENAI_BASE_URL`,
    `OPENAI_API_KEY`, `ANTHROPIC_BASE_URL` and `ANTHROPIC_API_KEY`. `NEMO_RL_REWARD_FILE` names the
    file to which a program writes its reward as a number.

    Attributes:
        command: The program and its arguments; `{prompt}` in an argument is the row's prompt.
        target: `module:function` of a function `run(base_url, api_key, row)`, also `async`; the
            module is imported from the working folder or from an installed package.
        reward: Environment that scores the text of the policy's last turn. None takes the reward
            from the agent: the function's result, or the program's `NEMO_RL_REWARD_FILE`.
        files: Further files and folders that the agent reads; their contents are part of the cache
            key. Those that `command` names, and what their Python code imports, always are.
        variables: Further environment variables that the agent gets from the run's environment;
            their values are not part of the cache key.
        episode_timeout_seconds: Time limit of an episode; the agent is killed after it.
        max_concurrent: Maximum number of agents that run at once.
    """

    kind: Literal["agent"] = "agent"
    command: list[str] | None = Field(default=None, min_length=1)
    target: str | None = Field(default=None, pattern=FUNCTION)
    reward: Annotated[TextScorer, Field(discriminator="kind")] | None = None
    files: list[str] = Field(default=[])
    variables: list[Annotated[str, Field(pattern=VARIABLE)]] = Field(default=[])
    episode_timeout_seconds: PositiveFloat = 600.0
    max_concurrent: PositiveInt = 32

    @model_validator(mode="after")
    def _is_one_program(self) -> Self:
        if (self.command is None) == (self.target is None):
            raise ValueError(
                "an agent needs either command, as in [python, my_agent.py], or target, as in "
                "my_agent:run"
            )
        return self
