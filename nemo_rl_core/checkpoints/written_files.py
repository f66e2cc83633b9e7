"""What a process has written of a checkpoint: digests that no other process has to compute."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from nemo_rl_core.store import files


@dataclass(frozen=True)
class WrittenFile:
    """A file on the disk, whole and synced.

    Attributes:
        sha256: Of its content, in hex.
        num_bytes: Its size.
        machine: Ray's id of the machine whose process wrote it; empty if unknown.
    """

    sha256: str
    num_bytes: int
    machine: str = ""


def describe_written(folder: Path, names: Iterable[str]) -> dict[str, WrittenFile]:
    """Syncs and hashes files that this process has written.

    A file is synced where it was written: another machine cannot sync what this one still holds.

    Args:
        folder: The checkpoint.
        names: Relative paths in it.

    Raises:
        OSError: If the disk refuses, or a file is missing.
    """
    found = {}
    for name in sorted(names):
        path = folder / name
        files.fsync(path)
        found[name] = WrittenFile(files.hash_file(path), path.stat().st_size)
    return found
