"""Digests of checkpoint files, computed by the process that wrote them."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from nemo_rl_core.store import files


@dataclass(frozen=True)
class WrittenFile:
    """A complete and synced file on the disk."""

    sha256: str
    num_bytes: int
    machine: str = ""


def describe_written(folder: Path, names: Iterable[str]) -> dict[str, WrittenFile]:
    """Syncs and hashes files that this process has written.

    Only the machine that wrote a file can sync it, since the content may still be in its cache.
    """
    written = {}
    for name in sorted(names):
        path = folder / name
        files.fsync(path)
        written[name] = WrittenFile(files.hash_file(path), path.stat().st_size)
    return written
