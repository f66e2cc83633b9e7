"""Training of any transformers causal model with FSDP2, tensor and context parallelism."""

from typing import Any

from nemo_rl_core.documented_names import documented


def __getattr__(name: str) -> Any:
    return documented(__name__, name)
