"""A shared library that vLLM's CPU build needs but its wheel does not contain."""

import ctypes
import sys
from pathlib import Path


def load_libnuma() -> None:
    """Loads the libnuma that `deployment/setup.sh` installs if the system has none.

    Call it before vLLM is imported, so that its extension finds the library in the process.
    """
    library = Path(sys.prefix) / "lib" / "libnuma.so.1"
    if library.exists():
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
