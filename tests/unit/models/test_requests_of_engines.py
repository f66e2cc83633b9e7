"""Requests dealt out to engines, as neighbours read them together."""

import numpy as np
import pytest

from nemo_rl_core.models.generation.where_made import requests_of_engines

PROMPTS = [(1, 2), (3,), (4, 5, 6), (7,)]


@pytest.mark.parametrize("num_engines", [1, 3, 8, 20])
def test_engines_complete_every_request_once(num_engines: int) -> None:
    prompt = np.repeat(np.arange(4), 3)
    seeds = np.arange(12) + 100
    wholes = requests_of_engines(PROMPTS, prompt, seeds, num_engines)
    assert [len(whole) for whole in wholes] == {1: [1], 3: [3], 8: [8], 20: [8, 8, 4]}[num_engines]
    parts = [part for whole in wholes for part in whole]
    asked = [
        (tuple(part["prompts"][number]), seed)
        for part in parts
        for number, seed in zip(part["prompt"].tolist(), part["seeds"].tolist(), strict=True)
    ]
    assert asked == [(PROMPTS[number], 100 + place) for place, number in enumerate(prompt.tolist())]
    sizes = [len(part["prompt"]) for part in parts]
    assert sizes == sorted(sizes, reverse=True)  # the first have one more
    assert max(sizes) - min(sizes) <= 1
    for part in parts:  # no prompt that is not asked, but one where nothing is
        assert len(part["prompts"]) == max(len(set(part["prompt"].tolist())), 1)


def test_a_whole_has_the_prompts_of_its_engines_alone() -> None:
    wholes = requests_of_engines(PROMPTS, np.arange(4).repeat(4), np.arange(16), 16)
    assert [list(whole.prompts) for whole in wholes] == [PROMPTS[:2], PROMPTS[2:]]
