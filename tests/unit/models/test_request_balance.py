"""Requests of several engines: each goes to the one with the fewest outstanding tokens."""

import random

from nemo_rl_core.models.generation.streaming import RequestBalance


def test_a_request_goes_to_the_engine_with_the_fewest_outstanding_tokens() -> None:
    balance = RequestBalance(3)
    assert balance.busy == []
    shares = balance.assign(
        [10, 11, 12, 13, 14], prompt_tokens=[1, 1, 1, 1, 1], new_tokens=[99, 9, 49, 9, 9]
    )
    assert shares == [[0], [1, 3, 4], [2]]  # 100, 30 and 50
    assert balance.busy == [0, 1, 2]
    settled = balance.settle(10)
    assert settled is not None
    assert (settled.engine, settled.prompt_tokens) == (0, 1)
    assert balance.settle(10) is None
    assert balance.busy == [1, 2]
    assert balance.assign([15], prompt_tokens=[5], new_tokens=[5]) == [[0], [], []]


def test_engines_are_never_further_apart_than_one_request() -> None:
    generator, balance = random.Random(0), RequestBalance(4)
    tokens = [0] * 4
    outstanding: dict[int, tuple[int, int]] = {}
    for name in range(400):
        most = generator.randint(2, 100)
        shares = balance.assign([name], prompt_tokens=[1], new_tokens=[most - 1])
        (engine,) = [index for index, rows in enumerate(shares) if rows]
        assert tokens[engine] == min(tokens)
        tokens[engine] += most
        outstanding[name] = (engine, most)
        if name % 3 == 0:
            done = generator.choice(list(outstanding))
            where, count = outstanding.pop(done)
            tokens[where] -= count
            settled_request = balance.settle(done)
            assert settled_request is not None
            assert (settled_request.engine, settled_request.most_tokens) == (where, count)
    assert balance.busy == [0, 1, 2, 3]
    for name in outstanding:
        balance.settle(name)
    assert balance.busy == []


def test_equal_requests_are_assigned_in_turn() -> None:
    shares = RequestBalance(2).assign(range(5), prompt_tokens=[3] * 5, new_tokens=[8] * 5)
    assert shares == [[0, 2, 4], [1, 3]]
