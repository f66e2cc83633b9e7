"""Where prompts come from, and how long they may be."""

from typing import Annotated, Literal

from pydantic import Field, PositiveInt, model_validator

from nemo_rl_core.config.base import FrozenConfig


class ArithmeticData(FrozenConfig):
    """Generated sums of two numbers; train and validation never share a problem."""

    kind: Literal["arithmetic"] = "arithmetic"
    num_train: PositiveInt = 4096
    num_validation: PositiveInt = 512
    max_prompt_tokens: PositiveInt = 16
    max_operand: PositiveInt = 99

    @model_validator(mode="after")
    def _enough_problems(self) -> "ArithmeticData":
        available = (self.max_operand + 1) ** 2
        if self.num_train + self.num_validation > available:
            raise ValueError(
                f"num_train + num_validation is {self.num_train + self.num_validation}, but only "
                f"{available} different sums exist with max_operand {self.max_operand}"
            )
        return self


class ReasoningGymData(FrozenConfig):
    """Procedurally generated tasks from reasoning-gym, mixed in equal parts."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    tasks: list[str] = Field(default=["chain_sum"], min_length=1)
    task_options: dict[str, dict[str, int | float | bool | str]] = Field(default_factory=dict)
    instruction: str = ""
    num_train: PositiveInt = 1024
    num_validation: PositiveInt = 256
    max_prompt_tokens: PositiveInt = 256


class FileData(FrozenConfig):
    """Rows of your own: jsonl, csv or parquet with columns `prompt` and `answer`.

    An optional `completion` column is what SFT trains on (the answer, where it is left out).
    """

    kind: Literal["file"] = "file"
    train: str = Field(min_length=1)
    validation: str = Field(min_length=1)
    max_prompt_tokens: PositiveInt = 512


DataConfig = Annotated[ArithmeticData | ReasoningGymData | FileData, Field(discriminator="kind")]
