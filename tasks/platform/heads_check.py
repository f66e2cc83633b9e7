"""Whether vLLM computes the models of a recipe: their types, and without a GPU their heads."""

import logging
from collections.abc import Mapping
from typing import Any

from nemo_rl_core.config.environment import model_scorers
from nemo_rl_core.config.generation import VllmGenerationConfig
from nemo_rl_core.config.judge import JudgeModel
from nemo_rl_core.config.model import ModelConfig, ModelFromWheel, PretrainedModel
from nemo_rl_core.environments.contents import located_model
from nemo_rl_core.errors import NemoRLError
from nemo_rl_core.planning.vllm_heads import refuse_heads_on_cpu
from nemo_rl_core.planning.vllm_types import refuse_type
from tasks.platform.gpu_plan import config_of
from tasks.recipes.common import PipelineRecipe

_LOG = logging.getLogger(__name__)
_OTHER_HEADS = "or take a model with heads of one of these widths"
_FIX_OF_A_JUDGE = "name a judge with heads of one of these widths, or let the cluster have GPUs"


def refuse_heads(experiment: PipelineRecipe) -> None:
    """Refuses a recipe whose models vLLM could not sample from; without GPUs, also its judges.

    Models whose config.json is not known before they are there are checked where their engine
    starts.

    Raises:
        ModelError: Names the type, or the width of the heads and those that vLLM takes, and the
            fix.
    """
    has_gpu = bool(experiment.cluster.num_gpus)
    evaluating = experiment.evaluation and experiment.evaluation.generation
    # A recipe of both samples with `generation`, and with the other one while it evaluates.
    paths = {"generation": experiment.generation} | (
        {"evaluation.generation": evaluating} if evaluating else {}
    )
    engines = [path for path, each in paths.items() if isinstance(each, VllmGenerationConfig)]
    if engines:
        fix = f"set {' and '.join(f'{path}.backend' for path in engines)} to hf"
        for model in experiment.sampled_models:
            config, called = _known_config(model), f"the model {model.name!r}"
            if config is not None:
                is_trained = bool(experiment.trained_heads)
                refuse_type(config, called=called, fix=fix, has_gpu=has_gpu, is_trained=is_trained)
                if not has_gpu:
                    refuse_heads_on_cpu(config, called=called, fix=f"{fix}, {_OTHER_HEADS}")
    if has_gpu:
        return
    for _, reward, path in experiment.samplings:
        for each in model_scorers(reward, path):
            if isinstance(each.config, JudgeModel):
                judge = PretrainedModel(name=each.config.model)
                if (config := _known_config(judge)) is not None:
                    called = f"the judge {judge.name!r}"
                    refuse_heads_on_cpu(config, called=called, fix=_FIX_OF_A_JUDGE)


def _known_config(model: ModelConfig) -> Mapping[str, Any] | None:
    if isinstance(model, ModelFromWheel):
        return None
    if not isinstance(model, PretrainedModel):
        # Without `config_of`, which counts the vocabulary: a CPU second of each cached run.
        return {"hidden_size": model.hidden_size, "num_attention_heads": model.num_heads}
    try:
        return config_of(located_model(model))
    except NemoRLError as error:  # what cannot be had is named by the stage that needs all of it
        _LOG.debug("the heads of %s are not known: %s", model.name, error.in_one_line)
        return None
