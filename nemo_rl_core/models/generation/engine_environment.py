"""Variables of the processes that run an engine."""

from nemo_rl_core.config.generation import SamplingConfig, VllmGenerationConfig
from nemo_rl_core.distributed.worker_group import SEES_ALL_GPUS


def engine_environment(config: SamplingConfig) -> dict[str, str]:
    """Returns variables that a worker needs before it imports the engine's library."""
    if not isinstance(config, VllmGenerationConfig):
        return {}
    return {
        "VLLM_CPU_KVCACHE_SPACE": str(config.kv_cache_gib),
        # The engine stays inside the worker's process, where weights arrive.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_FLOAT32_MATMUL_PRECISION": config.float32_matmul_precision,
        # FlashInfer compiles kernels on first use, with a compiler that images do not have.
        # Its sampler takes no seeds, so rollouts never use it, but vLLM's warm-up would. The sums
        # of its all-reduce have no fixed order.
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
        **(SEES_ALL_GPUS if config.ranks_per_engine > 1 else {}),
    }
