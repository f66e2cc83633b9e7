"""Checks that vLLM and the layout of the ranks support the models of a recipe."""

import json
import logging
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_rl_core.config.environment import model_scorers
from nemo_rl_core.config.generation import VllmGenerationConfig
from nemo_rl_core.config.judge import JudgeModel
from nemo_rl_core.config.model import ModelConfig, ModelFromWheel, PretrainedModel
from nemo_rl_core.config.training import DTensorTraining, Head
from nemo_rl_core.environments.contents import located_model
from nemo_rl_core.errors import ConfigError, ModelError, NemoRLError
from nemo_rl_core.planning.vllm_heads import refuse_heads_on_cpu, refuse_type
from nemo_rl_core.store.paths import resolve_below
from tasks.planning.gpu_plan import config_of
from tasks.recipes.common import PipelineRecipe

_LOG = logging.getLogger(__name__)
_OTHER_HEADS = "or take a model with heads of one of these widths"
_FIX_OF_A_JUDGE = "name a judge with heads of one of these widths, or use a cluster with GPUs"


def refuse_heads(experiment: PipelineRecipe) -> None:
    """Refuses a recipe whose models vLLM could not sample from; without GPUs, also its judges.

    Models whose config.json is not available yet are checked when their engine starts.
    """
    has_gpu = bool(experiment.cluster.num_gpus)
    evaluation_sampling = experiment.evaluation and experiment.evaluation.generation
    # With both, training samples with `generation` and evaluation with `evaluation.generation`.
    paths = {"generation": experiment.generation} | (
        {"evaluation.generation": evaluation_sampling} if evaluation_sampling else {}
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
    except NemoRLError as error:  # the stage that needs the model reports it
        _LOG.debug("the heads of %s are not known: %s", model.name, error.in_one_line)
        return None


def refuse_layers(experiment: PipelineRecipe) -> None:
    """Refuses LoRA, tensor parallelism, a router loss or a scalar head that a model cannot have."""
    training = experiment.training
    if isinstance(training, DTensorTraining) and (
        training.lora is not None
        or training.tensor_parallel_size > 1
        or training.router_aux_loss_coef
        or "scalar" in experiment.trained_heads
    ):
        for model in experiment.models:
            heads = experiment.trained_heads if model is experiment.model else []
            _check_model(model, training, heads)


def _check_model(model: ModelConfig, training: DTensorTraining, trained_heads: list[Head]) -> None:
    from nemo_rl_core.backends.training.dtensor.layer_check import check_layers

    with tempfile.TemporaryDirectory() as parent:
        folder = resolve_below(
            Path(parent), Path(model.name).name, source="the model of the recipe"
        )
        folder.mkdir()
        try:
            config = config_of(located_model(model))
            (folder / "config.json").write_text(json.dumps(config))
        # Broad on purpose: `prepare_model` reports a model that cannot be fetched.
        except Exception as error:  # noqa: BLE001
            _LOG.debug("the config of %s is not known: %s", model.name, error)
            return
        try:
            check_layers(folder, training, trained_heads)
        except (ConfigError, ModelError):
            raise
        # Broad on purpose: `prepare_model` reports a model that cannot be made.
        except Exception as error:  # noqa: BLE001
            _LOG.debug("the layers of %s are not known: %s", model.name, error)
