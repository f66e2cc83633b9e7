"""Settings of generated rows: arithmetic, puzzles, games."""

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from nemo_rl_core.config.row_policy import RowPolicy


class ArithmeticData(RowPolicy):
    """Generated sums of two numbers; train and validation never share a problem.

    Attributes:
        num_train: Number of training sums.
        num_validation: Number of validation sums.
        max_prompt_tokens: Maximum length of a prompt, including the chat template.
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
        tasks: Names of reasoning-gym's tasks; each contributes the same number of rows.
        task_options: reasoning-gym's options of each task, by its name.
        instruction: Text that is added to every prompt on a separate line; empty adds none.
        completion: Target of SFT, with fields in braces: `{answer}`, `{question}` and metadata of
            the task, such as `{expression} = {answer}` for chain_sum.
        num_train: Number of training questions of all tasks together.
        num_validation: Number of validation questions of all tasks together.
        max_prompt_tokens: Maximum length of a prompt, including the chat template.
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
        max_moves: Maximum number of moves from a start to the solved position.
        spare_turns: Number of turns that a row allows beyond the minimum that solves it.
        num_train: Number of training puzzles.
        num_validation: Number of validation puzzles.
        max_prompt_tokens: Maximum length of a prompt, including the chat template.
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
        """Number of rows of the puzzle."""
        return int(self.size[0])

    @property
    def num_columns(self) -> int:
        """Number of columns of the puzzle."""
        return int(self.size[2])


class GuessNumberData(RowPolicy):
    """Numbers to guess between two bounds, for the environment `guess_number`.

    Every row has its own bounds and a secret number between them. Completions are optimal first
    guesses, for a warm start.

    Attributes:
        max_number: Largest upper bound.
        min_range: Minimum size of the range, including both bounds.
        spare_turns: Number of turns that a row allows beyond the worst case of binary search.
        max_opening: Maximum number of wrong guesses at the start of a training row, drawn within
            the bounds, so that a warm start includes later turns. A validation row is a full game.
        num_train: Number of training games.
        num_validation: Number of validation games.
        max_prompt_tokens: Maximum length of a prompt, including the chat template.
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
        num_smallest_ranges = self.max_number + 2 - self.min_range
        available = (
            num_smallest_ranges * (num_smallest_ranges + 1) // 2 if num_smallest_ranges > 0 else 0
        )
        if self.num_train + self.num_validation > available:
            raise ValueError(
                f"num_train + num_validation is {self.num_train + self.num_validation}, but only "
                f"{available} different bounds exist with max_number {self.max_number} and "
                f"min_range {self.min_range}"
            )
        return self
