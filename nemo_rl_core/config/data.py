"""Where rows come from, how long they may be, and what happens to those that are too long."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from nemo_rl_core.config.base import FrozenConfig
from nemo_rl_core.config.row_format import RowFormat

MaskKind = Literal["all_assistant_turns", "final_turn"]
"""Which turns of a conversation are trained on."""


class RowPolicy(FrozenConfig):
    """What every kind of data says about its rows.

    Attributes:
        max_sequence_tokens: The longest row, prompt and completion together, chat template
            included; None leaves the length to the micro-batch budget.
        overlong: What becomes of rows beyond that length (or of prompts beyond
            `max_prompt_tokens`): all data refused, the rows dropped, or the rows cut at the end.
        duplicates: What becomes of rows that ask the same as an earlier row.
        mask: Which turns of a conversation are trained on.
    """

    max_sequence_tokens: PositiveInt | None = None
    overlong: Literal["refuse", "drop", "truncate"] = "refuse"
    duplicates: Literal["refuse", "drop", "keep"] = "refuse"
    mask: MaskKind = "all_assistant_turns"


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
        num_train: Questions to train on, of all tasks together.
        num_validation: Questions to validate on, of all tasks together.
        max_prompt_tokens: The longest prompt, chat template included.
    """

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    tasks: list[str] = Field(default=["chain_sum"], min_length=1)
    task_options: dict[str, dict[str, int | float | bool | str]] = Field(default_factory=dict)
    instruction: str = ""
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


class FileData(RowFormat, RowPolicy):
    """Rows of your own: jsonl, csv, parquet or arrow, a folder of one of these, or a folder that
    `datasets` saved.

    The columns say what the rows are; docs/data.md lists what is understood.

    Attributes:
        train: The file or folder with rows to train on.
        validation: The file or folder with rows to validate on; None holds out
            `validation_fraction` of the training rows, drawn with the recipe's seed.
        validation_fraction: The share of the training rows that is held out where `validation` is
            None.
        max_prompt_tokens: The longest prompt, chat template included.
    """

    kind: Literal["file"] = "file"
    train: str = Field(min_length=1)
    validation: str | None = Field(default=None, min_length=1)
    validation_fraction: float = Field(default=0.05, gt=0, lt=1)
    max_prompt_tokens: PositiveInt = 512


class HubData(RowFormat, RowPolicy):
    """Rows from the Hugging Face hub.

    Attributes:
        name: As `organization/name`.
        subset: The configuration, where the data set has several.
        revision: A commit or tag; without one, rows may change under the same name.
        train: The split to train on.
        validation: The split to validate on; None holds out `validation_fraction` of the training
            split, drawn with the recipe's seed.
        validation_fraction: The share of the training split that is held out where `validation` is
            None.
        max_prompt_tokens: The longest prompt, chat template included.
    """

    kind: Literal["hub"] = "hub"
    name: str = Field(min_length=1)
    subset: str | None = None
    revision: str | None = None
    train: str = Field(default="train", min_length=1)
    validation: str | None = None
    validation_fraction: float = Field(default=0.05, gt=0, lt=1)
    max_prompt_tokens: PositiveInt = 512


class MixtureSource(FrozenConfig):
    """One source of a mixture.

    Attributes:
        data: Where its rows come from; limits of rows belong to the mixture.
        weight: Its share of the rows to train on, relative to the other sources. None in all
            sources takes every row once.
    """

    data: Annotated[
        ArithmeticData
        | ReasoningGymData
        | SlidingPuzzleData
        | GuessNumberData
        | FileData
        | HubData,
        Field(discriminator="kind"),
    ]
    weight: PositiveFloat | None = None

    @model_validator(mode="after")
    def _limits_of_the_mixture(self) -> "MixtureSource":
        limits = {*RowPolicy.model_fields, "max_prompt_tokens"}
        inside = sorted(
            name
            for name in self.data.model_fields_set & limits
            if getattr(self.data, name) != type(self.data).model_fields[name].default
        )
        if inside:
            raise ValueError(
                f"{', '.join(inside)} holds for all rows of a mixture: move it from the source to "
                "the mixture"
            )
        return self


class MixtureData(RowPolicy):
    """Rows of several sources, all of one kind.

    Every source gives its training rows by its weight and all its validation rows. Which rows are
    taken depends on the recipe's seed alone.

    Attributes:
        sources: The sources, each with its weight.
        num_train: Rows to train on, of all sources together; None takes as many as the weights
            allow without a row twice. More than that repeats rows, which needs `duplicates: keep`.
        max_prompt_tokens: The longest prompt, chat template included.
    """

    kind: Literal["mixture"] = "mixture"
    sources: list[MixtureSource] = Field(min_length=1)
    num_train: PositiveInt | None = None
    max_prompt_tokens: PositiveInt = 512

    @model_validator(mode="after")
    def _all_weights_or_none(self) -> "MixtureData":
        given = [each.weight is not None for each in self.sources]
        if any(given) and not all(given):
            missing = [str(index) for index, each in enumerate(given) if not each]
            raise ValueError(
                f"sources {', '.join(missing)} have no weight and others have: give one to all, "
                "or to none to take every row once"
            )
        if self.num_train is not None and not any(given):
            raise ValueError("num_train draws rows by weights: give one to every source")
        return self


DataConfig = Annotated[
    ArithmeticData
    | ReasoningGymData
    | SlidingPuzzleData
    | GuessNumberData
    | FileData
    | HubData
    | MixtureData,
    Field(discriminator="kind"),
]
