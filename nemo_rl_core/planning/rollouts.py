"""Seconds in which engines sample a step's completions, by a roofline with the tail of lengths.

An engine computes one token of all its sequences at a time. While enough of them wait, its batch is
full; then it empties, and the longest completions are decoded by ever smaller batches, each token
of which still reads all weights. Of long tails, that is most of a step.
"""

import math
from dataclasses import dataclass

from nemo_rl_core.planning.accelerators import Accelerator
from nemo_rl_core.planning.engine_memory import kv_bytes_of_rank
from nemo_rl_core.planning.load import StageLoad, ranks_of_engine
from nemo_rl_core.planning.memory import MemoryPlan

PRODUCT_SHARE = 0.7
"""Of peak FLOP/s in matrix products. Fitted to one H100."""
_MEMORY_SHARE = 0.7
"""Of the bandwidth of the memory in decoding. Fitted, with the two that follow, to one H100 and to
the published rollouts of `planning.published`."""
_SECONDS_PER_TOKEN = 4.5e-3
"""Of vLLM for each token of a batch: scheduler, graph, samples to the host. Fitted."""
_SECONDS_PER_SAMPLE = 36e-6
"""Of vLLM for each sequence and token: a draw with a seed of its own, detokenization. Fitted."""
_REDUCE_SECONDS, _REDUCE_SECONDS_OF_NETWORK = 15e-6, 30e-6
"""Of an all-reduce of a few KB, between GPUs of a machine and of several. Assumed."""
_POINTS = 64
"""At which the tail is added up."""


def rollout_seconds(
    load: StageLoad, memory: MemoryPlan, gpu: Accelerator, peak_flops: float
) -> float:
    """Until the slowest engine has finished its part of a step's completions.

    Args:
        load: A stage that samples.
        memory: Its plan, for the room of the cache of keys and values.
        gpu: The kind of its GPUs.
        peak_flops: Of that kind, for the stage's type.
    """
    assert load.sampling is not None
    engine = _Engine(load, gpu, peak_flops)
    config = load.sampling.config
    wanted = -(-load.sampling.num_sequences // config.num_engines)
    room = max(int(memory.kv_tokens // load.mean_length), 1)
    at_once = min(wanted, getattr(config, "max_num_seqs", wanted), room)
    mean = load.mean_completion
    meant = load.prompt_tokens + mean / 2
    total = (wanted - at_once) * mean / at_once * engine.token_seconds(at_once, meant)
    lengths = Lengths.with_mean(mean, load.completion_tokens)
    tail = lengths.longest_of(load.sampling.num_sequences)
    width = tail / _POINTS
    for point in range(_POINTS):
        length = (point + 0.5) * width
        left = max(at_once * lengths.share_beyond(length), 1.0)
        total += width * engine.token_seconds(left, load.prompt_tokens + length)
    return total + wanted * load.prompt_tokens * engine.product_seconds


@dataclass(frozen=True)
class Lengths:
    """Lengths of completions: exponential, cut at the longest that is allowed.

    Attributes:
        decay: Tokens after which 1 / e of the completions go on; infinite if all end at the limit.
        limit: The most tokens of a completion.
    """

    decay: float
    limit: float

    @classmethod
    def with_mean(cls, mean: float, limit: float) -> "Lengths":
        """Those whose mean, cut at the limit, is `mean` tokens.

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
        """Of the completions, that are longer than `tokens`."""
        return math.exp(-tokens / self.decay) if tokens < self.limit else 0.0

    def longest_of(self, number: int) -> float:
        """The median of the longest of `number` completions, for several of them."""
        return min(self.decay * math.log(number / math.log(2)), self.limit)


class _Engine:
    """The roofline of one engine's ranks."""

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
        """For one token of each of `sequences`, which hold `context` tokens on average."""
        read = self._weights_met_by(sequences) * self._bytes + sequences * context * self._kv_bytes
        computed = max(read / self._bandwidth, sequences * self.product_seconds)
        return computed + _SECONDS_PER_TOKEN + sequences * _SECONDS_PER_SAMPLE + self._sent

    def _weights_met_by(self, sequences: float) -> float:
        """All weights but those of experts that no token is routed to."""
        sizes = self._sizes
        if not sizes.num_experts:
            return sizes.num_parameters
        missed: float = (1 - sizes.experts_per_token / sizes.num_experts) ** sequences
        return sizes.num_parameters - missed * sizes.num_layers * sizes.expert_weights
