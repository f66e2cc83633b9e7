"""The stages of a recipe that compute on GPUs, as plans take them."""

from collections.abc import Callable, Iterator
from typing import Any

from nemo_rl_core.config.model import DType, ModelConfig
from nemo_rl_core.config.trainer import LoopConfig
from nemo_rl_core.planning.load import SamplingLoad, StageLoad, TrainingLoad
from nemo_rl_core.planning.sizes import ModelSizes
from tasks.recipes.common import PipelineRecipe
from tasks.recipes.convert import ConvertRecipe
from tasks.recipes.pairs import PairsFromRollouts

SizesOf = Callable[[ModelConfig], ModelSizes]
"""What gives the sizes of a section `model`."""

_CRITICS = frozenset({"ppo"})
_SCALAR_HEADS = frozenset({"reward_model"})
_SAMPLING = frozenset({"grpo", "ppo", "distillation"})
_STAGES = {
    "sft": "train_sft",
    "reward_model": "train_reward_model",
    "dpo": "dpo_iteration",
    "grpo": "grpo_iteration",
    "ppo": "ppo_iteration",
    "distillation": "train_student",
}
"""By section, in the order in which a pipeline runs them."""


def loads_of(recipe: PipelineRecipe, sizes_of: SizesOf) -> list[StageLoad]:
    """The stages of a recipe that compute on GPUs, in the order in which they run.

    Args:
        recipe: Of any pipeline; a conversion has no such stage.
        sizes_of: Gives the sizes of a model.
    """
    if isinstance(recipe, ConvertRecipe):
        return []
    loads = []
    for section, stage in _STAGES.items():
        config = getattr(recipe, section, None)
        if config is not None:
            loads.append(_trained(recipe, section, stage, config, sizes_of))
    return [*loads, *_sampled_only(recipe, sizes_of)]


def _trained(
    recipe: PipelineRecipe, section: str, stage: str, config: LoopConfig, sizes_of: SizesOf
) -> StageLoad:
    samples = section in _SAMPLING
    room = recipe.rollouts.room(recipe.generation)
    prompt = recipe.data.max_prompt_tokens
    rows = recipe.data.max_sequence_tokens or config.max_tokens_per_microbatch
    longest = prompt + room if samples else min(rows, config.max_tokens_per_microbatch)
    rollouts = getattr(config, "num_sequences_per_step", 0)
    training = TrainingLoad(
        recipe.training,
        config.max_tokens_per_microbatch,
        path=f"{section}.max_tokens_per_microbatch",
        num_sequences=_sequences_of(config),
        moments=config.moments,
        has_head=section not in _SCALAR_HEADS,
        has_critic=section in _CRITICS,
        reference=_reference(recipe, section, config, sizes_of),
        is_trained_base=section != "distillation",
        num_scorings=_num_scorings(section, config),
        num_epochs=getattr(config, "num_epochs_per_rollout", 1) * (1 + (section in _CRITICS)),
    )
    sampling = SamplingLoad(
        recipe.generation,
        "generation",
        rollouts,
        is_asynchronous=getattr(config, "asynchronous", None) is not None,
    )
    return StageLoad(
        name=stage,
        sizes=sizes_of(recipe.model),
        cluster=recipe.cluster,
        dtype=_dtype(recipe),
        prompt_tokens=min(prompt, longest - 1) if samples else 0,
        completion_tokens=room if samples else longest,
        training=training,
        sampling=sampling if samples else None,
    )


def _dtype(recipe: PipelineRecipe) -> DType:
    return recipe.model.dtype


def _sequences_of(config: Any) -> int:
    """Sequences of one optimizer step, of whatever algorithm."""
    if pairs := getattr(config, "num_pairs_per_step", None):
        return int(2 * pairs)
    batch = getattr(config, "train_global_batch_size", None)
    return int(batch or getattr(config, "num_sequences_per_step", 0) or config.global_batch_size)


def _num_scorings(section: str, config: Any) -> int:
    """Forward passes of a step for logprobs; one optimizer step of GRPO reads its own."""
    match section:
        case "grpo":
            batch, all_sequences = config.train_global_batch_size, config.num_sequences_per_step
            updates_once = batch in (None, all_sequences) and not config.has_kl_in_reward
            return (not updates_once) + (config.loss.kl is not None)
        case "ppo":
            return 2 + (config.kl is not None)
        case "distillation":
            return 1
    return 0


def _reference(
    recipe: PipelineRecipe, section: str, config: Any, sizes_of: SizesOf
) -> ModelSizes | None:
    """Whose logprobs a training stage computes; those of DPO are cached by a stage before it."""
    if section == "distillation":
        teacher: Any = getattr(recipe, "teacher")  # noqa: B009
        return sizes_of(teacher.model)
    penalty = config.loss.kl if section == "grpo" else getattr(config, "kl", None)
    is_kto = section == "dpo" and config.loss.kind == "kto"
    return sizes_of(recipe.model) if penalty is not None or is_kto else None


def _sampled_only(recipe: PipelineRecipe, sizes_of: SizesOf) -> Iterator[StageLoad]:
    """Pairs that the policy samples, and the evaluation."""
    pairs = getattr(recipe, "pairs", None)
    room = recipe.rollouts.room(recipe.generation)
    common: dict[str, Any] = {
        "sizes": sizes_of(recipe.model),
        "cluster": recipe.cluster,
        "dtype": _dtype(recipe),
    }
    if isinstance(pairs, PairsFromRollouts):
        sampling = SamplingLoad(recipe.generation, "generation", _num_at_once(recipe.generation))
        prompt = recipe.data.max_prompt_tokens
        yield StageLoad("sample_pairs", **common, prompt_tokens=prompt, completion_tokens=room,
                        sampling=sampling)  # fmt: skip
    own, data = recipe.evaluation.generation, recipe.evaluation.data or recipe.data
    config = own or recipe.generation
    path = "evaluation.generation" if own else "generation"
    yield StageLoad(
        "evaluate",
        **common,
        prompt_tokens=data.max_prompt_tokens,
        completion_tokens=recipe.rollouts.room(config),
        sampling=SamplingLoad(config, path, _num_at_once(config)),
    )


def _num_at_once(config: Any) -> int:
    return int(config.num_engines * getattr(config, "max_num_seqs", 1))
