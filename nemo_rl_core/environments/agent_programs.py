"""Checks of the programs of agents before a run, and digests of their sources."""

import inspect
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from nemo_rl_core.config.agents import AgentEnvironment
from nemo_rl_core.environments.interfaces import Scorer
from nemo_rl_core.environments.targets import import_function, module_of
from nemo_rl_core.errors import ConfigError, RewardError
from nemo_rl_core.store.files import hash_file, hash_folder
from nemo_rl_core.store.user_source import user_source
from nemo_rl_core.types import Rollout

_SIGNATURE = "run(base_url, api_key, row)"


class ReportedReward(Scorer):
    """Scorer of an agent that reports its reward, without which a text has none."""

    def score(self, rollouts: Sequence[Rollout]) -> list[float | RewardError]:
        """Returns an error for each rollout."""
        error = RewardError("the agent computes the reward of its episode, so a text has none")
        return [error for _ in rollouts]


def check_agent(config: AgentEnvironment) -> None:
    """Checks that the program or function of an agent exists, without starting it.

    Raises:
        ConfigError: If a program, function, file or variable is missing.
    """
    lacking = [name for name in config.variables if name not in os.environ]
    if lacking:
        raise ConfigError(
            "environment.variables: the run's environment lacks variables of the agent",
            expected=f"values of {', '.join(config.variables)}",
            got=f"no {', '.join(lacking)}",
            fix=f"export {lacking[0]}=..., or remove it from the list",
        )
    files = [*config.files, *_scripts(config)]
    if missing := [name for name in files if not Path(name).exists()]:
        raise ConfigError(
            "a file of the agent does not exist",
            expected=f"{missing[0]} in the working folder",
            got=f"no {Path(missing[0]).absolute()}",
            fix="correct environment.command or environment.files",
        )
    if config.command is not None:
        _find_program(config.command[0])
    if config.target is not None:
        _check_function(config.target)


def _find_program(name: str) -> None:
    if shutil.which(name, path=program_path()) is None:
        raise ConfigError(
            f"environment.command: the program {name!r} does not exist",
            expected="an executable file, or the name of one in PATH",
            got=name,
            fix="install it, or correct the command",
        )


def _check_function(target: str) -> None:
    run = import_function(target, of="environment.target", expected=_SIGNATURE)
    try:
        inspect.signature(run).bind("base_url", "api_key", {})
    except TypeError as error:
        raise ConfigError(
            f"environment.target: {target!r} cannot be called as an agent",
            expected=_SIGNATURE,
            got=f"{target.partition(':')[2]}{inspect.signature(run)}: {error}",
            fix="give the function these three parameters",
        ) from error


def agent_source(config: AgentEnvironment) -> str:
    """Returns a digest of the agent's code and files, for the cache key.

    It covers `files`, files and folders that the command names, and the user's modules that its
    Python scripts import. Programs that are found in `PATH` do not count.
    """
    digests = [_content(Path(each)) for each in (*config.files, *(config.command or ()))]
    digests += [user_source(name) for name in _modules(config)]
    return " ".join(filter(None, digests))


def _content(path: Path) -> str:
    """Returns the digest of a file or folder; empty for an argument that is none."""
    try:
        path.stat()
    except (OSError, ValueError):  # does not exist, is too long, or has a zero byte
        return ""
    if path.is_dir():
        return hash_folder(path, exclude=("*.pyc",))
    source = user_source(path.stem, path.parent.absolute()) if path.suffix == ".py" else ""
    return source or hash_file(path)


def _scripts(config: AgentEnvironment) -> list[str]:
    """Returns the Python scripts of the command; one that does not exist is a mistake."""
    return [each for each in config.command or () if each.endswith(".py") and "{" not in each]


def _modules(config: AgentEnvironment) -> Iterator[str]:
    """Returns the modules of the target, and of a command such as `python -m my_agent`."""
    if config.target is not None:
        yield module_of(config.target)
    command = config.command or []
    for option, name in pairwise(command):
        if option == "-m":
            yield name
            yield f"{name}.__main__"


def program_path() -> str:
    """Returns the search path of programs: first the folder of this Python."""
    # A relative folder would depend on the working folder.
    folder = str(Path(sys.executable).absolute().parent)
    return os.pathsep.join([folder, os.environ.get("PATH", os.defpath)])
