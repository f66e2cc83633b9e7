"""Content digests of the files and folders that a recipe names.

Stage records contain them next to the names, so that a changed file misses Flyte's cache. Generated
data has none, since the digest of its source code covers it.
"""

from hashlib import sha256
from pathlib import Path
from typing import TypeVar

from nemo_rl_core.checkpoints.hub import commit_of, is_commit
from nemo_rl_core.config.agents import AgentEnvironment
from nemo_rl_core.config.base import FrozenConfig
from nemo_rl_core.config.data import DataConfig, FileData, HubData, MixtureData
from nemo_rl_core.config.environment import (
    EnvironmentConfig,
    multi_turn_environments,
    single_environments,
)
from nemo_rl_core.config.functions import CustomFunction
from nemo_rl_core.config.judge import JudgeModel, LLMJudge
from nemo_rl_core.config.model import ModelConfig, PretrainedModel
from nemo_rl_core.config.multi_turn import (
    FunctionTool,
    McpServer,
    PythonEnvironment,
    RetrieverTool,
    ToolConfig,
    ToolUse,
)
from nemo_rl_core.config.registered import RegisteredBackend
from nemo_rl_core.config.single_turn import (
    RewardFunction,
    RewardModelScore,
    SingleEnvironmentConfig,
)
from nemo_rl_core.environments.agent_programs import agent_source
from nemo_rl_core.environments.targets import module_of
from nemo_rl_core.errors import DataError
from nemo_rl_core.store import aliases, remote
from nemo_rl_core.store.files import hash_file, hash_folder
from nemo_rl_core.store.user_source import user_source
from nemo_rl_core.telemetry.waiting import waiting_for_hashes

Section = TypeVar("Section", bound=FrozenConfig)


def data_content(data: DataConfig) -> str:
    """Returns a digest of local files and folders, and of listings of an object store.

    It is empty for generated data, and for data of the hub, whose commit `pinned` writes into the
    config.
    """
    if isinstance(data, MixtureData):
        return " ".join(filter(None, (data_content(each.data) for each in data.sources)))
    if not isinstance(data, FileData):
        return ""
    names = (data.train, data.validation)
    return " ".join(_named_data(name) for name in names if name is not None)


def refuse_changed(data: DataConfig, known: str) -> None:
    """Refuses data in an object store whose listing is not part of `known`."""
    if isinstance(data, MixtureData):
        for each in data.sources:
            refuse_changed(each.data, known)
    if not isinstance(data, FileData):
        return
    for name in (data.train, data.validation):
        if name is None or not remote.is_remote(name):
            continue
        now = remote.describe_content(remote.listing(name))
        if now not in known:
            raise DataError(
                f"the data under {name} has changed since the run began",
                expected=known,
                got=now,
                fix="wait until nothing writes to it, and run again",
            )


def pinned(data: DataConfig) -> DataConfig:
    """Returns the config with the current commit of each data set of the hub.

    Without a network, the last known commit is used; if there is none, the config does not change.
    """
    if isinstance(data, MixtureData):
        sources = [each.replace(data=pinned(each.data)) for each in data.sources]
        return data.replace(sources=sources)
    if not isinstance(data, HubData):
        return data
    return data.replace(revision=commit_of("dataset", data.name, data.revision) or data.revision)


def _named_data(name: str) -> str:
    if remote.is_remote(name):
        return remote.describe_content(remote.listing(name))
    return _path(Path(name).expanduser())


def model_content(model: ModelConfig) -> str:
    """Returns the digest of a model's folder or listing, or the commit of a model of the hub.

    It is empty for generated models, and if neither the hub nor its cache knows the commit.
    """
    if not isinstance(model, PretrainedModel):
        return ""
    if remote.is_remote(model.name):
        return remote.describe_content(remote.tree(model.name))
    return _named_model(model.name, model.revision)


def commit_in(content: str) -> str | None:
    """Returns the commit in a result of `model_content`; None unless the model is of the hub."""
    return content if is_commit(content) else None


def _named_model(name: str, revision: str | None = None) -> str:
    folder = Path(name).expanduser()
    return _path(folder) if folder.is_dir() else commit_of("model", name, revision) or ""


def located_model(model: ModelConfig) -> ModelConfig:
    """Returns the config with an alias replaced by the current folder or address of its model."""
    if not isinstance(model, PretrainedModel):
        return model
    return model.replace(name=aliases.located(model.name))


def reward_content(environment: EnvironmentConfig) -> str:
    """Returns a digest of code that scores or answers, agents, reward models and passages.

    See `user_source` for the code. An MCP server is known by the files that its command names.
    """
    digests = [_scorer_digest(each) for each in single_environments(environment)]
    for answers in multi_turn_environments(environment):
        if isinstance(answers, ToolUse):
            digests += [_tool_digest(each) for each in answers.tools]
        if isinstance(answers, PythonEnvironment):
            digests.append(user_source(module_of(answers.target)))
        if isinstance(answers, AgentEnvironment):
            digests.append(agent_source(answers))
    return " ".join(filter(None, digests))


def with_source(section: Section) -> Section:
    """Returns the section with the source digests of its registered backend and its functions."""
    if isinstance(section, CustomFunction):
        return section.replace(source=_source(module_of(section.target)))
    if isinstance(section, RegisteredBackend) and section.module is not None:
        return section.replace(source=_source(section.module))
    functions = {
        name: with_source(each) for name, each in section if isinstance(each, CustomFunction)
    }
    return section.replace(**functions) if functions else section


def _source(module: str) -> str:
    return sha256(user_source(module).encode()).hexdigest()


def _scorer_digest(environment: SingleEnvironmentConfig) -> str:
    match environment:
        case RewardModelScore(model=str(model)) | LLMJudge(judge=JudgeModel(model=model)):
            return _named_model(model)
        case RewardFunction(target=target):
            return user_source(target.partition(":")[0])
    return ""


def _tool_digest(tool: ToolConfig) -> str:
    match tool:
        case RetrieverTool(path=path):
            return _file(Path(path).expanduser())
        case FunctionTool(target=target):
            return user_source(module_of(target))
        case McpServer(command=[_, "-m", module, *_]):
            return user_source(module)
        case McpServer(command=command):
            return " ".join(filter(None, (_file(Path(each).expanduser()) for each in command)))
    return ""


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
