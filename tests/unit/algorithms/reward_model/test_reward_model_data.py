"""Ranked pairs as a batch, by hand."""

from nemo_rl_core.algorithms.reward_model.data import RankedPair, reward_model_batch
from nemo_rl_core.data.chat import SupervisedExample


def example(*token_ids):
    return SupervisedExample(token_ids, (False,) + (True,) * (len(token_ids) - 1))


def test_a_batch_by_hand():
    batch = reward_model_batch(
        [
            RankedPair(example(1, 5), example(1, 6, 7), margin=0.5),
            RankedPair(example(1, 8), example(1, 9)),
        ]
    )
    assert batch["input_ids"].tolist() == [[1, 5, 0], [1, 6, 7], [1, 8, 0], [1, 9, 0]]
    assert batch["input_lengths"].tolist() == [2, 3, 2, 2]
    assert batch["pair_ids"].tolist() == [0, 0, 1, 1]
    assert batch["is_chosen"].tolist() == [True, False, True, False]
    assert batch["margins"].tolist() == [0.5, 0.5, 0, 0]
    assert batch.size == 4
