"""The Megatron worker against the plain transformers loop."""

from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl_core.distributed.local_ranks import run_ranks

EPSILON = 1e-3
LENGTHS = [11, 4, 7, 2, 9, 3, 3, 8]
