"""GPU memory of an engine while it is awake."""

from nemo_rl_core.config.model import DType
from nemo_rl_core.planning.load import StageLoad, ranks_of_engine, share_of_engine
from nemo_rl_core.planning.sizes import ModelSizes

GIB = 2**30
CONTEXT_GIB, ENGINE_CONTEXT_GIB = 1.0, 2.0
"""CUDA context and libraries of one process, and of an engine with its worker. Assumed; an H100
with an engine showed 2 to 3 GiB."""
_BATCHED_TOKENS = 8192
_GRAPHS_GIB = 1.0
"""vLLM's CUDA graphs and workspaces. Assumed."""


def parts_of_engine(load: StageLoad, memory_gib: float) -> tuple[dict[str, float], float]:
    """Returns the engine's GPU memory in GiB by part, and the tokens that fit its KV cache."""
    if load.sampling is None:
        return {}, 0.0
    config, sizes = load.sampling.config, load.sizes
    width, ranks = bytes_of(load.dtype), ranks_of_engine(config)
    weights = sizes.num_parameters * width / ranks / GIB
    if getattr(config, "quantization", "none") != "none":  # a weight of a layer takes one byte
        weights -= (sizes.num_parameters - sizes.outer_weights) * (width - 1) / ranks / GIB
    workspace = _GRAPHS_GIB + activations_gib(sizes, width, _BATCHED_TOKENS, ranks=ranks)
    token_bytes = kv_bytes_of_rank(load)
    share = share_of_engine(config)
    if share is None:
        cache = load.longest * load.sampling.num_sequences * token_bytes / GIB
        return {"engine weights": weights, "KV cache": cache}, load.longest
    cache = share * memory_gib - weights - workspace
    parts = {"engine weights": weights, "engine workspace": workspace, "KV cache": max(cache, 0.0)}
    return parts, cache * GIB / token_bytes


def bytes_of(dtype: DType) -> int:
    """Returns the number of bytes per value."""
    return 2 if dtype == "bfloat16" else 4


def activations_gib(sizes: ModelSizes, width: int, tokens: int, *, ranks: int = 1) -> float:
    """Returns the GiB of one layer's activations in a forward pass without gradients."""
    return tokens * width / GIB * (2 * sizes.hidden + 2 * sizes.mlp_width / ranks)


def kv_tokens_of_judge(
    sizes: ModelSizes, dtype: DType, *, share: float, memory_gib: float, ranks: int = 1
) -> float:
    """Returns the tokens that fit the KV cache of an engine with tensor parallelism."""
    width = bytes_of(dtype)
    workspace = _GRAPHS_GIB + activations_gib(sizes, width, _BATCHED_TOKENS, ranks=ranks)
    cache = share * memory_gib - sizes.num_parameters * width / ranks / GIB - workspace
    heads = -(-sizes.num_kv_heads // ranks)  # ranks beyond the number of heads have copies
    token_bytes = 2.0 * sizes.num_layers * heads * sizes.head_size * width
    return cache * GIB / token_bytes


def kv_bytes_of_rank(load: StageLoad) -> float:
    """Returns the bytes per token in the KV cache of one rank of an engine, for all layers."""
    assert load.sampling is not None
    config, sizes = load.sampling.config, load.sizes
    tensor = getattr(config, "tensor_parallel_size", 1)
    heads = -(-sizes.num_kv_heads // tensor)  # ranks beyond the number of heads have copies
    layers = sizes.num_layers * tensor / ranks_of_engine(config)
    return 2.0 * layers * heads * sizes.head_size * bytes_of(load.dtype)
