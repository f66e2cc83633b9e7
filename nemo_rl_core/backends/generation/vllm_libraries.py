"""The shared library that vLLM's CPU build needs and its wheel does not carry."""

import ctypes
import sys
from pathlib import Path


def load_libnuma() -> None:
    """Loads the libnuma that `deployment/setup.sh` puts into an environment whose system has none.

    Called before vLLM is imported: its extension then finds a library of that name in the process.
    """
    own = Path(sys.prefix) / "lib" / "libnuma.so.1"
    if own.exists():
        ctypes.CDLL(str(own), mode=ctypes.RTLD_GLOBAL)
