"""Reward models and judges of a stage: what they ask of the trainer's first GPU, or of their own.

Each is a process of its own there. Of those on the trainer's GPU only one computes at a time, while
the policy's engine sleeps and the trainer waits; the others wait on the host then, and hold their
CUDA contexts alone. One on GPUs of its own stays there.
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
    of_run: ModelSizes | None = None,
    path: str = "environment",
) -> Iterator[ScorerLoad]:
    """The models that score in an environment.

    Args:
        environment: The section.
        read: Gives the config.json of a model by its name.
        of_run: Sizes of the model that a reward model without a name is trained from; None leaves
            it out.
        path: Of the section in the recipe.
    """
    found = set()
    for each in model_scorers(environment, path):
        # Sections that ask one judge alike share it, and models on GPUs of their own are shared.
        # A reward model on the trainer's GPU is loaded for each of its sections.
        if each.name in found and (isinstance(each.config, JudgeModel) or each.own_bundles):
            continue
        found.add(each.name)
        if isinstance(each.config, JudgeModel):
            yield _judge(each.config, each.path, sizes_of(read(each.config.model)))
        elif each.config.model is not None:
            yield _reward_model(each.config, each.path, read(each.config.model))
        elif of_run is not None:
            name = "the reward model of the run"
            yield _with_head(each.config, each.path, name, of_run, "float32")  # as it is saved


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
    said = str(read.get("dtype") or read.get("torch_dtype"))
    dtype: DType = "bfloat16" if said in ("bfloat16", "float16") else "float32"
    return _with_head(config, path, f"the reward model {config.model}", sizes_of(read), dtype)


def _with_head(
    config: RewardModelScore, path: str, name: str, sizes: ModelSizes, dtype: DType
) -> ScorerLoad:
    has_own_gpus, tokens = config.placement != "colocated", config.max_tokens_per_batch
    return ScorerLoad(name, sizes, dtype, path, tokens, has_own_gpus=has_own_gpus)


def names_of_scorers(environment: EnvironmentConfig) -> list[str]:
    """The models that score in an environment, as `scorers_of` names them."""
    return [
        f"the judge {each.config.model}"
        if isinstance(each.config, JudgeModel)
        else f"the reward model {each.config.model or 'of the run'}"
        for each in model_scorers(environment)
    ]


def contexts_of_scorers(load: StageLoad) -> float:
    """GiB that they hold always of the trainer's first GPU."""
    return sum(_context_gib(each) for each in load.scorers if not each.has_own_gpus)


def largest_scorer(load: StageLoad, memory_gib: float) -> float:
    """GiB of that which takes most of the trainer's first GPU while it scores; 0 without one."""
    found = (_awake_gib(each, memory_gib) for each in load.scorers if not each.has_own_gpus)
    return max(found, default=0.0)


def largest_own_scorer(load: StageLoad, memory_gib: float) -> float:
    """GiB of that which takes most of a GPU of its own, with its context; 0 without one."""
    found = (
        _context_gib(each) + _awake_gib(each, memory_gib)
        for each in load.scorers
        if each.has_own_gpus
    )
    return max(found, default=0.0)


def _context_gib(scorer: ScorerLoad) -> float:
    return CONTEXT_GIB if scorer.share is None else ENGINE_CONTEXT_GIB


def _awake_gib(scorer: ScorerLoad, memory_gib: float) -> float:
    if scorer.share is not None:
        return scorer.share * memory_gib
    width, sizes = bytes_of(scorer.dtype), scorer.sizes
    weights = sizes.num_parameters - sizes.vocabulary * sizes.hidden * (not sizes.is_tied)
    return weights * width / GIB + activations_gib(sizes, width, scorer.num_tokens)


def scorer_problem(load: StageLoad, memory_gib: float) -> str | None:
    """Why a judge cannot read a question of its full length, or start; None if all can."""
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
