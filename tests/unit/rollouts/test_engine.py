"""Seeds of requests are distinct and the same in every run."""

from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_core.rollouts.engine import request_seed


def test_a_seed_is_pinned() -> None:
    # Any change here makes every earlier run impossible to reproduce. The first four bytes of
    # blake2b("0/1/2"), shifted right by two bits, plus the index of the sample.
    assert request_seed(0, 1, 2, 3) == 449_658_087 + 3


def test_every_turn_has_a_different_seed() -> None:
    # From blake2b("0/1/2/1"), for the turn after the first.
    assert request_seed(0, 1, 2, 3, 1) == 411_304_429 + 3
    assert len({request_seed(0, 1, 2, 3, turn) for turn in range(100)}) == 100
    assert request_seed(0, 1, 2, 3, 0) == request_seed(0, 1, 2, 3)


def test_the_seeds_of_many_steps_differ() -> None:
    seeds = [
        request_seed(0, step, prompt, sample)
        for step in range(20)
        for prompt in range(32)
        for sample in range(16)
    ]
    # The runs of 16 of 640 prompts begin anywhere in 2^30, and overlap in about 640^2 x 16 / 2^30 =
    # 0.006 pairs: none, and for these arguments it stays none.
    assert len(set(seeds)) == len(seeds)


@given(*[st.integers(0, 10**6)] * 4)
def test_a_seed_fits_into_31_bits(seed: int, step: int, prompt: int, sample: int) -> None:
    assert 0 <= request_seed(seed, step, prompt, sample) < 2**31


@given(*[st.integers(0, 99)] * 4)
def test_swapped_indices_have_different_seeds(
    seed: int, step: int, prompt: int, sample: int
) -> None:
    # Digits shifted from one number to the next, as 1/11 and 11/1, must not give one key.
    assert request_seed(seed, step, prompt, sample) != request_seed(
        seed, step, sample, prompt + 100
    )
