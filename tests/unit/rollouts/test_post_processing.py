"""Rollouts before and after the environment has seen all of them."""

from typing import Any

from nemo_rl_core.environments.interfaces import reads_rewards_alone
from nemo_rl_core.rollouts.sampler import mean_metrics, post_processed
from nemo_rl_core.types import Completion, Prompt, Rollout


def rollout(text: str, reward: float | None) -> Rollout:
    prompt = Prompt("p", "1+2=", (1, 2), "3", "sums")
    made = Rollout(prompt, Completion((4, 5), (-0.5, -0.1), truncated=False), text)
    return made.failed("out of paper") if reward is None else made.scored(reward)


class NoRepetition:
    """An answer that somebody else has given as well is worth nothing."""

    def global_post_process_and_metrics(self, batch: dict[str, Any]) -> Any:
        texts = batch["completions"]
        repeated = [texts.count(text) > 1 for text in texts]
        for place, is_repeated in enumerate(repeated):
            if is_repeated:
                batch["rewards"][place] = 0
        assert batch["prompts"] == ["1+2="] * len(texts)
        assert batch["answers"] == ["3"] * len(texts)
        assert batch["rollout_lengths"].tolist() == [2] * len(texts)
        return batch, {"repeated_fraction": sum(repeated) / len(texts)}


def test_rewards_are_adapted_in_their_places() -> None:
    # 0.1 is no float32; nobody asked for another reward.
    given = [rollout("3", 1.0), rollout("4", None), rollout("5", 0.1), rollout("3", 1.0)]
    rollouts, metrics = post_processed(NoRepetition(), given)
    assert [each.reward for each in rollouts] == [0.0, None, 0.1, 0.0]
    assert rollouts[1] is given[1] and rollouts[2] is given[2]
    assert metrics == {"repeated_fraction": 2 / 3}


def test_a_hook_that_reads_rewards_alone_gets_nothing_else_and_its_override_everything() -> None:
    class Mean:
        seen: list[str]

        @reads_rewards_alone
        def global_post_process_and_metrics(self, batch: dict[str, Any]) -> Any:
            self.seen = sorted(batch)
            return batch, {"mean": float(batch["rewards"].mean())}

    class Reads(Mean):
        def global_post_process_and_metrics(self, batch: dict[str, Any]) -> Any:
            assert batch["completions"] == ["3", "5"]
            return super().global_post_process_and_metrics(batch)

    given = [rollout("3", 1.0), rollout("4", None), rollout("5", 0.5)]
    alone, overridden = Mean(), Reads()
    assert post_processed(alone, given) == post_processed(overridden, given)
    assert post_processed(alone, given) == (given, {"mean": 0.75})
    assert alone.seen == ["rewards"]
    assert {"rewards", "completions", "input_ids"} <= set(overridden.seen)


def test_nothing_is_asked_where_nothing_was_scored() -> None:
    given = [rollout("3", None)]
    assert post_processed(NoRepetition(), given) == (given, {})


def test_draws_count_by_their_rollouts() -> None:
    draws = [(3, {"won": 1.0}), (1, {"won": 0.0, "late": 5.0}), (2, {"late": 2.0})]
    assert mean_metrics(draws) == {"won": 0.75, "late": 3.0}
    assert mean_metrics([]) == {}
