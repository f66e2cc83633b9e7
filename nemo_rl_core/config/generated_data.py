"""Settings of generated rows: arithmetic, puzzles, games."""

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from nemo_rl_core.config.row_policy import RowPolicy


class ArithmeticData(RowPolicy):
    """Generated sums of two numbers; train and validation never share a problem.

    Attributes:
        num_train: Sums to train on.
        num_validation: Sums to validate on.
        max_prompt_tokens: The longest prompt, chat template included.
        max_operand: Operands are drawn from 0 to this number.
    """

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


class ReasoningGymData(RowPolicy):
    """Procedurally generated tasks from reasoning-gym, mixed in equal parts.

    Attributes:
        tasks: Names of reasoning-gym's tasks; each gives an equal share of the rows.
        task_options: Options of each task, by its name, as reasoning-gym defines them.
        instruction: Text that is added to every prompt, on a line of its own; empty adds none.
        completion: What SFT learns to write, with fields in braces: `{answer}`, `{question}` and
            what a task tells of each question, as `{expression} = {answer}` for chain_sum.
        num_train: Questions to train on, of all tasks together.
        num_validation: Questions to validate on, of all tasks together.
        max_prompt_tokens: The longest prompt, chat template included.
    """

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    tasks: list[str] = Field(default=["chain_sum"], min_length=1)
    task_options: dict[str, dict[str, int | float | bool | str]] = Field(default_factory=dict)
    instruction: str = ""
    completion: str = "{answer}"
    num_train: PositiveInt = 1024
    num_validation: PositiveInt = 256
    max_prompt_tokens: PositiveInt = 256


class SlidingPuzzleData(RowPolicy):
    """Sliding puzzles to solve over several turns, for the environment `sliding_puzzle`.

    Completions are optimal first moves, for a warm start.

    Attributes:
        size: Rows by columns. There are 11 unsolved positions of 2x2, 359 of 2x3 and 181439 of 3x3.
        max_moves: The most moves that a start is away from the solved position.
        spare_turns: Turns that a row allows beyond the fewest that solve it.
        num_train: Puzzles to train on.
        num_validation: Puzzles to validate on.
        max_prompt_tokens: The longest prompt, chat template included.
    """

    kind: Literal["sliding_puzzle"] = "sliding_puzzle"
    size: Literal["2x2", "2x3", "3x3"] = "2x3"
    max_moves: PositiveInt = 12
    spare_turns: NonNegativeInt = 0
    num_train: PositiveInt = 112
    num_validation: PositiveInt = 32
    max_prompt_tokens: PositiveInt = 16

    @property
    def num_rows(self) -> int:
        """Of the puzzle."""
        return int(self.size[0])

    @property
    def num_columns(self) -> int:
        """Of the puzzle."""
        return int(self.size[2])


class GuessNumberData(RowPolicy):
    """Numbers to guess between two bounds, for the environment `guess_number`.

    Every row has its own bounds, and a secret drawn between them. Completions are optimal first
    guesses, for a warm start.

    Attributes:
        max_number: The highest upper bound.
        min_range: The fewest numbers between the bounds, both included.
        spare_turns: Turns that a row allows beyond what binary search needs in the worst case.
        max_opening: Rows to train on begin behind so many wrong guesses at most, drawn anywhere
            within the bounds, so that a warm start sees later turns, too. A row to validate on is
            a whole game.
        num_train: Games to train on.
        num_validation: Games to validate on.
        max_prompt_tokens: The longest prompt, chat template included.
    """

    kind: Literal["guess_number"] = "guess_number"
    max_number: PositiveInt = 99
    min_range: PositiveInt = 2
    spare_turns: NonNegativeInt = 0
    max_opening: NonNegativeInt = 0
    num_train: PositiveInt = 1024
    num_validation: PositiveInt = 128
    max_prompt_tokens: PositiveInt = 16

    @model_validator(mode="after")
    def _enough_bounds(self) -> "GuessNumberData":
        # There are n - k + 1 pairs of bounds with k numbers between them among n numbers.
        widest = self.max_number + 2 - self.min_range
        available = widest * (widest + 1) // 2 if widest > 0 else 0
        if self.num_train + self.num_validation > available:
            raise ValueError(
                f"num_train + num_validation is {self.num_train + self.num_validation}, but only "
                f"{available} different bounds exist with max_number {self.max_number} and "
                f"min_range {self.min_range}"
            )
        return self
