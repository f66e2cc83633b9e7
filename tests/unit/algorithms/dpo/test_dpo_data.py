"""Hand-computed mismatched prompts and completions of KTO."""

from nemo_rl_core.algorithms.dpo.data import mismatched
from nemo_rl_core.data.loss_masks import SupervisedExample
from nemo_rl_core.data.pairs import PreferencePair


def example(prompt: tuple[int, ...], completion: tuple[int, ...]) -> SupervisedExample:
    mask = (False,) * len(prompt) + (True,) * len(completion)
    return SupervisedExample(token_ids=prompt + completion, loss_mask=mask)


PAIRS = [
    PreferencePair("a", chosen=example((1, 2), (3,)), rejected=example((1, 2), (4, 5))),
    PreferencePair("b", chosen=example((6,), (7, 8)), rejected=example((6,), (9,))),
    PreferencePair("c", chosen=example((10, 11, 12), (13,)), rejected=example((10, 11, 12), (14,))),
]


def test_every_completion_gets_the_prompt_of_the_next_pair() -> None:
    batch = mismatched(PAIRS)
    rows = [
        row[:length].tolist()
        for row, length in zip(batch["input_ids"], batch["input_lengths"], strict=True)
    ]
    assert rows == [
        [6, 3],
        [6, 4, 5],
        [10, 11, 12, 7, 8],
        [10, 11, 12, 9],
        [1, 2, 13],
        [1, 2, 14],
    ]


def test_only_the_completion_counts() -> None:
    assert mismatched(PAIRS)["token_mask"].int().tolist() == [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [0, 0, 1, 1],
        [0, 0, 1, 0],
        [0, 1, 0, 0],
        [0, 1, 0, 0],
    ]


def test_a_single_pair_keeps_its_prompt() -> None:
    assert mismatched(PAIRS[:1])["input_ids"].tolist() == [[1, 2, 3, 0], [1, 2, 4, 5]]
