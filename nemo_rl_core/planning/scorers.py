"""GPU memory of reward models and judges, on the trainer's first GPU or dedicated GPUs.

On the trainer's GPU only one computes at a time, while the policy's engine sleeps and the trainer
waits; the others are offloaded to the host and only keep their CUDA contexts.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from nemo_rl_core.config.environment import EnvironmentConfig, model_scorers
from nemo_rl_core.config.judge import JudgeModel
from nemo_rl_core.config.model import DType
from nemo_rl_core.config.single_turn import RewardModelScore
from nemo_rl_core.planning.engine_memory import (
    CONTEXT_GIB,
    ENGINE_CONTEXT_GIB,
    GIB,
    activations_gib,
    bytes_of,
    kv_tokens_of_judge,
)
from nemo_rl_core.planning.load import ScorerLoad, StageLoad
from nemo_rl_core.planning.sizes import ModelSizes, sizes_of


def scorers_of(
    environment: EnvironmentConfig,
    read: Callable[[str], Mapping[str, Any]],
    *,
    run_sizes: ModelSizes | None = None,
    path: str = "environment",
) -> Iterator[ScorerLoad]:
    """Yields the models that score in an environment.

    Args:
        run_sizes: Sizes of the base of a reward model without a name, which the run trains; None
            leaves it out.
    """
    names = set()
    for each in model_scorers(environment, path):
        # Sections with the same judge share it, and models on dedicated GPUs are shared.
        # A reward model on the trainer's GPU is loaded for each of its sections.
        if each.name in names and (isinstance(each.config, JudgeModel) or each.dedicated_bundles):
            continue
        names.add(each.name)
        if isinstance(each.config, JudgeModel):
            yield _judge(each.config, each.path, sizes_of(read(each.config.model)))
        elif each.config.model is not None:
            yield _reward_model(each.config, each.path, read(each.config.model))
        elif run_sizes is not None:
            name = "the reward model of the run"
            # It is saved in float32.
            yield _with_head(each.config, each.path, name, run_sizes, "float32")


def _judge(judge: JudgeModel, path: str, sizes: ModelSizes) -> ScorerLoad:
    return ScorerLoad(
        f"the judge {judge.model}",
        sizes,
        judge.dtype,
        path,
        num_tokens=judge.max_model_len,
        share=judge.gpu_memory_utilization,
        has_own_gpus=judge.placement != "colocated",
        ranks=judge.tensor_parallel_size,
    )


def _reward_model(config: RewardModelScore, path: str, read: Mapping[str, Any]) -> ScorerLoad:
    stored = str(read.get("dtype") or read.get("torch_dtype"))
    dtype: DType = "bfloat16" if stored in ("bfloat16", "float16") else "float32"
    return _with_head(config, path, f"the reward model {config.model}", sizes_of(read), dtype)


def _with_head(
    config: RewardModelScore, path: str, name: str, sizes: ModelSizes, dtype: DType
) -> ScorerLoad:
    has_own_gpus, tokens = config.placement != "colocated", config.max_tokens_per_batch
    return ScorerLoad(name, sizes, dtype, path, tokens, has_own_gpus=has_own_gpus)


def names_of_scorers(environment: EnvironmentConfig) -> list[str]:
    """Returns the names of an environment's scorers, the same as in `scorers_of`."""
    return [
        f"the judge {each.config.model}"
        if isinstance(each.config, JudgeModel)
        else f"the reward model {each.config.model or 'of the run'}"
        for each in model_scorers(environment)
    ]


def scorer_contexts_gib(load: StageLoad) -> float:
    """Returns the GiB of the trainer's first GPU that scorers always use."""
    return sum(_context_gib(each) for each in load.scorers if not each.has_own_gpus)


def largest_scorer_gib(load: StageLoad, memory_gib: float) -> float:
    """Returns the GiB of the largest scorer on the trainer's first GPU; 0 without one."""
    shared = (each for each in load.scorers if not each.has_own_gpus)
    return max((_awake_gib(each, memory_gib) for each in shared), default=0.0)


def largest_dedicated_scorer_gib(load: StageLoad, memory_gib: float) -> float:
    """Returns the GiB of the largest scorer on a dedicated GPU with its context; 0 without one."""
    dedicated = (each for each in load.scorers if each.has_own_gpus)
    return max(
        (_context_gib(each) + _awake_gib(each, memory_gib) for each in dedicated), default=0.0
    )


def _context_gib(scorer: ScorerLoad) -> float:
    return CONTEXT_GIB if scorer.share is None else ENGINE_CONTEXT_GIB


def _awake_gib(scorer: ScorerLoad, memory_gib: float) -> float:
    if scorer.share is not None:
        return scorer.share * memory_gib
    width, sizes = bytes_of(scorer.dtype), scorer.sizes
    weights = sizes.num_parameters - sizes.vocabulary * sizes.hidden * (not sizes.is_tied)
    return weights * width / GIB + activations_gib(sizes, width, scorer.num_tokens)


def scorer_problem(load: StageLoad, memory_gib: float) -> str | None:
    """Returns why a judge cannot start or read a question of maximum length, else None."""
    for each in load.scorers:
        if each.share is None:
            continue
        if each.sizes.num_heads % each.ranks:
            return (
                f"{each.path}.tensor_parallel_size: {each.ranks} does not divide the "
                f"{each.sizes.num_heads} heads of {each.name}"
            )
        tokens = kv_tokens_of_judge(
            each.sizes, each.dtype, share=each.share, memory_gib=memory_gib, ranks=each.ranks
        )
        if tokens < each.num_tokens:
            return (
                f"{each.name}: the KV cache holds {max(tokens, 0):,.0f} tokens, fewer than "
                f"{each.path}.max_model_len ({each.num_tokens:,})"
            )
    return None
