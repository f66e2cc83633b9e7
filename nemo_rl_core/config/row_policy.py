"""What every kind of data says about its rows: how long, how often, what is trained on."""

from typing import Literal

from pydantic import PositiveInt

from nemo_rl_core.config.base import FrozenConfig

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
