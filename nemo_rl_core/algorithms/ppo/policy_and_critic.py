"""A policy and its critic, saved and loaded as one."""

from dataclasses import dataclass
from pathlib import Path

from nemo_rl_core.checkpoints.written_files import WrittenFile
from nemo_rl_core.models.policy import Policy
from nemo_rl_core.models.policy.custom import CustomPolicyAdapter

CRITIC = "critic"
"""The critic's worker group, and its folder in a checkpoint."""


@dataclass(frozen=True)
class PolicyAndCritic:
    """Two models that are saved and restored together."""

    policy: Policy
    critic: Policy

    def save_checkpoint(self, path: Path) -> None:
        """Writes the policy into `path`, and the critic into `path/critic`."""
        self.start_checkpoint(path)
        self.finish_checkpoint()

    def start_checkpoint(self, path: Path) -> None:
        """Copies both states and starts to write them; the writing may continue after this call."""
        self.policy.start_checkpoint(path)
        (path / CRITIC).mkdir()
        self.critic.start_checkpoint(path / CRITIC)

    def start_sharded_checkpoint(self, path: Path) -> None:
        """Starts a checkpoint like `start_checkpoint`, but without the folders `model/`."""
        self.policy.start_sharded_checkpoint(path)
        (path / CRITIC).mkdir()
        self.critic.start_sharded_checkpoint(path / CRITIC)

    def checkpoint_is_written(self) -> bool:
        """Returns True if `finish_checkpoint` would not wait."""
        return self.policy.checkpoint_is_written() and self.critic.checkpoint_is_written()

    def finish_checkpoint(self) -> dict[str, WrittenFile]:
        """Waits until the folder is complete; raises errors of both writers."""
        try:
            written = self.policy.finish_checkpoint()
        finally:
            critic_files = self.critic.finish_checkpoint()
        return written | {f"{CRITIC}/{name}": file for name, file in critic_files.items()}

    def load_checkpoint(self, path: Path) -> None:
        """Restores both models."""
        self.policy.load_checkpoint(path)
        self.critic.load_checkpoint(path / CRITIC)


@dataclass(frozen=True)
class CustomPolicyAndCritic:
    """A custom policy and its critic, saved while nothing else runs."""

    policy: CustomPolicyAdapter
    critic: Policy | CustomPolicyAdapter

    def save_checkpoint(self, path: Path) -> None:
        """Lets the policy write into `path`, and the critic into `path/critic`."""
        self.policy.save_checkpoint(path)
        (path / CRITIC).mkdir()
        self.critic.save_checkpoint(path / CRITIC)

    def load_checkpoint(self, path: Path) -> None:
        """Lets both resume from their checkpoints."""
        self.policy.load_checkpoint(path)
        self.critic.load_checkpoint(path / CRITIC)
