"""Checks of models, of batches that the data cannot fill, and of runs that take hours."""

import json
import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from nemo_rl_core.algorithms.declarations import ALGORITHMS
from nemo_rl_core.config.data import DataConfig, FileData
from nemo_rl_core.config.environment import model_scorers
from nemo_rl_core.config.generation import VllmGenerationConfig
from nemo_rl_core.config.judge import JudgeModel
from nemo_rl_core.config.model import ModelConfig, ModelFromWheel, PretrainedModel, SmallModel
from nemo_rl_core.config.training import DTensorTraining, Head
from nemo_rl_core.data.datasets import load_rows
from nemo_rl_core.environments.contents import located_model
from nemo_rl_core.errors import ConfigError, ModelError, NemoRLError
from nemo_rl_core.planning.cpu_hours import hours_warning
from nemo_rl_core.planning.sizes import sizes_of
from nemo_rl_core.planning.vllm_heads import refuse_heads_on_cpu, refuse_type
from nemo_rl_core.store import remote
from nemo_rl_core.store.paths import resolve_below
from nemo_rl_core.types import Row
from tasks.planning.gpu_plan import config_of
from tasks.planning.loads import loads_of, steps_of
from tasks.recipes.common import PipelineRecipe
from tasks.recipes.pairs import PairsFromRollouts

_LOG = logging.getLogger(__name__)
MOST_BYTES_READ: Final = 64 * 2**20
"""Larger files take longer to read than a user would wait before a run starts."""
_TOY: Final = 1_000_000
"""Layers times the square of the hidden size: smaller models do not take hours."""
_PAIRS: Final = "num_pairs_per_step"


def check_size(experiment: PipelineRecipe) -> None:
    """Refuses steps of more rows than the data has, and warns of hours on a CPU."""
    batches = _batches(experiment)
    num_rows = _num_rows(experiment.data) if batches else None
    if num_rows:  # the stage that reads the rows refuses an empty set
        _refuse_large(batches, num_rows)
    if batches and not experiment.cluster.num_gpus:
        _warn_of_hours(experiment, num_rows)


def _batches(experiment: PipelineRecipe) -> dict[str, int]:
    samples_pairs = isinstance(getattr(experiment, "pairs", None), PairsFromRollouts)
    sections = (
        (name, algorithm.rows_per_step, getattr(experiment, name, None))
        for name, algorithm in ALGORITHMS.items()
    )
    return {
        f"{name}.{field}": getattr(config, field)
        for name, field, config in sections
        if config is not None and not (samples_pairs and field == _PAIRS)
    }


def _refuse_large(batches: Mapping[str, int], num_rows: int) -> None:
    too_large = {name: size for name, size in batches.items() if size > num_rows}
    if too_large:
        raise ConfigError(
            "a step takes more rows than the data has",
            expected=f"{' and '.join(too_large)} of at most {num_rows}, the rows to train on",
            got=", ".join(map(str, too_large.values())),
            fix="lower the setting, or use more data",
        )


def _warn_of_hours(experiment: PipelineRecipe, num_rows: int | None) -> None:
    if not _is_sized(experiment.model):
        return
    row_characters = None
    if isinstance(experiment.data, FileData) and num_rows:
        row_characters = bytes_of([experiment.data.train]) / num_rows
    try:
        loads = loads_of(experiment, lambda model: sizes_of(config_of(model)))
    except NemoRLError as error:
        _LOG.debug("the time was not estimated: %s", error.in_one_line)
        return
    steps = steps_of(experiment)
    for load in loads:
        text = hours_warning(load, steps.get(load.name, 0), row_characters=row_characters)
        if text:
            _LOG.warning("%s", text)


def _is_sized(model: ModelConfig) -> bool:
    """Whether the sizes are known immediately, and are not those of a toy model."""
    if isinstance(model, PretrainedModel):
        return Path(model.name).expanduser().is_dir()
    return isinstance(model, SmallModel) and model.num_layers * model.hidden_size**2 > _TOY


def _num_rows(data: DataConfig) -> int | None:
    """Returns the number of rows to train on; None if they cannot be counted immediately."""
    if not isinstance(data, FileData):
        return getattr(data, "num_train", None)
    if remote.is_remote(data.train) or bytes_of([data.train]) > MOST_BYTES_READ:
        return None
    with suppress(NemoRLError):  # the stage that reads the rows reports their problems
        return len(rows_to_check(data)[0])
    return None


def rows_to_check(data: DataConfig) -> tuple[Sequence[Row], Sequence[Row]]:
    """Returns the rows of a data section without the log lines of reading them.

    The stage that prepares the rows writes these lines, once.
    """
    with reading_quietly():
        return load_rows(data, seed=0)


@contextmanager
def reading_quietly() -> Iterator[None]:
    """Suppresses the log lines of reading rows."""
    reading = logging.getLogger("nemo_rl_core.data")
    level = reading.level
    reading.setLevel(logging.ERROR)
    try:
        yield
    finally:
        reading.setLevel(level)


def bytes_of(names: Sequence[str]) -> int:
    """Returns the bytes of local files, and of those in local folders."""
    paths = [Path(name).expanduser() for name in names]
    files = [file for path in paths for file in (path.rglob("*") if path.is_dir() else [path])]
    return sum(file.stat().st_size for file in files if file.is_file())


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
            if getattr(model, "trust_remote_code", False) and "auto_map" in config:
                return  # its layers are not known until a worker runs its code
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
