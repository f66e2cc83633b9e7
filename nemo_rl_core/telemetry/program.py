"""How the command `nemo-rl` is called on this machine."""

import sys
from pathlib import Path


def program() -> str:
    """The path of `nemo-rl` beside this Python, or its name where none is there.

    A path works in a shell that has not activated the environment. An image of a cluster, and a
    Python that finds the project by its path, have no such file.
    """
    beside = Path(sys.executable).with_name("nemo-rl")
    return str(beside) if beside.exists() else beside.name
