"""Hand-computed conversations: their tokens, the writer of each token, and their ends."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nemo_rl_core.config.multi_turn import GuessNumberGame
from nemo_rl_core.environments.factory import make_scorer
from nemo_rl_core.rollouts.batch import with_logprobs_of
from nemo_rl_core.rollouts.engine import request_seed
from nemo_rl_core.rollouts.episode import Bounds
from nemo_rl_core.rollouts.multi_turn import MultiTurnRollouts
from tests.unit.rollouts.conftest import Countdown, Scripted

WIDE = Bounds(max_turns=9, max_tokens=40, max_new_tokens=6)
BOS, EOS = 1, 2


def digits(request):
    """Returns 5, then 2, then always 1."""
    turn = request["text"].count("<eos>")
    return "521"[min(turn, 2)]


def test_a_conversation_by_hand(play, ask, tokenizer):
    (rollout,), engine, game = play([ask("8=", "8", level=4)], digits, bounds=WIDE)
    # <bos>8= then 5<eos> 3= 2<eos> 1= 1<eos>, and 0 is left
    assert tokenizer.decode(rollout.completion.token_ids) == "5<eos>3=2<eos>1=1<eos>"
    assert rollout.completion.logprobs == (-1, -2, 0, 0, -1, -2, 0, 0, -1, -2)
    by_policy = (True, True, False, False, True, True, False, False, True, True)
    assert rollout.completion.generated == rollout.completion.token_mask == by_policy
    assert not rollout.completion.truncated
    assert (rollout.reward, rollout.turn_rewards) == (1.5, (0.5, 0.5, 0.5))
    assert rollout.text == "5\n2\n1"
    assert rollout.messages == (
        {"role": "user", "content": "8="},
        {"role": "assistant", "content": "5"},
        {"role": "environment", "content": "3="},
        {"role": "assistant", "content": "2"},
        {"role": "environment", "content": "1="},
        {"role": "assistant", "content": "1"},
    )
    assert (rollout.group, rollout.sample, rollout.error) == (0, 0, None)
    requests = [row for (row,) in engine.asked]
    assert [row["text"] for row in requests] == [
        "<bos>8=",
        "<bos>8=5<eos>3=",
        "<bos>8=5<eos>3=2<eos>1=",
    ]
    # The environment's stop string, from the turn after it was set.
    assert [row["stop"] for row in requests] == [None, ["-"], ["-"]]
    assert [row["seed"] for row in requests] == [
        request_seed(3, 5, 0, 0, turn) for turn in range(3)
    ]
    assert game.seen[0][1] == {"level": 4, "answer": "8", "task": "countdown"}
    assert game.seen[1][1] == {"answer": "3"}


def test_a_policy_fills_in_the_logprobs_of_all_turns(ask, tokenizer):
    class Silent(Scripted):
        def generate(self, data, greedy):
            output = super().generate(data, greedy)
            del output["logprobs"]
            return output

    class Policy:
        def get_logprobs(self, batch):
            position = torch.arange(1, batch["input_ids"].shape[1])
            return {"logprobs": -position.expand(batch["token_mask"].shape).float()}

    engine = MultiTurnRollouts(
        Silent(tokenizer, digits), tokenizer, Countdown(), seed=3, bounds=WIDE
    )
    rollouts = engine.run([ask("8=", "8")], num_generations_per_prompt=1, step=5)
    assert not engine.has_logprobs
    assert np.isnan(rollouts[0].completion.logprobs).tolist() == [
        *(True, True, False, False, True, True, False, False, True, True)
    ]
    (rollout,) = with_logprobs_of(Policy(), rollouts)
    assert rollout.completion.logprobs == (-3, -4, 0, 0, -7, -8, 0, 0, -11, -12)
    assert (rollout.reward, rollout.text) == (1.5, "5\n2\n1")


def test_a_single_turn_is_an_ordinary_completion(play, ask):
    (rollout,), _, _ = play([ask("5=", "5")], digits, bounds=WIDE)
    assert rollout.completion.generated == ()
    assert rollout.turn_rewards == (0.5,)


def test_tokens_are_never_encoded_again(play, ask, tokenizer):
    # The unknown token decodes to a text that would be encoded as three others.
    (rollout,), engine, _ = play([ask("9=", "9")], lambda request: "1a!", bounds=WIDE)
    assert rollout.completion.token_ids[1] == tokenizer.unk_token_id
    assert engine.asked[0][0]["ids"] == [BOS, *tokenizer.encode("9=", add_special_tokens=False)]


def test_the_first_turn_stops_where_the_environment_says(play, ask):
    _, engine, _ = play([ask("8=", "8")], digits, bounds=WIDE, first_stops=["=", "+"])
    assert [row["stop"] for (row,) in engine.asked] == [["=", "+"], ["-"], ["-"]]


def test_a_truncated_turn_is_answered_and_the_conversation_continues(play, ask, tokenizer):
    bounds = Bounds(max_turns=9, max_tokens=40, max_new_tokens=1)
    (rollout,), engine, _ = play([ask("6=", "6")], digits, bounds=bounds)
    # 5 and no <eos>, which the template appends: not the policy's, and not trained on
    assert tokenizer.decode(rollout.completion.token_ids) == "5<eos>1=2"
    assert rollout.completion.token_mask == (True, False, False, False, True)
    assert [row["text"] for (row,) in engine.asked] == ["<bos>6=", "<bos>6=5<eos>1="]
    assert rollout.turn_rewards == (0.5, 0.5)
    # The last turn was cut as well.
    assert rollout.completion.truncated


@pytest.mark.parametrize(
    ("bounds", "turn_rewards"),
    [
        # Every game below has 5 turns, whose penalty is 0.25 each; `77` is out of its bounds.
        # All are played, truncated or not:
        (Bounds(max_turns=9, max_tokens=90, max_new_tokens=6), [-0.25] * 5),
        (Bounds(max_turns=9, max_tokens=90, max_new_tokens=1), [-0.25] * 5),
        # the room is used up after two turns: 77<eos>0-6= are 7 tokens, and 77<eos> are 10.
        # The three turns that are left cost as much as if they had been lost.
        (Bounds(max_turns=9, max_tokens=11, max_new_tokens=6), [-0.25, -0.25 - 3 * 0.25]),
        (Bounds(max_turns=9, max_tokens=5, max_new_tokens=6), [-0.25 - 4 * 0.25]),
        # The policy did not cause the bound on turns, so it costs nothing.
        (Bounds(max_turns=2, max_tokens=90, max_new_tokens=6), [-0.25, -0.25]),
        (Bounds(max_turns=2, max_tokens=11, max_new_tokens=6), [-0.25, -0.25]),
    ],
)
def test_truncation_never_avoids_penalties(play, ask, bounds, turn_rewards):
    game = {"game": {"secret": 3, "low": 0, "high": 6}, "max_turns": 5}
    environment = make_scorer(GuessNumberGame(illegal_penalty=0.25)).environment
    prompts = [ask("0-6=", "3", **game)]
    (rollout,), _, _ = play(prompts, lambda _: "77", bounds=bounds, environment=environment)
    assert list(rollout.turn_rewards) == turn_rewards
    assert rollout.reward == sum(turn_rewards)


def test_a_game_won_on_the_last_token_forfeits_nothing(play, ask):
    game = {"game": {"secret": 3, "low": 0, "high": 6}, "max_turns": 5}
    environment = make_scorer(GuessNumberGame(illegal_penalty=0.25)).environment
    bounds = Bounds(max_turns=9, max_tokens=1, max_new_tokens=6)
    prompts = [ask("0-6=", "3", **game)]
    (rollout,), _, _ = play(prompts, lambda _: "3", bounds=bounds, environment=environment)
    assert rollout.turn_rewards == (1.0,)


@pytest.mark.parametrize(
    ("bounds", "turns", "num_tokens", "num_unread"),
    [
        (Bounds(max_turns=2, max_tokens=40, max_new_tokens=6), 2, 6, 0),
        # 5<eos>3= are 4 tokens, and the policy's next turn has 1 token left: 2, without <eos>,
        # which the environment's <eos>1= would have brought
        (Bounds(max_turns=9, max_tokens=5, max_new_tokens=6), 2, 5, 3),
        # the environment's 3= would leave nothing to the policy
        (Bounds(max_turns=9, max_tokens=4, max_new_tokens=6), 1, 2, 2),
    ],
)
def test_bounds_truncate(play, ask, bounds, turns, num_tokens, num_unread):
    (rollout,), engine, _ = play([ask("8=", "8")], digits, bounds=bounds)
    assert rollout.completion.truncated
    assert len(rollout.turn_rewards) == len(engine.asked) == turns
    assert rollout.reward == 0.5 * turns
    assert len(rollout.completion.token_ids) == num_tokens
    assert rollout.completion.num_unread_tokens == num_unread
    assert all(row["limit"] <= bounds.max_new_tokens for rows in engine.asked for row in rows)


def test_an_unscored_conversation_ends_without_affecting_others(play, ask):
    def answer(request):
        return "+" if request["text"].startswith("<bos>7") and "<eos>" in request["text"] else "3"

    good, bad = play([ask("6=", "6"), ask("7=", "7")], answer, bounds=WIDE)[0]
    assert (good.reward, good.error) == (1.0, None)
    assert bad.reward is None
    assert "'Countdown' could not score for prompt '7='" in bad.error
    assert "'+' is not a digit" in bad.error
    assert "\n" not in bad.error


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=5), st.integers(1, 3))
def test_conversations_do_not_depend_on_each_other(play, ask, answers, group):
    def by_seed(request):
        return str(1 + request["seed"] % 9)

    prompts = [ask(f"{answer}=", str(answer)) for answer in answers]
    together, engine, _ = play(prompts, by_seed, bounds=WIDE, group=group)
    separately = [
        rollout
        for index, prompt in enumerate(prompts)
        for rollout in play([prompt], by_seed, bounds=WIDE, group=group, first_group=index)[0]
    ]
    assert together == separately
    assert len(engine.asked) == max(len(rollout.turn_rewards) for rollout in together)
    positions = [(rollout.group, rollout.sample) for rollout in together]
    assert positions == [(index, k) for index in range(len(prompts)) for k in range(group)]
