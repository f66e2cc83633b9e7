"""Corrections of vLLM's CPU build: a missing shared library, and a wrong kernel."""

import ctypes
import sys
from pathlib import Path

import torch


def load_libnuma() -> None:
    """Loads the libnuma that `deployment/setup.sh` installs if the system has none.

    Call it before vLLM is imported, so that its extension finds the library in the process.
    """
    library = Path(sys.prefix) / "lib" / "libnuma.so.1"
    if library.exists():
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def correct_speculation() -> None:
    """Replaces vLLM's kernel that repeats a request's temperature for each drafted token.

    Its CPU version writes integers into a copy, so that vLLM divides the logits of drafted tokens
    by uninitialized memory.
    """
    import vllm.v1.sample.rejection_sampler as library

    library.expand_batch_to_tokens = _repeated_for_tokens


def _repeated_for_tokens(
    of_requests: torch.Tensor,
    ends: torch.Tensor,
    num_tokens: int,
    replace_from: float = 0,
    replace_to: float = 0,
) -> torch.Tensor:
    replaced = of_requests.masked_fill(of_requests == replace_from, replace_to)
    counts = ends.diff(prepend=ends.new_zeros(1))
    return replaced.repeat_interleave(counts, output_size=num_tokens)
