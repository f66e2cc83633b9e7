"""Workers whose packages conflict with the lock, next to this process, which has the lock's."""

from dataclasses import replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest

from nemo_rl_core.backends.generation.base import GenerationSetup
from nemo_rl_core.config.environment import EnvironmentWorkers
from nemo_rl_core.config.isolation import IsolatedPackages
from nemo_rl_core.config.single_turn import RewardFunction
from nemo_rl_core.distributed.session import ClusterSession
from nemo_rl_core.environments.factory import make_remote_scorer
from nemo_rl_core.models.generation import VllmGeneration
from nemo_rl_core.types import Completion, Prompt, Rollout
from tests.isolated_packages import write_package
from tests.ray.conftest import MakePolicy

REWARD = """
from importlib import metadata
import shade_of_lamp
import tabulate

def score(response: str) -> float:
    return float(response == f"{tabulate.shown} {metadata.version('tabulate')}")
"""


def rollouts(*texts: str) -> list[Rollout]:
    prompt = Prompt("0", "12+34=", (1,), "46", "sums", "{}")
    return [Rollout(prompt, Completion((), (), truncated=False), text) for text in texts]


@pytest.fixture
def isolation(tmp_path: Path) -> IsolatedPackages:
    """A folder with another tabulate than the lock's, and a package that nothing else has."""
    write_package(tmp_path / "site", "tabulate", "0.1", "shown = 'ours'")
    write_package(tmp_path / "site", "shade_of_lamp", "3.0")
    return IsolatedPackages(folder=str(tmp_path / "site"))


def test_a_reward_imports_packages_that_conflict_with_the_lock(
    session: ClusterSession,
    isolation: IsolatedPackages,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "isolated_rewards.py").write_text(REWARD)
    monkeypatch.syspath_prepend(tmp_path)
    config = RewardFunction(target="isolated_rewards:score")
    scorer = make_remote_scorer(config, EnvironmentWorkers(), isolation=isolation)
    assert scorer.score(rollouts("ours 0.1", "ours 0.9.0")) == [1.0, 0.0]
    scorer.close()
    assert metadata.version("tabulate") == "0.9.0"
    assert find_spec("shade_of_lamp") is None


def versions(_: object) -> str:
    """Returns the version of tabulate in a worker."""
    return metadata.version("tabulate")


@pytest.mark.slow
def test_engines_and_trainers_have_packages_of_their_own(
    session: ClusterSession,
    isolation: IsolatedPackages,
    make_policy: MakePolicy,
    generation_setup: GenerationSetup,
) -> None:
    policy = make_policy(isolation=isolation)
    assert policy.workers.run_single_worker("__ray_call__", versions) == "0.1"
    engine = VllmGeneration(session, generation_setup)
    assert engine._workers.run_single_worker("__ray_call__", versions) == "0.9.0"
    isolated = VllmGeneration(session, replace(generation_setup, isolation=isolation))
    assert isolated._workers.run_single_worker("__ray_call__", versions) == "0.1"
    isolated.update_weights(policy)  # one process has the lock's packages, the other has not
    assert make_policy().workers.run_single_worker("__ray_call__", versions) == "0.9.0"
