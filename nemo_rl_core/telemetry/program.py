"""The path of the command `nemo-rl` on this machine."""

import sys
from pathlib import Path


def program() -> str:
    """Returns the path of `nemo-rl` next to this Python, or its name if that file is missing."""
    path = Path(sys.executable).with_name("nemo-rl")
    return str(path) if path.exists() else path.name
