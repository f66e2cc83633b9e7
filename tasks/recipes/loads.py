"""The stages of a recipe that compute on GPUs, as plans take them."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from nemo_rl_core.config.environment import EnvironmentConfig, own_bundles_of_scorers
from nemo_rl_core.config.model import DType, ModelConfig
from nemo_rl_core.config.trainer import LoopConfig
from nemo_rl_core.planning.load import SamplingLoad, ScorerLoad, StageLoad
from nemo_rl_core.planning.sizes import ModelSizes
from nemo_rl_core.planning.stages import (
    Rollouts,
    TrainingPlace,
    reads_reference,
    samples,
    training_stage,
)
from tasks.recipes.common import PipelineRecipe
from tasks.recipes.convert import ConvertRecipe
from tasks.recipes.pairs import PairsFromRollouts

ScorersOf = Callable[[EnvironmentConfig, str], tuple[ScorerLoad, ...]]
"""What gives the models that score in a section, which stands at that path of a recipe."""
SizesOf = Callable[[ModelConfig], ModelSizes]
"""What gives the sizes of a section `model`."""

_STAGES = {
    "sft": "train_sft",
    "reward_model": "train_reward_model",
    "dpo": "dpo_iteration",
    "grpo": "grpo_iteration",
    "ppo": "ppo_iteration",
    "distillation": "train_student",
}
"""By section, in the order in which a pipeline runs them."""


def loads_of(
    recipe: PipelineRecipe, sizes_of: SizesOf, scorers_of: ScorersOf = lambda *_: ()
) -> list[StageLoad]:
    """The stages of a recipe that compute on GPUs, in the order in which they run.

    Args:
        recipe: Of any pipeline; a conversion has no such stage.
        sizes_of: Gives the sizes of a model.
        scorers_of: Gives the models that score.
    """
    if isinstance(recipe, ConvertRecipe):
        return []
    loads = []
    for section, stage in _STAGES.items():
        config = getattr(recipe, section, None)
        if config is not None:
            load = _trained(recipe, section, stage, config, sizes_of)
            if samples(section):
                load = _scored(load, scorers_of, *_reward_of(recipe, section))
            loads.append(load)
    return [*loads, *_sampled_only(recipe, sizes_of, scorers_of)]


def _scored(
    load: StageLoad, scorers_of: ScorersOf, environment: EnvironmentConfig, path: str
) -> StageLoad:
    """The stage with the models that score in it, and the GPUs that these have for themselves."""
    own = own_bundles_of_scorers(environment, path)
    return replace(load, scorers=scorers_of(environment, path), own_scorers=own)


def _reward_of(recipe: PipelineRecipe, section: str) -> tuple[EnvironmentConfig, str]:
    """What scores in a stage, and its path in the recipe."""
    own = getattr(recipe, f"{section}_reward", None)
    return (recipe.environment, "environment") if own is None else (own, f"{section}_reward")


def steps_of(recipe: PipelineRecipe) -> dict[str, int]:
    """Steps of each stage that trains, all iterations together, by its name."""
    found = {}
    for section, stage in _STAGES.items():
        config: Any = getattr(recipe, section, None)
        if config is not None and (steps := getattr(config, "num_steps", None)) is not None:
            found[stage] = steps
        elif config is not None:
            found[stage] = config.num_iterations * config.num_steps_per_iteration
    return found


def _trained(
    recipe: PipelineRecipe, section: str, stage: str, config: LoopConfig, sizes_of: SizesOf
) -> StageLoad:
    room = recipe.rollouts.room(recipe.generation)
    rollouts = Rollouts(recipe.generation, recipe.data.max_prompt_tokens, room)
    return training_stage(
        stage,
        section,
        config,
        TrainingPlace(recipe.training, recipe.cluster, _dtype(recipe)),
        sizes=sizes_of(recipe.model),
        reference=_reference(recipe, section, config, sizes_of),
        rollouts=rollouts if samples(section) else None,
        max_sequence_tokens=recipe.data.max_sequence_tokens,
    )


def _dtype(recipe: PipelineRecipe) -> DType:
    return recipe.model.dtype


def _reference(
    recipe: PipelineRecipe, section: str, config: Any, sizes_of: SizesOf
) -> ModelSizes | None:
    """Whose logprobs a training stage computes."""
    if section == "distillation":
        teacher: Any = getattr(recipe, "teacher")  # noqa: B009
        return sizes_of(teacher.model)
    return sizes_of(recipe.model) if reads_reference(section, config) else None


def _sampled_only(
    recipe: PipelineRecipe, sizes_of: SizesOf, scorers_of: ScorersOf
) -> Iterator[StageLoad]:
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
        load = StageLoad("sample_pairs", **common, prompt_tokens=prompt, completion_tokens=room,
                         sampling=sampling)  # fmt: skip
        yield _scored(load, scorers_of, recipe.environment, "environment")
    if recipe.evaluation is None or recipe.compares_pairs:
        return
    own, data = recipe.evaluation.generation, recipe.question_data
    config = own or recipe.generation
    path = "evaluation.generation" if own else "generation"
    load = StageLoad(
        "evaluate",
        **common,
        prompt_tokens=data.max_prompt_tokens,
        completion_tokens=recipe.rollouts.room(config),
        sampling=SamplingLoad(config, path, _num_at_once(config)),
    )
    yield _scored(load, scorers_of, recipe.measure, recipe.path_of_measure)


def _num_at_once(config: Any) -> int:
    return int(config.num_engines * getattr(config, "max_num_seqs", 1))
