"""Estimates the time of sampling a step's completions by a roofline with a tail of lengths.

The longest completions are decoded in ever smaller batches that still read all weights for each
token. With a long tail, this takes most of a step.
"""

import math
from dataclasses import dataclass

from nemo_rl_core.planning.accelerators import Accelerator
from nemo_rl_core.planning.engine_memory import kv_bytes_of_rank
from nemo_rl_core.planning.load import StageLoad, ranks_of_engine
from nemo_rl_core.planning.memory import MemoryPlan

PRODUCT_SHARE = 0.7
"""Fraction of peak FLOP/s in matrix products. Fitted to one H100."""
_MEMORY_SHARE = 0.7
"""Fraction of the memory bandwidth in decoding. This and the two values below are fitted to one
H100 and to the published rollouts of `docs/generate/published_steps.py`."""
_SECONDS_PER_TOKEN = 4.5e-3
"""vLLM's overhead per token of a batch: scheduler, graph, samples to the host. Fitted."""
_SECONDS_PER_SAMPLE = 36e-6
"""vLLM's overhead per sequence and token: a draw with its own seed, detokenization. Fitted."""
_REDUCE_SECONDS, _REDUCE_SECONDS_OF_NETWORK = 15e-6, 30e-6
"""Time of an all-reduce of a few KB between GPUs of one and of several machines. Assumed."""
_POINTS = 64
"""Number of points at which the tail is integrated."""


def rollout_seconds(
    load: StageLoad, memory: MemoryPlan, gpu: Accelerator, peak_flops: float
) -> float:
    """Returns the time until the slowest engine has finished its completions of a step."""
    assert load.sampling is not None
    engine = _Engine(load, gpu, peak_flops)
    config = load.sampling.config
    requests = -(-load.sampling.num_sequences // config.num_engines)
    max_in_cache = max(int(memory.kv_tokens // load.mean_length), 1)
    at_once = min(requests, getattr(config, "max_num_seqs", requests), max_in_cache)
    mean = load.mean_completion
    mean_context = load.prompt_tokens + mean / 2
    total = (requests - at_once) * mean / at_once * engine.token_seconds(at_once, mean_context)
    lengths = Lengths.with_mean(mean, load.completion_tokens)
    tail = lengths.longest_of(load.sampling.num_sequences)
    width = tail / _POINTS
    for point in range(_POINTS):
        length = (point + 0.5) * width
        remaining = max(at_once * lengths.share_beyond(length), 1.0)
        total += width * engine.token_seconds(remaining, load.prompt_tokens + length)
    return total + requests * load.prompt_tokens * engine.product_seconds


@dataclass(frozen=True)
class Lengths:
    """Distribution of completion lengths: exponential, truncated at the maximum length.

    Attributes:
        decay: Tokens after which 1 / e of the completions continue; infinite if all reach the
            limit.
        limit: Maximum tokens of a completion.
    """

    decay: float
    limit: float

    @classmethod
    def with_mean(cls, mean: float, limit: float) -> "Lengths":
        """Returns the distribution whose mean after truncation is `mean` tokens.

        Example:
            >>> round(Lengths.with_mean(795, 3996).decay)
            800
        """
        if mean >= 0.999 * limit:
            return cls(math.inf, limit)
        low, high = mean, 1000.0 * limit
        for _ in range(100):
            middle = math.sqrt(low * high)
            is_below = -middle * math.expm1(-limit / middle) < mean
            low, high = (middle, high) if is_below else (low, middle)
        return cls(low, limit)

    def share_beyond(self, tokens: float) -> float:
        """Returns the fraction of completions longer than `tokens`."""
        return math.exp(-tokens / self.decay) if tokens < self.limit else 0.0

    def longest_of(self, number: int) -> float:
        """Returns the median of the maximum length of `number` completions, if several."""
        return min(self.decay * math.log(number / math.log(2)), self.limit)


class _Engine:
    def __init__(self, load: StageLoad, gpu: Accelerator, peak_flops: float) -> None:
        assert load.sampling is not None
        self._sizes, ranks = load.sizes, ranks_of_engine(load.sampling.config)
        width = 2 if load.dtype == "bfloat16" else 4
        self._bandwidth = gpu.memory_gb_per_second * 1e9 * _MEMORY_SHARE
        self._bytes = width / ranks
        self._kv_bytes = kv_bytes_of_rank(load)
        self.product_seconds = (
            2 * load.sizes.flops.num_multiplied / ranks / (peak_flops * PRODUCT_SHARE)
        )
        is_wide = ranks > max(load.machines)
        reduce = _REDUCE_SECONDS_OF_NETWORK if is_wide else _REDUCE_SECONDS
        self._sent = 2 * load.sizes.num_layers * reduce * (ranks > 1)

    def token_seconds(self, sequences: float, context: float) -> float:
        """Returns the time of one token for each sequence, at a mean of `context` tokens."""
        read = self._weights_read_by(sequences) * self._bytes + sequences * context * self._kv_bytes
        computed = max(read / self._bandwidth, sequences * self.product_seconds)
        return computed + _SECONDS_PER_TOKEN + sequences * _SECONDS_PER_SAMPLE + self._sent

    def _weights_read_by(self, sequences: float) -> float:
        """Returns the number of weights, without experts that no token is routed to."""
        sizes = self._sizes
        if not sizes.num_experts:
            return sizes.num_parameters
        missed: float = (1 - sizes.experts_per_token / sizes.num_experts) ** sequences
        return sizes.num_parameters - missed * sizes.num_layers * sizes.expert_weights
