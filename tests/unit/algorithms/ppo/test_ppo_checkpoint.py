"""Policy and critic are saved together, both in the background."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_core.algorithms.ppo.policy_and_critic import PolicyAndCritic
from nemo_rl_core.checkpoints.written_files import WrittenFile
from nemo_rl_core.trainers.loop import SavesInBackground, SavesShards


@dataclass
class Writer:
    """A model whose checkpoint is written on request."""

    is_written: bool = False
    error: Exception | None = None
    calls: list[tuple[str, Any]] = field(default_factory=list)

    def start_checkpoint(self, path: Path) -> None:
        assert path.is_dir()
        self.calls.append(("start", path))

    def checkpoint_is_written(self) -> bool:
        return self.is_written

    def start_sharded_checkpoint(self, path: Path) -> None:
        self.calls.append(("shards", path))

    def finish_checkpoint(self) -> dict[str, WrittenFile]:
        self.calls.append(("finish", None))
        if self.error is not None:
            raise self.error
        return {"trainer/x": WrittenFile("0" * 64, 1)}


def test_training_continues_until_both_are_written(tmp_path: Path) -> None:
    policy, critic = Writer(), Writer()
    both = PolicyAndCritic(policy, critic)
    assert isinstance(both, SavesInBackground)
    both.start_checkpoint(tmp_path)
    assert policy.calls == [("start", tmp_path)]
    assert critic.calls == [("start", tmp_path / "critic")]
    written = []
    for policy.is_written, critic.is_written in ((True, False), (False, True), (True, True)):
        written.append(both.checkpoint_is_written())
    assert written == [False, False, True]
    assert set(both.finish_checkpoint()) == {"trainer/x", "critic/trainer/x"}
    assert policy.calls[1:] == critic.calls[1:] == [("finish", None)]


def test_a_policy_that_cannot_be_written_leaves_no_critic_unfinished(tmp_path: Path) -> None:
    policy, critic = Writer(error=OSError("full")), Writer()
    with pytest.raises(OSError, match="full"):
        PolicyAndCritic(policy, critic).save_checkpoint(tmp_path)
    assert critic.calls == [("start", tmp_path / "critic"), ("finish", None)]


def test_both_are_saved_only_as_shards(tmp_path: Path) -> None:
    policy, critic = Writer(), Writer()
    both = PolicyAndCritic(policy, critic)
    assert isinstance(both, SavesShards)
    both.start_sharded_checkpoint(tmp_path)
    assert (policy.calls, critic.calls) == (
        [("shards", tmp_path)],
        [("shards", tmp_path / "critic")],
    )
