"""What a recipe names and this machine has not: all of it at once, with its keys."""

from collections.abc import Iterator
from pathlib import Path

from nemo_rl_core.config.data import DataConfig, FileData, MixtureData
from nemo_rl_core.config.model import ModelConfig, PretrainedModel
from nemo_rl_core.environments.needs import check_targets
from nemo_rl_core.errors import DataError, NemoRLError
from nemo_rl_core.store import remote
from tasks.recipes.common import PipelineRecipe

_FILES = "a .jsonl, .csv, .parquet or .arrow file, or a folder of such"


def refuse_missing(experiment: PipelineRecipe) -> None:
    """Refuses a recipe whose data files, or model folder beside them, are not there.

    Raises:
        DataError: Names every key with its absolute path; with them, a model folder and modules of
            rewards that are missing, too. Where only these are, their own checks name them.
    """
    files = list(dict.fromkeys(_missing_files(experiment.data, "data")))
    if experiment.evaluation_data is not None:
        files += _missing_files(experiment.evaluation_data, "evaluation.data")
    if not files:
        return
    found = [*files, *_missing_model(experiment.model), *_missing_rewards(experiment)]
    count = "a data file does not exist" if len(found) == 1 else "the recipe names what is missing"
    keys = ", ".join(dict.fromkeys(line.partition(": ")[0] for line in found))
    raise DataError(
        "\n  ".join([f"{count}:", *found]), expected=_FILES, fix=f"correct {keys} in the recipe"
    )


def _missing_files(data: DataConfig, path: str) -> Iterator[str]:
    if isinstance(data, MixtureData):
        for place, source in enumerate(data.sources):
            yield from _missing_files(source.data, f"{path}.sources.{place}.data")
    if not isinstance(data, FileData):
        return
    # `evaluation.data` may name validation rows only, which are then those of both parts.
    is_named = data.train != data.validation or not path.startswith("evaluation.")
    train = data.train if is_named else None
    for key, name in (("train", train), ("validation", data.validation)):
        if name is not None and not remote.is_remote(name):
            file = Path(name).expanduser()
            if not file.exists():
                yield f"{path}.{key}: no file {file.absolute()}"


def _missing_model(model: ModelConfig) -> Iterator[str]:
    if isinstance(model, PretrainedModel) and model.name.startswith((".", "/", "~")):
        folder = Path(model.name).expanduser()
        if not folder.is_dir():
            yield f"model.name: no folder {folder.absolute()}"


def _missing_rewards(experiment: PipelineRecipe) -> Iterator[str]:
    scored = {path: reward for _, reward, path in experiment.samplings}
    for path, reward in scored.items():
        try:
            check_targets(reward)
        except NemoRLError as error:
            yield f"{path}: {error.in_one_line}"
