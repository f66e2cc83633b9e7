"""Episodes of several turns, each turn as a training sample, for comparison with one sample."""

from collections.abc import Iterable
from dataclasses import replace

from nemo_rl_core.types import Completion, Rollout


def split_by_turn(rollouts: Iterable[Rollout]) -> list[Rollout]:
    """Returns a sample for each turn, whose prompt is all that the policy read before it.

    The policy reads the same tokens as in one sample, so gradients must be the same.
    """
    samples = []
    for rollout in rollouts:
        prompt, completion = rollout.prompt, rollout.completion
        ids, mask = completion.token_ids, completion.token_mask
        starts = [n for n, is_new in enumerate(mask) if is_new and (n == 0 or not mask[n - 1])]
        if len(starts) != len(rollout.turn_rewards):
            samples.append(rollout)  # failed
            continue
        for part, (start, stop) in enumerate(zip(starts, [*starts[1:], len(ids)], strict=True)):
            end = start + mask[start:stop].count(True)
            samples.append(
                replace(
                    rollout,
                    prompt=replace(prompt, token_ids=prompt.token_ids + ids[:start]),
                    completion=Completion(
                        ids[start:end],
                        completion.logprobs[start:end],
                        completion.truncated and part == len(starts) - 1,
                        weight_versions=completion.weight_versions[start:end],
                        num_unread_tokens=completion.num_unread_tokens
                        if part == len(starts) - 1
                        else 0,
                    ),
                    turn_rewards=rollout.turn_rewards[part : part + 1],
                    part=part,
                )
            )
    return samples
