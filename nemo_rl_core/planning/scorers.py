"""Reward models and judges of a stage: what they ask of the trainer's first GPU.

Each is a process of its own there. Only one computes at a time, while the policy's engine sleeps
and the trainer waits; the others wait on the host then, and hold their CUDA contexts alone.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from nemo_rl_core.config.environment import (
    ByTask,
    EnvironmentConfig,
    WeightedSum,
    single_environments,
)
from nemo_rl_core.config.judge import JudgeModel, LLMJudge
from nemo_rl_core.config.model import DType
from nemo_rl_core.config.single_turn import RewardModelScore
from nemo_rl_core.planning.engine_memory import (
    GIB,
    activations_gib,
    bytes_of,
    kv_tokens_of_judge,
)
from nemo_rl_core.planning.load import ScorerLoad, StageLoad
from nemo_rl_core.planning.sizes import ModelSizes, sizes_of

_CONTEXT_GIB, _ENGINE_CONTEXT_GIB = 1.0, 2.0
"""As of trainers and engines (`memory.py`). Assumed."""


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
    inner: list[tuple[str, EnvironmentConfig]] = []
    match environment:
        case WeightedSum(parts=parts):
            inner = [(f"{path}.parts.{n}.environment", e.environment) for n, e in enumerate(parts)]
        case ByTask(tasks=tasks):
            inner = [(f"{path}.tasks.{n}.environment", e.environment) for n, e in enumerate(tasks)]
        case LLMJudge(judge=JudgeModel() as judge):
            yield ScorerLoad(
                f"the judge {judge.model}",
                sizes_of(read(judge.model)),
                judge.dtype,
                path=f"{path}.judge",
                num_tokens=judge.max_model_len,
                share=judge.gpu_memory_utilization,
            )
        case RewardModelScore(model=None, max_tokens_per_batch=tokens):
            if of_run is not None:  # which is saved in float32
                yield ScorerLoad("the reward model of the run", of_run, "float32", path, tokens)
        case RewardModelScore(model=str() as name, max_tokens_per_batch=tokens):
            config = read(name)
            said = str(config.get("dtype") or config.get("torch_dtype"))
            dtype: DType = "bfloat16" if said in ("bfloat16", "float16") else "float32"
            sizes = sizes_of(config)
            yield ScorerLoad(f"the reward model {name}", sizes, dtype, path, tokens)
    for inner_path, part in inner:
        yield from scorers_of(part, read, of_run=of_run, path=inner_path)


def names_of_scorers(environment: EnvironmentConfig) -> list[str]:
    """The models that score in an environment, as `scorers_of` names them."""
    found = []
    for each in single_environments(environment):
        if isinstance(each, RewardModelScore):
            found.append(f"the reward model {each.model or 'of the run'}")
        if isinstance(each, LLMJudge) and isinstance(each.judge, JudgeModel):
            found.append(f"the judge {each.judge.model}")
    return found


def contexts_of_scorers(load: StageLoad) -> float:
    """GiB that they hold always."""
    return sum(_CONTEXT_GIB if each.share is None else _ENGINE_CONTEXT_GIB for each in load.scorers)


def largest_scorer(load: StageLoad, memory_gib: float) -> float:
    """GiB of that which takes most while it scores; 0 without one."""
    return max((_awake_gib(each, memory_gib) for each in load.scorers), default=0.0)


def _awake_gib(scorer: ScorerLoad, memory_gib: float) -> float:
    if scorer.share is not None:
        return scorer.share * memory_gib
    width, sizes = bytes_of(scorer.dtype), scorer.sizes
    weights = sizes.num_parameters - sizes.vocabulary * sizes.hidden * (not sizes.is_tied)
    return weights * width / GIB + activations_gib(sizes, width, scorer.num_tokens)


def scorer_problem(load: StageLoad, memory_gib: float) -> str | None:
    """Why a judge cannot read a question of its full length; None if all can."""
    for each in load.scorers:
        if each.share is None:
            continue
        tokens = kv_tokens_of_judge(each.sizes, each.dtype, share=each.share, memory_gib=memory_gib)
        if tokens < each.num_tokens:
            return (
                f"{each.name}: the KV cache holds {max(tokens, 0):,.0f} tokens, fewer than "
                f"{each.path}.max_model_len ({each.num_tokens:,})"
            )
    return None
