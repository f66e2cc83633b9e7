"""The rules of small games, which rows are made of and environments play by; imports no torch."""

from typing import Any, Protocol, Self


class Position(Protocol):
    """Where a game stands; a frozen record.

    Moves are whole numbers, so that a model that knows digits alone can play.
    """

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Self:
        """The position that `state` described.

        Raises:
            ValueError: If the values describe no position.
            KeyError: If one is missing.
        """
        ...

    @property
    def state(self) -> dict[str, Any]:
        """What describes it, for JSON."""
        ...

    @property
    def text(self) -> str:
        """What the player sees; written with the characters of `data.tokenizer`."""
        ...

    @property
    def is_won(self) -> bool:
        """Whether the player has reached the goal."""
        ...

    def after(self, move: int) -> Self | None:
        """The position after a move, or None if the move is against the rules."""
        ...
