"""Settings of rows in all kinds of data: length, duplicates, trained turns."""

from typing import Final, Literal

from pydantic import PositiveInt

from nemo_rl_core.config.base import FrozenConfig

MaskKind = Literal["all_assistant_turns", "final_turn"]
"""Turns of a conversation that are trained on."""


MAX_DROPPED: Final = 0.1
"""Maximum fraction of a data set that `invalid: drop` drops."""


class RowPolicy(FrozenConfig):
    """Settings of rows in all kinds of data.

    Attributes:
        max_sequence_tokens: Maximum length of a row with prompt, completion and chat template; None
            leaves the length to the micro-batch budget.
        overlong: Handling of rows beyond that length (or of prompts beyond `max_prompt_tokens`):
            all data is refused, the rows are dropped, or they are cut at the end.
        invalid: Handling of rows that do not fit their format or fail a check: all data is
            refused, or the rows are dropped, up to 10 % of the rows at each check.
        duplicates: Handling of rows with the same question as an earlier row.
        mask: Turns of a conversation that are trained on.
    """

    max_sequence_tokens: PositiveInt | None = None
    overlong: Literal["refuse", "drop", "truncate"] = "refuse"
    invalid: Literal["refuse", "drop"] = "refuse"
    duplicates: Literal["refuse", "drop", "keep"] = "refuse"
    mask: MaskKind = "all_assistant_turns"

    @property
    def drops_invalid(self) -> bool:
        """Whether invalid rows are dropped."""
        return self.invalid == "drop"
