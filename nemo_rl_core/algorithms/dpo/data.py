"""Mismatched prompts and completions, for KTO's baseline."""

from collections.abc import Sequence

from nemo_rl_core.data.loss_masks import SupervisedExample
from nemo_rl_core.data.pairs import PreferencePair
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict, collate


def mismatched(pairs: Sequence[PreferencePair]) -> BatchedDataDict:
    """Pairs every completion with the prompt of the next pair, cyclically; `B = 2 P` rows.

    Source: KTO, arXiv:2402.01306, section 4.1, where the baseline must not come from completions
    that were chosen for their prompt. A single pair keeps its prompt.
    """
    rows: list[SupervisedExample] = []
    for index, pair in enumerate(pairs):
        other = pairs[(index + 1) % len(pairs)].chosen
        start = _prompt_length(other)
        for example in (pair.chosen, pair.rejected):
            prompt_length = _prompt_length(example)
            rows.append(
                SupervisedExample(
                    token_ids=other.token_ids[:start] + example.token_ids[prompt_length:],
                    loss_mask=other.loss_mask[:start] + example.loss_mask[prompt_length:],
                )
            )
    return collate([row.token_ids for row in rows], [row.loss_mask for row in rows])


def _prompt_length(example: SupervisedExample) -> int:
    return example.loss_mask.index(True)
