"""Partly downloaded artifacts: present files are verified, the others are listed.

The digest of `digests.json` is the content hash, so each file can be verified without the others.
A folder that lacks files lists them in `left_out.json`; hashes of the folder include them.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path

from nemo_rl_core.store.files import write_atomic
from nemo_rl_core.store.paths import checked_name, resolve_below

SHA256 = re.compile("[0-9a-f]{64}")
DIGESTS = "digests.json"
LEFT_OUT = "left_out.json"


def write_digests(folder: Path, digests: Mapping[str, str]) -> None:
    """Writes the sha256 of the files that an artifact's content hash covers, by relative path."""
    write_atomic(folder / DIGESTS, _text(digests))


def read_digests(folder: Path) -> dict[str, str]:
    """Reads the file of `write_digests`; artifacts of earlier versions have none."""
    return _read(folder / DIGESTS)


def write_left_out(folder: Path, digests: Mapping[str, str]) -> None:
    """Lists the files of an artifact that were not downloaded; no files mean a complete one."""
    if digests:
        write_atomic(folder / LEFT_OUT, _text(digests))
    else:
        (folder / LEFT_OUT).unlink(missing_ok=True)


def left_out(folder: Path) -> dict[str, str]:
    """Returns the sha256 of the files that were not downloaded, by relative path."""
    try:
        listed = _read(folder / LEFT_OUT)
    except (OSError, ValueError):
        return {}
    return {
        name: digest
        for name, digest in listed.items()
        if not resolve_below(folder, name, source=LEFT_OUT, may_link=True).exists()
    }


def _read(path: Path) -> dict[str, str]:
    content = json.loads(path.read_bytes())
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a JSON object")
    for name, digest in content.items():
        checked_name(name, source=str(path))
        if not SHA256.fullmatch(str(digest)):
            raise ValueError(f"{path} has no sha256 of {name}: {str(digest)[:80]!r}")
    return content


def _text(digests: Mapping[str, str]) -> str:
    return json.dumps(dict(digests), indent=1, sort_keys=True) + "\n"
