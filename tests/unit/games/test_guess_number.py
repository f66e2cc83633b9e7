import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_core.games.guess_number import NumberGuess, best_guess, num_guesses


def test_a_guess_narrows_the_bounds():
    position = NumberGuess(secret=7, low=0, high=9)
    assert position.after(3) == NumberGuess(7, 4, 9)
    assert position.after(8) == NumberGuess(7, 0, 7)
    assert position.after(7).is_won
    assert not position.is_won


def test_guesses_outside_the_bounds_are_against_the_rules():
    position = NumberGuess(secret=7, low=4, high=9)
    assert [position.after(guess) for guess in (3, 10)] == [None, None]


def test_the_secret_is_in_no_text():
    texts = {NumberGuess(secret, 10, 99).text for secret in range(10, 100)}
    assert texts == {"10-99="}


@given(st.integers(0, 99), st.integers(0, 60), st.data())
def test_binary_search_finds_every_secret_in_the_turns_that_are_allowed(low, width, data):
    high = low + width
    position = NumberGuess(data.draw(st.integers(low, high)), low, high)
    taken = 0
    while not position.is_won:
        position = position.after(best_guess(position.low, position.high))
        taken += 1
    assert taken <= num_guesses(low, high)


def test_no_player_needs_fewer_turns_in_the_worst_case():
    # The value of the game: 1 + the worse half, best over all guesses.
    value = [0]
    for count in range(1, 101):
        value.append(1 + min(max(value[below], value[count - 1 - below]) for below in range(count)))
        assert num_guesses(1, count) == value[count]


def test_states_come_back_and_others_are_refused():
    position = NumberGuess(7, 4, 9)
    assert NumberGuess.from_state(position.state) == position
    with pytest.raises(ValueError, match="not within 8-9"):
        NumberGuess.from_state({"secret": 7, "low": 8, "high": 9})
