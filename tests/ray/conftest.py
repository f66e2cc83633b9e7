"""One Ray runtime and one engine for all tests that need them."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_core.backends.generation.base import GenerationSetup
from nemo_rl_core.backends.training.base import TrainingSetup
from nemo_rl_core.config.cluster import ClusterConfig
from nemo_rl_core.config.generation import VllmGenerationConfig
from nemo_rl_core.config.model import ModelFromConfig
from nemo_rl_core.config.optimizer import OptimizerConfig
from nemo_rl_core.converters.materialize import materialize
from nemo_rl_core.data.chat import prompt_token_ids
from nemo_rl_core.data.pretrained import load_tokenizer, stop_token_ids
from nemo_rl_core.distributed import session as sessions
from nemo_rl_core.distributed.session import ClusterSession, connect
from nemo_rl_core.models.generation import VllmGeneration
from nemo_rl_core.models.generation.streaming import StreamingGeneration
from nemo_rl_core.models.policy import Policy
from nemo_rl_core.rollouts.engine import SingleTurnRollouts
from nemo_rl_core.rollouts.stream import RolloutStream
from nemo_rl_core.types import Prompt
from tests.ray.ahead import LONG

GENERATION = VllmGenerationConfig(max_new_tokens=6, kv_cache_gib=1, max_num_seqs=64)
MAX_PROMPT_TOKENS = 16


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shared tiny model with heads of 32: the smallest that vLLM on a CPU supports."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    config = ModelFromConfig(hidden_size=64, intermediate_size=96, num_layers=2, num_heads=2)
    materialize(config, folder, seed=0)
    return folder


@pytest.fixture(scope="session", autouse=True)
def forked_workers() -> Iterator[None]:
    """Forks the workers of Rays that this process starts; the server starts with the first."""
    import ray

    servers: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, pytest.MonkeyPatch.context() as patch:
        init, address = ray.init, f"{folder}/socket"
        program = str(Path(__file__).with_name("forked_workers.py"))

        def init_with_forks(**options: Any) -> Any:
            if not servers:
                servers.append(subprocess.Popen([sys.executable, program, address]))
                while not Path(address).exists():  # Ray only waits a minute for a worker
                    assert servers[0].poll() is None
                    time.sleep(0.1)
            runtime = {"py_executable": f"{sys.executable} -I -S {program} {address}"}
            runtime = options.pop("runtime_env", {}) | runtime
            return init(**options, runtime_env=runtime)

        if not any(name.startswith("COVERAGE_PROCESS") for name in os.environ):  # as users start
            patch.setattr(ray, "init", init_with_forks)
        yield
        for server in servers:
            server.terminate()
            server.wait()


@pytest.fixture(scope="session")
def session() -> Iterator[ClusterSession]:
    yield connect(ClusterConfig(num_threads=1))
    sessions.shutdown()


@pytest.fixture(scope="session")
def generation_setup(tiny_model: Path) -> GenerationSetup:
    return GenerationSetup(
        model_folder=tiny_model,
        config=GENERATION,
        max_model_len=MAX_PROMPT_TOKENS + GENERATION.max_new_tokens,
        stop_token_ids=stop_token_ids(tiny_model, load_tokenizer(tiny_model)),
    )


@pytest.fixture
def engine(session: ClusterSession, generation_setup: GenerationSetup) -> VllmGeneration:
    """The shared engine, with the initial weights of the tiny model."""
    return VllmGeneration(session, generation_setup)


@pytest.fixture(scope="session")
def long_setup(generation_setup: GenerationSetup) -> GenerationSetup:
    """Completions of exactly 200 tokens, so that they can be interrupted."""
    config = generation_setup.config.model_copy(update={"max_new_tokens": LONG})
    return replace(
        generation_setup,
        config=config,
        max_model_len=MAX_PROMPT_TOKENS + LONG,
        stop_token_ids=(),
    )


@pytest.fixture
def streaming_engine(session: ClusterSession, long_setup: GenerationSetup) -> StreamingGeneration:
    """An engine of long completions that accepts requests at any time."""
    return StreamingGeneration(session, long_setup)


@pytest.fixture
def rollouts(streaming_engine: StreamingGeneration, tiny_model: Path) -> SingleTurnRollouts:
    """Rollouts by the streaming engine."""
    return SingleTurnRollouts(streaming_engine, load_tokenizer(tiny_model), seed=0)


@pytest.fixture
def stream(
    streaming_engine: StreamingGeneration, rollouts: SingleTurnRollouts
) -> Iterator[RolloutStream]:
    """A stream of the streaming engine."""
    with RolloutStream(streaming_engine, rollouts.episode, None, seed=0) as stream:
        yield stream


@pytest.fixture(scope="session")
def prompts(tiny_model: Path) -> list[Prompt]:
    """Twelve sums of different lengths."""
    tokenizer = load_tokenizer(tiny_model)
    return [
        Prompt(
            id=str(index),
            text=(text := f"{7 * index % 23}+{13 * index % 17}="),
            token_ids=tuple(prompt_token_ids(tokenizer, text)),
            answer=str(7 * index % 23 + 13 * index % 17),
            task="arithmetic",
        )
        for index in range(12)
    ]


class MakePolicy:
    """Sets the shared training worker up again."""

    def __init__(self, session: ClusterSession, setup: TrainingSetup) -> None:
        self._session = session
        self._setup = setup

    def __call__(self, **changes: object) -> Policy:
        return Policy(self._session, replace(self._setup, **changes))


@pytest.fixture
def make_policy(session: ClusterSession, tiny_model: Path) -> MakePolicy:
    setup = TrainingSetup(
        model_folder=tiny_model,
        # A rate this high moves every weight, so that old weights cannot pass for new ones.
        optimizer=OptimizerConfig(learning_rate=0.03),
        max_tokens_per_microbatch=512,
    )
    return MakePolicy(session, setup)
