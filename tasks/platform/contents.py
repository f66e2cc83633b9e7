"""What lies behind the names in a recipe: files change, and their names do not.

A stage's record carries these digests beside the names, so that Flyte's cache sees a changed file
as the changed input that it is. What the project makes itself has none: its source is digested.
"""

from pathlib import Path

from nemo_rl_core.config.data import DataConfig, FileData
from nemo_rl_core.config.environment import (
    EnvironmentConfig,
    JudgeModel,
    LLMJudge,
    RetrieverTool,
    RewardFunction,
    RewardModelScore,
    SingleEnvironmentConfig,
    ToolUse,
    multi_turn_environments,
    single_environments,
)
from nemo_rl_core.config.model import ModelConfig, PretrainedModel
from nemo_rl_core.store.files import hash_file, hash_folder
from tasks.platform.user_source import user_source


def data_content(data: DataConfig) -> str:
    """A digest of the user's files and folders; empty where rows are generated or on the hub.

    A data set on the hub is known by its name and `revision`: asking the hub at every plan would
    make a run without a network fail on rows that are cached.
    """
    if not isinstance(data, FileData):
        return ""
    return " ".join(_path(Path(name).expanduser()) for name in (data.train, data.validation))


def model_content(model: ModelConfig) -> str:
    """A digest of a folder on this machine; empty for hub names and models made here."""
    folder = Path(model.name).expanduser()
    if isinstance(model, PretrainedModel) and folder.is_dir():
        return hash_folder(folder)
    return ""


def reward_content(environment: EnvironmentConfig) -> str:
    """A digest of what scores: modules of the user's reward functions with all that they import
    (see `user_source`), folders of reward models, files of retrievers.
    """
    found = [_scored_by(each) for each in single_environments(environment)]
    for tools_or_game in multi_turn_environments(environment):
        if isinstance(tools_or_game, ToolUse):
            tools = [each for each in tools_or_game.tools if isinstance(each, RetrieverTool)]
            found += [_file(Path(each.path).expanduser()) for each in tools]
    return " ".join(filter(None, found))


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
        return hash_folder(folder) if folder.is_dir() else ""
    if not isinstance(environment, RewardFunction):
        return ""
    return user_source(environment.target.partition(":")[0])


def _path(path: Path) -> str:
    return hash_folder(path) if path.is_dir() else _file(path)


def _file(path: Path) -> str:
    return hash_file(path) if path.is_file() else ""
