"""The stages of a recipe that compute on GPUs, in the form that plans use."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from nemo_rl_core.algorithms.declarations import ALGORITHMS
from nemo_rl_core.config.algorithm import Algorithm
from nemo_rl_core.config.environment import EnvironmentConfig, dedicated_bundles_of_scorers
from nemo_rl_core.config.model import ModelConfig
from nemo_rl_core.config.trainer import LoopConfig
from nemo_rl_core.planning.load import SamplingLoad, ScorerLoad, StageLoad
from nemo_rl_core.planning.sizes import ModelSizes
from nemo_rl_core.planning.stages import Rollouts, StageSetup, training_stage
from tasks.recipes.common import PipelineRecipe
from tasks.recipes.convert import ConvertRecipe
from tasks.recipes.pairs import PairsFromRollouts

ScorersOf = Callable[[EnvironmentConfig, str], tuple[ScorerLoad, ...]]
"""Returns the scoring models of a section, with its path in the recipe."""
SizesOf = Callable[[ModelConfig], ModelSizes]
"""Returns the sizes of a section `model`."""


def loads_of(
    recipe: PipelineRecipe, sizes_of: SizesOf, scorers_of: ScorersOf = lambda *_: ()
) -> list[StageLoad]:
    """Returns the stages of a recipe that compute on GPUs, in the order in which they run."""
    if isinstance(recipe, ConvertRecipe):
        return []
    loads = []
    for algorithm in ALGORITHMS.values():
        config = getattr(recipe, algorithm.name, None)
        if config is not None:
            load = _trained(recipe, algorithm, config, sizes_of)
            if algorithm.samples:
                load = _scored(load, scorers_of, *_reward_of(recipe, algorithm.name))
            loads.append(load)
    return [*loads, *_sampled_only(recipe, sizes_of, scorers_of)]


def _scored(
    load: StageLoad, scorers_of: ScorersOf, environment: EnvironmentConfig, path: str
) -> StageLoad:
    bundles = dedicated_bundles_of_scorers(environment, path)
    return replace(load, scorers=scorers_of(environment, path), own_scorers=bundles)


def _reward_of(recipe: PipelineRecipe, section: str) -> tuple[EnvironmentConfig, str]:
    reward = getattr(recipe, f"{section}_reward", None)
    return (recipe.environment, "environment") if reward is None else (reward, f"{section}_reward")


def steps_of(recipe: PipelineRecipe) -> dict[str, int]:
    """Returns the steps of each stage that trains, all iterations together, by its name."""
    steps_by_stage = {}
    for algorithm in ALGORITHMS.values():
        config: Any = getattr(recipe, algorithm.name, None)
        if config is not None and (steps := getattr(config, "num_steps", None)) is not None:
            steps_by_stage[algorithm.stage] = steps
        elif config is not None:
            steps_by_stage[algorithm.stage] = config.num_iterations * config.num_steps_per_iteration
    return steps_by_stage


def _trained(
    recipe: PipelineRecipe, algorithm: Algorithm, config: LoopConfig, sizes_of: SizesOf
) -> StageLoad:
    completion_tokens = recipe.rollouts.room(recipe.generation)
    rollouts = Rollouts(recipe.generation, recipe.data.max_prompt_tokens, completion_tokens)
    return training_stage(
        algorithm.stage,
        algorithm.name,
        config,
        StageSetup(recipe.training, recipe.cluster, recipe.model.dtype),
        sizes=sizes_of(recipe.model),
        reference=_reference(recipe, algorithm, config, sizes_of),
        rollouts=rollouts if algorithm.samples else None,
        max_sequence_tokens=recipe.data.max_sequence_tokens,
    )


def _reference(
    recipe: PipelineRecipe, algorithm: Algorithm, config: LoopConfig, sizes_of: SizesOf
) -> ModelSizes | None:
    """Returns the sizes of a training stage's teacher or reference; None without one."""
    if algorithm.has_teacher:
        teacher: Any = getattr(recipe, "teacher")  # noqa: B009
        return sizes_of(teacher.model)
    return sizes_of(recipe.model) if config.reads_reference else None


def _sampled_only(
    recipe: PipelineRecipe, sizes_of: SizesOf, scorers_of: ScorersOf
) -> Iterator[StageLoad]:
    pairs = getattr(recipe, "pairs", None)
    completion_tokens = recipe.rollouts.room(recipe.generation)
    common: dict[str, Any] = {
        "sizes": sizes_of(recipe.model),
        "cluster": recipe.cluster,
        "dtype": recipe.model.dtype,
    }
    if isinstance(pairs, PairsFromRollouts):
        sampling = SamplingLoad(recipe.generation, "generation", _num_at_once(recipe.generation))
        prompt = recipe.data.max_prompt_tokens
        load = StageLoad("sample_pairs", **common, prompt_tokens=prompt,
                         completion_tokens=completion_tokens, sampling=sampling)  # fmt: skip
        yield _scored(load, scorers_of, recipe.environment, "environment")
    if recipe.evaluation is None or recipe.compares_pairs:
        return
    separate, data = recipe.evaluation.generation, recipe.question_data
    config = separate or recipe.generation
    path = "evaluation.generation" if separate else "generation"
    load = StageLoad(
        "evaluate",
        **common,
        prompt_tokens=data.max_prompt_tokens,
        completion_tokens=recipe.rollouts.room(config),
        sampling=SamplingLoad(config, path, _num_at_once(config)),
    )
    yield _scored(
        load, scorers_of, recipe.evaluation_environment, recipe.evaluation_environment_path
    )


def _num_at_once(config: Any) -> int:
    return int(config.num_engines * getattr(config, "max_num_seqs", 1))
