"""Distribution of requests to engines, in groups that are read together."""

import numpy as np
import pytest

from nemo_rl_core.models.generation.remote_completions import Requests, parts_of_engines

PROMPTS = [(1, 2), (3,), (4, 5, 6), (7,)]


@pytest.mark.parametrize("num_engines", [1, 3, 8, 20])
def test_engines_complete_every_request_once(num_engines: int) -> None:
    prompt = np.repeat(np.arange(4), 3)
    seeds = np.arange(12) + 100
    groups = parts_of_engines(Requests(PROMPTS, prompt, {"seeds": seeds}), num_engines)
    assert [len(group) for group in groups] == {1: [1], 3: [3], 8: [8], 20: [8, 8, 4]}[num_engines]
    parts = [part for group in groups for part in group]
    requests = [
        (tuple(part.prompts[number]), seed)
        for part in parts
        for number, seed in zip(
            part.prompt_indices.tolist(), part.columns["seeds"].tolist(), strict=True
        )
    ]
    assert requests == [
        (PROMPTS[number], 100 + index) for index, number in enumerate(prompt.tolist())
    ]
    sizes = [len(part) for part in parts]
    assert sizes == sorted(sizes, reverse=True)  # the first have one more
    assert max(sizes) - min(sizes) <= 1
    for part in parts:  # only prompts with requests, but at least one
        assert len(part.prompts) == max(len(set(part.prompt_indices.tolist())), 1)


def test_a_group_has_only_the_prompts_of_its_engines() -> None:
    requests = Requests(PROMPTS, np.arange(4).repeat(4), {"seeds": np.arange(16)})
    groups = parts_of_engines(requests, 16)
    assert [list(group.requests.prompts) for group in groups] == [PROMPTS[:2], PROMPTS[2:]]
