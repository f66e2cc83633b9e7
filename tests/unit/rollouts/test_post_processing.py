"""Rollouts before and after the environment's post-processing."""

from typing import Any

from nemo_rl_core.environments.interfaces import reads_only_rewards
from nemo_rl_core.rollouts.sampler import mean_metrics, post_process_rollouts
from nemo_rl_core.types import Completion, Prompt, Rollout


def rollout(text: str, reward: float | None) -> Rollout:
    prompt = Prompt("p", "1+2=", (1, 2), "3", "sums")
    made = Rollout(prompt, Completion((4, 5), (-0.5, -0.25), truncated=False), text)
    return made.failed("out of paper") if reward is None else made.scored(reward)


class NoRepetition:
    """Gives repeated answers a reward of 0."""

    def global_post_process_and_metrics(self, batch: dict[str, Any]) -> Any:
        texts = batch["completions"]
        repeated = [texts.count(text) > 1 for text in texts]
        for index, is_repeated in enumerate(repeated):
            if is_repeated:
                batch["rewards"][index] = 0
        assert batch["prompts"] == ["1+2="] * len(texts)
        assert batch["answers"] == ["3"] * len(texts)
        assert batch["rollout_lengths"].tolist() == [2] * len(texts)
        return batch, {"repeated_fraction": sum(repeated) / len(texts)}


def test_changed_rewards_keep_their_positions() -> None:
    # 0.1 is not a float32; it must come back unchanged.
    scored = [rollout("3", 1.0), rollout("4", None), rollout("5", 0.1), rollout("3", 1.0)]
    rollouts, metrics = post_process_rollouts(NoRepetition(), scored)
    assert [each.reward for each in rollouts] == [0.0, None, 0.1, 0.0]
    assert rollouts[1:3] == scored[1:3]
    assert metrics == {"repeated_fraction": 2 / 3}


def test_a_rewards_only_hook_gets_no_tokens_and_its_override_everything() -> None:
    class Mean:
        seen: list[str]

        @reads_only_rewards
        def global_post_process_and_metrics(self, batch: dict[str, Any]) -> Any:
            self.seen = sorted(batch)
            return batch, {"mean": float(batch["rewards"].mean())}

    class Reads(Mean):
        def global_post_process_and_metrics(self, batch: dict[str, Any]) -> Any:
            assert batch["completions"] == ["3", "5"]
            return super().global_post_process_and_metrics(batch)

    scored = [rollout("3", 1.0), rollout("4", None), rollout("5", 0.5)]
    rewards_only, overridden = Mean(), Reads()
    assert post_process_rollouts(rewards_only, scored) == post_process_rollouts(overridden, scored)
    assert post_process_rollouts(rewards_only, scored) == (scored, {"mean": 0.75})
    assert rewards_only.seen == ["messages", "rewards"]
    assert {"rewards", "completions", "input_ids"} <= set(overridden.seen)


def test_the_hook_is_not_called_without_scored_rollouts() -> None:
    scored = [rollout("3", None)]
    assert post_process_rollouts(NoRepetition(), scored) == (scored, {})


def test_draws_count_by_their_rollouts() -> None:
    draws = [(3, {"won": 1.0}), (1, {"won": 0.0, "late": 5.0}), (2, {"late": 2.0})]
    assert mean_metrics(draws) == {"won": 0.75, "late": 3.0}
    assert mean_metrics([]) == {}
