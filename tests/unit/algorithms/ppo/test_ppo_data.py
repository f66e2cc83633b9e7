"""Hand-computed advantages and returns from rollouts and values."""

import pytest
import torch

from nemo_rl_core.algorithms.ppo.config import PPOConfig
from nemo_rl_core.algorithms.ppo.data import add_advantages, value_columns
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.functional.advantages import whitened
from nemo_rl_core.rollouts.batch import rollout_batch
from nemo_rl_core.types import Completion, Prompt, Rollout

PROMPT = Prompt(id="p", text="?", token_ids=(7, 8), answer="", task="t")


def batch_of(*, truncated: bool) -> BatchedDataDict:
    """Two tokens and reward 1; three tokens, with an observation as the second, and reward 0."""
    several = Completion((5, 9, 6), (-0.5, 0.0, -0.5), truncated, (True, False, True))
    rollouts = [
        Rollout(PROMPT, Completion((5, 6), (-0.5, -0.5), truncated=False), "x", reward=1.0),
        Rollout(PROMPT, several, "x", reward=0.0),
    ]
    batch = rollout_batch(rollouts)
    # Values of the prefixes that end with each token; the last is that of the full rollout.
    batch.update(value_columns(torch.tensor([[9, 0.5, 0.25, 8, 0], [9, 0.5, 7, 0.25, 4]]), batch))
    return batch


def computed(batch: BatchedDataDict, **values: object) -> tuple[torch.Tensor, torch.Tensor]:
    config = PPOConfig.model_validate({"kl": None, "gamma": 0.5, "lam": 0.5, **values})
    result = add_advantages(batch, config)
    return result["advantages"], result["returns"]


def test_values_are_aligned_with_the_choice_of_their_tokens():
    batch = batch_of(truncated=True)
    assert batch["old_values"].tolist() == [[9, 0.5, 0.25, 8], [9, 0.5, 7, 0.25]]
    assert batch["last_values"].tolist() == [8, 4]


# First row: delta = 1 - 0.25 = 0.75 at its end; 0.5 * 0.25 - 0.5 = -0.375 before it, and
# there A = -0.375 + 0.25 * 0.75 = -0.1875. Returns are A + V.
FIRST = [0, -0.1875, 0.75, 0], [0, 0.3125, 1, 0]
CASES = {
    # The second row's end: delta = 0 - 0.25; before it -0.375 + 0.25 * -0.25 = -0.4375.
    "ended": ([0, -0.4375, 0, -0.25], [0, 0.0625, 0, 0]),
    # Bootstrapped: delta = 0 + 0.5 * 4 - 0.25 = 1.75; before it -0.375 + 0.25 * 1.75 = 0.0625.
    "bootstrapped": ([0, 0.0625, 0, 1.75], [0, 0.5625, 0, 2]),
}


@pytest.mark.parametrize(
    ("truncated", "bootstrap", "second"),
    [
        (True, False, CASES["ended"]),  # the default: worth nothing after its last token
        (True, True, CASES["bootstrapped"]),
        (False, True, CASES["ended"]),
        (False, False, CASES["ended"]),
    ],
)
def test_the_bootstrapped_value_of_truncated_completions(truncated, bootstrap, second):
    batch = batch_of(truncated=truncated)
    advantages, returns = computed(batch, bootstrap_truncated=bootstrap)
    mask = batch["token_mask"].bool()
    by_hand = torch.tensor([FIRST[0], second[0]])
    torch.testing.assert_close(returns, torch.tensor([FIRST[1], second[1]]))
    torch.testing.assert_close(advantages, whitened(by_hand, mask))


def test_the_kl_is_subtracted_from_the_reward_of_every_token():
    batch = batch_of(truncated=False)
    nan = float("nan")
    batch["prev_logprobs"] = torch.full((2, 4), -1.0)
    batch["reference_logprobs"] = torch.tensor([[nan, -3, -1.5, nan], [nan, -3, nan, -1.5]])
    _, returns = computed(batch, kl={"beta": 0.1}, gamma=1.0, lam=1.0)
    # KL 2 and 0.5: 1 - 0.05 at the end and 0.2 less before it; 0 - 0.05, and 0.2 less.
    by_hand = [[0, 0.75, 0.95, 0], [0, -0.25, 0, -0.05]]
    torch.testing.assert_close(returns, torch.tensor(by_hand))


def test_nothing_is_bootstrapped_unless_asked_for():
    assert PPOConfig().bootstrap_truncated is False
