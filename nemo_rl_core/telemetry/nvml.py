"""NVIDIA's management library, which sees the memory of a GPU that any process has allocated."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def opened_nvml() -> Iterator[Any]:
    """Opens it within the block; yields None where it is not installed or finds no driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except (ImportError, OSError, RuntimeError):
        yield None
        return
    except Exception:  # noqa: BLE001  (NVML's own error, whose class cannot be named without it)
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()
