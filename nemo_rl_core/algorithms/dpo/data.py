"""Completions moved to another prompt, which KTO's baseline is estimated from."""

from collections.abc import Sequence

from nemo_rl_core.data.chat import SupervisedExample
from nemo_rl_core.data.collate import collate
from nemo_rl_core.data.pairs import PreferencePair
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict


def mismatched(pairs: Sequence[PreferencePair]) -> BatchedDataDict:
    """Every completion behind the prompt of the next pair, the last one's behind the first prompt.

    Source: KTO, arXiv:2402.01306, section 4.1, where the baseline must not come from completions
    that were chosen for their prompt.

    Args:
        pairs: `P` pairs; with one pair there is no other prompt, and it keeps its own.

    Returns:
        `B = 2 P` rows as `collate` makes them.
    """
    rows: list[SupervisedExample] = []
    for place, pair in enumerate(pairs):
        other = pairs[(place + 1) % len(pairs)].chosen
        start = _prompt_length(other)
        for example in (pair.chosen, pair.rejected):
            own = _prompt_length(example)
            rows.append(
                SupervisedExample(
                    token_ids=other.token_ids[:start] + example.token_ids[own:],
                    loss_mask=other.loss_mask[:start] + example.loss_mask[own:],
                )
            )
    return collate([row.token_ids for row in rows], [row.loss_mask for row in rows])


def _prompt_length(example: SupervisedExample) -> int:
    return example.loss_mask.index(True)
