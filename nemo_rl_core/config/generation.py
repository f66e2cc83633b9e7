"""How completions are sampled."""

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from nemo_rl_core.config.base import FrozenConfig


class GenerationConfig(FrozenConfig):
    """Sampling settings and engine size.

    `temperature` is that of training rollouts; the trainer computes its logprobs under the same
    temperature. Evaluation is greedy, and samples at this temperature for pass@k.
    """

    backend: Literal["vllm"] = "vllm"
    max_new_tokens: PositiveInt = 8
    temperature: PositiveFloat = 1.0
    kv_cache_gib: PositiveInt = 1
    max_num_seqs: PositiveInt = 512
    gpu_memory_utilization: float = Field(default=0.5, gt=0, lt=1)
