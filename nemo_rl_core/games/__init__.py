"""Rules of small games, for data sets and environments; imports no torch."""

from typing import Any, Protocol, Self


class Position(Protocol):
    """The position of a game; a frozen record.

    Moves are integers, so that models with a digits-only vocabulary can play.
    """

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Self:
        """Restores a position from `state`; raises ValueError or KeyError for an invalid one."""
        ...

    @property
    def state(self) -> dict[str, Any]:
        """The position as JSON values."""
        ...

    @property
    def text(self) -> str:
        """The text for the player, in the characters of `data.tokenizer`."""
        ...

    @property
    def is_won(self) -> bool:
        """Whether the player has reached the goal."""
        ...

    def after(self, move: int) -> Self | None:
        """The position after a move, or None if the move is against the rules."""
        ...
