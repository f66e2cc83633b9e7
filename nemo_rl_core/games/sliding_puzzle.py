"""The sliding puzzle: tiles next to the gap slide into it until all are in order."""

from collections import deque
from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class SlidingPuzzle:
    """A position, with its tiles row by row; 0 is the gap. A move is the number of the tile.

    Example:
        >>> position = SlidingPuzzle((1, 2, 0, 3), 2)
        >>> position.text, position.moves()
        ('12-03=', (1, 3))
        >>> position.after(3)
        SlidingPuzzle(tiles=(1, 2, 3, 0), num_columns=2)
    """

    tiles: tuple[int, ...]
    num_columns: int

    @classmethod
    def solved(cls, num_rows: int, num_columns: int) -> Self:
        """The position with tiles in order and the gap last."""
        return cls((*range(1, num_rows * num_columns), 0), num_columns)

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Self:
        """Restores a position from `state`."""
        tiles, num_columns = tuple(state["tiles"]), int(state["num_columns"])
        is_grid = 0 < num_columns <= len(tiles) and len(tiles) % num_columns == 0
        if not is_grid or sorted(tiles) != list(range(len(tiles))):
            raise ValueError(f"no puzzle of {num_columns} columns: {tiles}")
        return cls(tiles, num_columns)

    @property
    def state(self) -> dict[str, Any]:
        """The position as JSON values."""
        return {"tiles": list(self.tiles), "num_columns": self.num_columns}

    @property
    def text(self) -> str:
        """The rows, such as `123-405=`."""
        digits, width = "".join(map(str, self.tiles)), self.num_columns
        return "-".join(digits[at : at + width] for at in range(0, len(digits), width)) + "="

    @property
    def is_won(self) -> bool:
        """Whether all tiles are in order and the gap is last."""
        return self.tiles == (*range(1, len(self.tiles)), 0)

    def moves(self) -> tuple[int, ...]:
        """The tiles next to the gap, in ascending order."""
        row, column = divmod(self.tiles.index(0), self.num_columns)
        neighbors = [(row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)]
        num_rows = len(self.tiles) // self.num_columns
        on_board = [(r, c) for r, c in neighbors if 0 <= r < num_rows and 0 <= c < self.num_columns]
        return tuple(sorted(self.tiles[r * self.num_columns + c] for r, c in on_board))

    def after(self, move: int) -> Self | None:
        """The position after sliding the tile `move`, or None if it is not next to the gap."""
        if move not in self.moves():
            return None
        swapped = {0: move, move: 0}
        return type(self)(tuple(swapped.get(t, t) for t in self.tiles), self.num_columns)


def distances(num_rows: int, num_columns: int, *, max_moves: int) -> dict[SlidingPuzzle, int]:
    """Returns the positions within `max_moves` of the solved one, with their number of moves.

    The order depends only on the arguments: nearest first (breadth-first search).

    Example:
        >>> [len(distances(2, 2, max_moves=most)) for most in (0, 1, 2, 6)]
        [1, 3, 5, 12]
    """
    start = SlidingPuzzle.solved(num_rows, num_columns)
    num_moves, waiting = {start: 0}, deque([start])
    while waiting:
        position = waiting.popleft()
        if num_moves[position] == max_moves:
            break
        for move in position.moves():
            reached = position.after(move)
            if reached is not None and reached not in num_moves:
                num_moves[reached] = num_moves[position] + 1
                waiting.append(reached)
    return num_moves


def best_move(position: SlidingPuzzle, num_moves: dict[SlidingPuzzle, int]) -> int:
    """Returns the lowest tile that brings an unsolved position closer, by its `distances`."""
    next_distance = num_moves[position] - 1
    return next(
        move
        for move in position.moves()
        if (reached := position.after(move)) is not None and num_moves.get(reached) == next_distance
    )
