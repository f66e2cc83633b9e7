"""Which commit the code at hand is."""

import os
import subprocess
from pathlib import Path
from typing import NamedTuple

_COMMIT = "NEMO_RL_COMMIT"
"""What a container is told, which has the code and no repository."""


class GitState(NamedTuple):
    """The commit of a working tree, and whether it holds anything else; None outside a tree."""

    commit: str | None
    dirty: bool | None

    @property
    def as_environment(self) -> dict[str, str]:
        """What tells a container of it, where the code lies and the repository does not."""
        if self.commit is None:
            return {}
        return {_COMMIT: f"{self.commit} {'dirty' if self.dirty else 'clean'}"}


def git_state(path: Path) -> GitState:
    """The state of the repository that holds `path`; files that git does not know make it dirty.

    Outside a repository, what `GitState.as_environment` has said of one.
    """
    # A git hook exports GIT_DIR, which would make git look at another repository than this one.
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
