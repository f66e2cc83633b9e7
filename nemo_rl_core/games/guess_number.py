"""The number-guessing game with answers "higher" or "lower"."""

from dataclasses import dataclass, replace
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class NumberGuess:
    """A position; a move is a guess within the known bounds.

    The text of every turn consists of the bounds, all that the player has learnt.

    Example:
        >>> position = NumberGuess(secret=7, low=0, high=9)
        >>> position.text, position.after(4).text, position.after(7).is_won
        ('0-9=', '5-9=', True)
    """

    secret: int
    low: int
    high: int
    is_won: bool = False

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Self:
        """Restores a position from `state`."""
        position = cls(int(state["secret"]), int(state["low"]), int(state["high"]))
        if not position.low <= position.secret <= position.high:
            raise ValueError(f"the secret {position.secret} is not within {position.text[:-1]}")
        return position

    @property
    def state(self) -> dict[str, Any]:
        """The position as JSON values, secret included; not for the policy."""
        return {"secret": self.secret, "low": self.low, "high": self.high}

    @property
    def text(self) -> str:
        """The bounds, such as `5-9=`."""
        return f"{self.low}-{self.high}="

    def after(self, move: int) -> Self | None:
        """The position after a guess, or None if the guess is outside the bounds."""
        if not self.low <= move <= self.high:
            return None
        if move == self.secret:
            return replace(self, is_won=True)
        if move < self.secret:
            return replace(self, low=move + 1)
        return replace(self, high=move - 1)


def best_guess(low: int, high: int) -> int:
    """The middle number, the lower of two, which is optimal in the worst case."""
    return (low + high) // 2


def num_guesses(low: int, high: int) -> int:
    """The number of guesses that suffice for any secret.

    Example:
        >>> [num_guesses(0, high) for high in (0, 1, 2, 3, 6, 7)]
        [1, 2, 2, 3, 3, 4]
    """
    return (high - low + 1).bit_length()
