"""Content digests of the files and folders that a recipe names.

A stage's record contains these digests beside the names, so that a changed file is a changed input
for Flyte's cache. Generated data has none, since its source is digested.
"""

from hashlib import sha256
from pathlib import Path
from typing import TypeVar

from nemo_rl_core.checkpoints.hub import commit_of, is_commit
from nemo_rl_core.config.base import FrozenConfig
from nemo_rl_core.config.data import DataConfig, FileData, HubData, MixtureData
from nemo_rl_core.config.environment import (
    EnvironmentConfig,
    multi_turn_environments,
    single_environments,
)
from nemo_rl_core.config.judge import JudgeModel, LLMJudge
from nemo_rl_core.config.model import ModelConfig, PretrainedModel
from nemo_rl_core.config.multi_turn import PythonEnvironment, RetrieverTool, ToolUse
from nemo_rl_core.config.registered import RegisteredBackend
from nemo_rl_core.config.single_turn import (
    RewardFunction,
    RewardModelScore,
    SingleEnvironmentConfig,
)
from nemo_rl_core.environments.targets import module_of
from nemo_rl_core.errors import DataError
from nemo_rl_core.store import aliases, remote
from nemo_rl_core.store.files import hash_file, hash_folder
from nemo_rl_core.store.user_source import user_source
from nemo_rl_core.telemetry.waiting import waiting_for_hashes

Section = TypeVar("Section", bound=FrozenConfig)


def data_content(data: DataConfig) -> str:
    """Returns a digest of the user's files and folders, and of listings of an object store.

    It is empty for generated data, and for that of the hub, whose commit `pinned` writes into the
    config.

    Raises:
        DataError: If an object store cannot be asked.
    """
    if isinstance(data, MixtureData):
        return " ".join(filter(None, (data_content(each.data) for each in data.sources)))
    if not isinstance(data, FileData):
        return ""
    names = (data.train, data.validation)
    return " ".join(_named_data(name) for name in names if name is not None)


def refuse_changed(data: DataConfig, known: str) -> None:
    """Refuses rows of an object store that are not those that the run began with.

    Args:
        data: Has been read.
        known: What `data_content` returned when the run began.

    Raises:
        DataError: If the listing is another one by now.
    """
    if isinstance(data, MixtureData):
        for each in data.sources:
            refuse_changed(each.data, known)
    if not isinstance(data, FileData):
        return
    for name in (data.train, data.validation):
        if name is None or not remote.is_remote(name):
            continue
        now = remote.content(remote.listing(name))
        if now not in known:
            raise DataError(
                f"the data under {name} has changed since the run began",
                expected=known,
                got=now,
                fix="run again when what writes it has ended",
            )


def pinned(data: DataConfig) -> DataConfig:
    """The same data with the commit that each data set of the hub has now.

    So a new commit is another input, and rows are read from the one that the key names. Without a
    network, the commit that was seen last is taken; where there was none, the config stays.
    """
    if isinstance(data, MixtureData):
        sources = [each.replace(data=pinned(each.data)) for each in data.sources]
        return data.replace(sources=sources)
    if not isinstance(data, HubData):
        return data
    return data.replace(revision=commit_of("dataset", data.name, data.revision) or data.revision)


def _named_data(name: str) -> str:
    if remote.is_remote(name):
        return remote.content(remote.listing(name))
    return _path(Path(name).expanduser())


def model_content(model: ModelConfig) -> str:
    """Returns a digest of a folder, or of its listing, or the commit of a model of the hub.

    It is empty for generated models, and where the hub does not answer and its cache has none.
    """
    if not isinstance(model, PretrainedModel):
        return ""
    if remote.is_remote(model.name):
        return remote.content(remote.tree(model.name))
    return _named_model(model.name)


def commit_in(content: str) -> str | None:
    """The commit that `model_content` has returned for a model of the hub; None for others."""
    return content if is_commit(content) else None


def _named_model(name: str) -> str:
    folder = Path(name).expanduser()
    return _path(folder) if folder.is_dir() else commit_of("model", name) or ""


def located_model(model: ModelConfig) -> ModelConfig:
    """A model whose name is an alias, with the folder or address that it means now.

    Raises:
        StoreError: If there is no such alias, or its model is gone.
    """
    if not isinstance(model, PretrainedModel):
        return model
    return model.replace(name=aliases.located(model.name))


def reward_content(environment: EnvironmentConfig) -> str:
    """Returns a digest of the scoring code and files.

    These are modules of reward functions and environments with their imports (see `user_source`),
    folders or commits of reward models, and files of retrievers.
    """
    found = [_scored_by(each) for each in single_environments(environment)]
    for answers in multi_turn_environments(environment):
        if isinstance(answers, ToolUse):
            tools = [each for each in answers.tools if isinstance(each, RetrieverTool)]
            found += [_file(Path(each.path).expanduser()) for each in tools]
        if isinstance(answers, PythonEnvironment):
            found.append(user_source(module_of(answers.target)))
    return " ".join(filter(None, found))


def with_source(section: Section) -> Section:
    """A section with the digest of the user's source that its backend runs, if it has such."""
    if not isinstance(section, RegisteredBackend) or section.module is None:
        return section
    return section.replace(source=sha256(user_source(section.module).encode()).hexdigest())


def _model_of(environment: SingleEnvironmentConfig) -> str | None:
    if isinstance(environment, RewardModelScore):
        return environment.model
    if isinstance(environment, LLMJudge) and isinstance(environment.judge, JudgeModel):
        return environment.judge.model
    return None


def _scored_by(environment: SingleEnvironmentConfig) -> str:
    model = _model_of(environment)
    if model is not None:
        return _named_model(model)
    if not isinstance(environment, RewardFunction):
        return ""
    return user_source(environment.target.partition(":")[0])


def _path(path: Path) -> str:
    if not path.is_dir():
        return _file(path)
    with waiting_for_hashes(f"hashing {path}"):
        return hash_folder(path)


def _file(path: Path) -> str:
    if not path.is_file():
        return ""
    with waiting_for_hashes(f"hashing {path}"):
        return hash_file(path)
