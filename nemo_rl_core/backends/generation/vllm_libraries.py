"""The shared library that vLLM's CPU build needs and its wheel lacks."""

import ctypes
import sys
from pathlib import Path


def load_libnuma() -> None:
    """Loads the libnuma that `deployment/setup.sh` installs if the system has none.

    Called before vLLM is imported, so that its extension finds the library in the process.
    """
    own = Path(sys.prefix) / "lib" / "libnuma.so.1"
    if own.exists():
        ctypes.CDLL(str(own), mode=ctypes.RTLD_GLOBAL)
