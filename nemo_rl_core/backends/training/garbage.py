"""Faster garbage collection in training workers."""

import gc
from functools import cache

import torch


@cache
def freeze_libraries() -> None:
    """Excludes all existing objects from later collections; runs once per process.

    A worker has 400,000 objects from imported libraries. `release_memory` collects twice during
    each weight transfer, while engines wait: 0.15 s each time with these objects, 0.3 ms without
    (measured on a CPU). Call it before a model is created, since cycles of frozen objects, such as
    a model and its hooks, would never be freed. No-op without a GPU: transfers do not collect then.
    """
    if torch.cuda.is_available():
        gc.collect()
        gc.freeze()
