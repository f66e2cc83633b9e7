from collections import Counter

import pytest

from nemo_rl_core.games.sliding_puzzle import SlidingPuzzle, best_move, distances


def test_a_tile_slides_into_the_gap_beside_it_and_back():
    position = SlidingPuzzle((1, 2, 3, 4, 0, 5), 3)
    assert position.text == "123-405="
    assert position.moves() == (2, 4, 5)
    moved = position.after(2)
    assert moved == SlidingPuzzle((1, 0, 3, 4, 2, 5), 3)
    assert moved.after(2) == position


def test_tiles_elsewhere_and_the_gap_itself_do_not_move():
    position = SlidingPuzzle((1, 2, 3, 4, 0, 5), 3)
    # 3 touches the gap by a corner only, and 1 only where a row ends and the next begins.
    assert [position.after(move) for move in (0, 1, 3, 6, 99)] == [None] * 5
    corner = SlidingPuzzle((1, 2, 0, 3, 4, 5), 3)
    assert corner.moves() == (2, 5)


def test_the_goal_is_order_with_the_gap_last():
    assert SlidingPuzzle.solved(2, 3).is_won
    assert not SlidingPuzzle((0, 1, 2, 3, 4, 5), 3).is_won


def test_states_come_back_and_others_are_refused():
    position = SlidingPuzzle((1, 2, 0, 3), 2)
    assert SlidingPuzzle.from_state(position.state) == position
    for tiles, num_columns in (([1, 2, 3], 2), ([1, 1, 0, 3], 2), ([], 0), ([1, 2, 3, 4], 2)):
        with pytest.raises(ValueError, match="no puzzle"):
            SlidingPuzzle.from_state({"tiles": tiles, "num_columns": num_columns})


@pytest.mark.parametrize(
    ("shape", "counts"),
    [
        # The 15-puzzle's small relatives: known numbers of positions by their distance.
        ((2, 2), [1, 2, 2, 2, 2, 2, 1]),
        (
            (2, 3),
            [1, 2, 3, 5, 6, 7, 10, 12, 12, 16, 23, 25, 28, 39, 44, 40, 29, 21, 18, 12, 6, 1],
        ),
        ((3, 3), [1, 2, 4, 8, 16, 20, 39, 62, 116]),
    ],
)
def test_positions_by_distance_are_the_known_numbers(shape, counts):
    by_distance = Counter(distances(*shape, max_moves=len(counts) - 1).values())
    assert [by_distance[distance] for distance in range(len(counts))] == counts


def test_the_best_moves_solve_every_position_in_the_fewest_moves():
    known = distances(2, 3, max_moves=21)
    for start, fewest in known.items():
        position = start
        for _ in range(fewest):
            assert not position.is_won
            position = position.after(best_move(position, known))
        assert position.is_won
