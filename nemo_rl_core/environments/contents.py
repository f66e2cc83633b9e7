"""Content digests of the files and folders that a recipe names.

A stage's record contains these digests beside the names, so that a changed file is a changed input
for Flyte's cache. Generated data has none, since its source is digested.
"""

from hashlib import sha256
from pathlib import Path
from typing import TypeVar

from nemo_rl_core.config.base import FrozenConfig
from nemo_rl_core.config.data import DataConfig, FileData, MixtureData
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
from nemo_rl_core.store.files import hash_file, hash_folder
from nemo_rl_core.store.user_source import user_source
from nemo_rl_core.telemetry.waiting import waiting_for_hashes

Section = TypeVar("Section", bound=FrozenConfig)


def data_content(data: DataConfig) -> str:
    """Returns a digest of the user's files and folders; empty for generated and hub data.

    A data set on the hub is identified by its name and `revision`: a request to the hub per plan
    would make offline runs fail on cached rows.
    """
    if isinstance(data, MixtureData):
        return " ".join(filter(None, (data_content(each.data) for each in data.sources)))
    if not isinstance(data, FileData):
        return ""
    names = (data.train, data.validation)
    return " ".join(_path(Path(name).expanduser()) for name in names if name is not None)


def model_content(model: ModelConfig) -> str:
    """Returns a digest of a local folder; empty for hub names and generated models."""
    folder = Path(model.name).expanduser()
    if isinstance(model, PretrainedModel) and folder.is_dir():
        return _path(folder)
    return ""


def reward_content(environment: EnvironmentConfig) -> str:
    """Returns a digest of the scoring code and files.

    These are modules of reward functions and environments with their imports (see `user_source`),
    folders of reward models, and files of retrievers.
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
        folder = Path(model).expanduser()
        return _path(folder) if folder.is_dir() else ""
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
