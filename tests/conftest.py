"""Fixtures that several suites share."""

import os
import tempfile
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "2")
# Before `tasks` is imported, which points flytekit at the store: no test touches the user's own.
_STORE = tempfile.TemporaryDirectory(prefix="nemo-rl-test-store-")
os.environ["NEMO_RL_HOME"] = _STORE.name


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A transformers folder: two-layer Qwen2 with random weights, and the arithmetic tokenizer."""
    from nemo_rl_core.config.model import ModelFromConfig
    from nemo_rl_core.converters.materialize import materialize

    folder = tmp_path_factory.mktemp("tiny") / "model"
    config = ModelFromConfig(hidden_size=32, intermediate_size=64, num_layers=2, num_heads=2)
    materialize(config, folder, seed=0)
    return folder
