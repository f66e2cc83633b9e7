"""The commit of the running code."""

import os
import subprocess
from pathlib import Path
from typing import NamedTuple

_COMMIT = "NEMO_RL_COMMIT"
"""Environment variable with the commit, for containers, which have no repository."""


class GitState(NamedTuple):
    """The commit of a working tree, and whether it has changes; None outside of a repository."""

    commit: str | None
    dirty: bool | None

    @property
    def as_environment(self) -> dict[str, str]:
        """The environment variable that passes the commit to a container without the repository."""
        if self.commit is None:
            return {}
        return {_COMMIT: f"{self.commit} {'dirty' if self.dirty else 'clean'}"}


def git_state(path: Path) -> GitState:
    """Returns the state of the repository that contains `path`; untracked files make it dirty.

    Outside of a repository, reads the variable that `GitState.as_environment` sets.
    """
    # A git hook exports GIT_DIR, which would point git at another repository.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(path), *arguments]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True, timeout=30
        )
        return done.stdout.strip()

    try:
        return GitState(git("rev-parse", "HEAD"), git("status", "--porcelain") != "")
    except (OSError, subprocess.SubprocessError):
        commit, _, state = environment.get(_COMMIT, "").partition(" ")
        return GitState(commit, state == "dirty") if commit else GitState(None, None)
