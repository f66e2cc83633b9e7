import json

import pytest
from pydantic import ValidationError

from nemo_rl_core.config.generated_data import GuessNumberData, SlidingPuzzleData
from nemo_rl_core.config.multi_turn import GuessNumberGame, SlidingPuzzleGame
from nemo_rl_core.data.datasets import load_rows
from nemo_rl_core.data.tokenizer import build_arithmetic_tokenizer
from nemo_rl_core.data.turns import turns_of
from nemo_rl_core.environments.factory import make_scorer
from nemo_rl_core.environments.multi_turn.replies import split
from nemo_rl_core.errors import DataError
from nemo_rl_core.games.guess_number import NumberGuess, best_guess
from nemo_rl_core.games.sliding_puzzle import SlidingPuzzle, best_move, distances
from tests.validated import validate_rows

PUZZLES = SlidingPuzzleData(num_train=40, num_validation=20)
GUESSES = GuessNumberData(num_train=60, num_validation=20)


def play(environment, row, move):
    """Plays a row to its end; `move` maps the text of a position to a move."""
    log = [{"role": "user", "content": row["prompt"]}]
    metadata = {**json.loads(row["metadata"]), "answer": row["answer"], "task": row["task"]}
    rewards = []
    while True:
        log.append({"role": "assistant", "content": move(log[-1]["content"])})
        (reply,) = split(environment.step([log], [metadata]), 1)
        assert reply.error is None
        rewards.append(reply.reward)
        if reply.terminated:
            return rewards
        log.append({"role": "environment", "content": reply.observation})
        metadata = reply.metadata


def solver(text, num_moves=distances(2, 3, max_moves=21)):  # noqa: B008 (computed once)
    tiles = tuple(int(tile) for tile in text if tile.isdigit())
    return str(best_move(SlidingPuzzle(tiles, 3), num_moves))


def bisect(text):
    low, high = text.removesuffix("=").split("-")
    return str(best_guess(int(low), int(high)))


@pytest.mark.parametrize(
    ("data", "game", "player"),
    [(PUZZLES, SlidingPuzzleGame(), solver), (GUESSES, GuessNumberGame(), bisect)],
)
def test_an_optimal_player_wins_every_row_in_time(data, game, player):
    environment = make_scorer(game).environment
    train, validation = load_rows(data, seed=3)
    assert (train, validation) == load_rows(data, seed=3)
    assert len({row["prompt"] for row in train + validation}) == len(train + validation)
    for row in train + validation:
        rewards = play(environment, row, player)
        assert rewards == [*[0.0] * (len(rewards) - 1), 1.0]
        assert len(rewards) <= json.loads(row["metadata"])["max_turns"]
        assert row["completion"] == player(row["prompt"])


@pytest.mark.parametrize("data", [PUZZLES, GUESSES, SlidingPuzzleData(size="3x3", max_moves=8)])
def test_rows_use_only_characters_of_the_arithmetic_tokenizer(data):
    tokenizer = build_arithmetic_tokenizer()
    for rows in load_rows(data, seed=0):
        frame = validate_rows(
            rows, tokenizer=tokenizer, max_prompt_tokens=data.max_prompt_tokens, name="train"
        )
        assert len(frame) == len(rows)


def test_puzzles_respect_max_moves_and_store_max_turns():
    data = SlidingPuzzleData(max_moves=3, spare_turns=2, num_train=8, num_validation=2)
    num_moves = distances(2, 3, max_moves=3)
    train, validation = load_rows(data, seed=0)
    for row in train + validation:
        metadata = json.loads(row["metadata"])
        fewest = num_moves[SlidingPuzzle.from_state(metadata["game"])]
        assert 1 <= fewest <= 3
        assert metadata["max_turns"] == fewest + 2


def test_more_rows_than_positions_are_refused():
    # 2 + 3 + 5 positions are one to three moves away.
    with pytest.raises(DataError, match="at most 10, the number"):
        load_rows(SlidingPuzzleData(max_moves=3, num_train=9, num_validation=2), seed=0)
    # 3 + 2 + 1 pairs of bounds with two numbers or more among 0 to 3.
    GuessNumberData(max_number=3, num_train=4, num_validation=2)
    with pytest.raises(ValidationError, match="only 6 different bounds"):
        GuessNumberData(max_number=3, num_train=5, num_validation=2)


def test_an_illegal_move_loses_the_turn_and_costs_the_penalty():
    environment = make_scorer(SlidingPuzzleGame(illegal_penalty=0.25)).environment
    metadata = {"game": SlidingPuzzle((1, 2, 0, 3), 2).state, "max_turns": 2, "own": "kept"}
    moves = ("2", "up", "13", "", "3 3")
    logs = [[{"role": "user", "content": "12-03="}, turn(move)] for move in moves]
    replies = split(environment.step(logs, [metadata] * 5), 5)
    for reply in replies:
        assert (reply.reward, reply.terminated, reply.observation) == (-0.25, False, "12-03=")
        assert reply.metadata == {**metadata, "max_turns": 1}
    (last,) = split(environment.step([[*logs[0]]], [replies[0].metadata]), 1)
    assert (last.reward, last.terminated) == (-0.25, True)


def test_running_out_of_turns_gives_no_reward():
    environment = make_scorer(SlidingPuzzleGame(illegal_penalty=0.25)).environment
    metadata = {"game": SlidingPuzzle((1, 2, 0, 3), 2).state, "max_turns": 1}
    (reply,) = split(environment.step([[turn("1")]], [metadata]), 1)
    assert (reply.reward, reply.terminated, reply.error) == (0.0, True, None)


def test_a_row_without_a_game_fails_only_that_row():
    environment = make_scorer(GuessNumberGame()).environment
    good = {"game": {"secret": 3, "low": 0, "high": 9}, "max_turns": 1}
    bad = [{}, {"game": good["game"]}, {"game": {"tiles": [1, 0]}, "max_turns": 1}, None]
    bad.append({"game": {"secret": 12, "low": 0, "high": 9}, "max_turns": 1})
    replies = split(environment.step([[turn("3")]] * 6, [good, *bad]), 6)
    assert (replies[0].reward, replies[0].error) == (1.0, None)
    for reply in replies[1:]:
        assert "no game of the kind NumberGuess" in reply.error
        assert reply.terminated


def turn(text):
    return {"role": "assistant", "content": text}


def test_an_opening_leads_from_the_first_bounds_to_the_position_of_the_row():
    data = GUESSES.replace(max_opening=3, max_prompt_tokens=64)
    train, validation = load_rows(data, seed=1)
    plain = load_rows(GUESSES, seed=1)
    assert validation == plain[1]
    assert [row["id"] for row in train] == [row["id"] for row in plain[0]]
    environment = make_scorer(GuessNumberGame()).environment
    lengths = set()
    for row, plain_row in zip(train, plain[0], strict=True):
        state = json.loads(row["metadata"])["game"]
        first = json.loads(plain_row["metadata"])["game"]
        assert state["secret"] == first["secret"]
        turns = turns_of(row["prompt"]) or [{"role": "user", "content": row["prompt"]}]
        position = NumberGuess.from_state(first)
        assert turns[0] == {"role": "user", "content": position.text}
        for guess, answer in zip(turns[1::2], turns[2::2], strict=True):
            position = position.after(int(guess["content"]))
            assert position is not None and not position.is_won
            assert answer == {"role": "user", "content": position.text}
        assert position.state == state
        lengths.add(len(turns) // 2)
        rewards = play(environment, {**row, "prompt": position.text}, bisect)
        assert sum(rewards) == 1
    assert lengths == {0, 1, 2, 3}
    validate_rows(
        train,
        tokenizer=build_arithmetic_tokenizer(),
        max_prompt_tokens=64,
        name="train",
        policy=data,
    )
