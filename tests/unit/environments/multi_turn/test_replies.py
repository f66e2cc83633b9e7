"""Anything that an environment returns becomes a reply or an error."""

import math
from dataclasses import replace

import pytest
import torch

from nemo_rl_core.environments.interfaces import EnvironmentReturn
from nemo_rl_core.environments.multi_turn.replies import Reply, checked_replies
from nemo_rl_core.errors import RewardError

LOGS = [
    [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}!"}]
    for n in range(2)
]
UNFINISHED = {"role": "user", "content": "more"}
GOOD = EnvironmentReturn(
    observations=[UNFINISHED, UNFINISHED],
    metadata=["a", "b"],
    next_stop_strings=[None, ["."]],
    rewards=torch.tensor([0.5, 1.0]),
    terminateds=torch.tensor([True, False]),
)


def replies_to(returned):
    class Environment:
        def step(self, message_log_batch, metadata):
            assert list(zip(message_log_batch, metadata, strict=True)) in (
                list(zip(LOGS, [1, 2], strict=True)),
                [(LOGS[0], 1)],
                [(LOGS[1], 2)],
            )
            if isinstance(returned, Exception):
                raise returned
            return returned

    return checked_replies(Environment(), LOGS, [1, 2])


def test_a_return_is_split_into_one_reply_per_row():
    assert replies_to(GOOD) == [
        Reply(0.5, True, "more", "a", None, role="user"),
        Reply(1.0, False, "more", "b", ["."], role="user"),
    ]


def test_ended_conversations_need_no_observation():
    ended = replace(
        GOOD, observations=[], metadata=[], next_stop_strings=[], terminateds=torch.ones(2).bool()
    )
    assert [(reply.reward, reply.terminated) for reply in replies_to(ended)] == [
        (0.5, True),
        (1.0, True),
    ]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"errors": [None, "the board is gone"]}, "the board is gone"),
        ({"rewards": torch.tensor([0.5, math.nan])}, "not finite"),
    ],
)
def test_an_error_affects_only_its_row(change, words):
    good, bad = replies_to(replace(GOOD, **change))
    assert good.reward == 0.5
    assert isinstance(bad, RewardError)
    assert words in str(bad)
    assert "prompt '1?'" in str(bad)
    assert "completion '1!'" in str(bad)


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (LookupError("no board"), "LookupError: no board"),
        (replace(GOOD, rewards=torch.tensor([0.5])), "ValueError"),
        (replace(GOOD, observations=[UNFINISHED]), "ValueError"),
    ],
)
def test_an_invalid_return_fails_every_row(returned, words):
    replies = replies_to(returned)
    assert len(replies) == 2
    assert all(isinstance(reply, RewardError) and words in str(reply) for reply in replies)
