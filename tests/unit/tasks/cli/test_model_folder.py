"""The argument that names a model."""

import shutil
from pathlib import Path

import pytest

from nemo_rl_core.errors import StoreError
from nemo_rl_core.history.writer import HistoryWriter
from nemo_rl_core.produce import StageInputs, StageResult, produce
from nemo_rl_core.store.store import Store
from tasks.cli.model_folder import model_folder


def test_a_folder_and_the_folder_around_it(tmp_path: Path, own_store: Path) -> None:
    (tmp_path / "a" / "model").mkdir(parents=True)
    (tmp_path / "a" / "model" / "config.json").write_text("{}")
    assert model_folder(str(tmp_path / "a")) == tmp_path / "a" / "model"
    assert model_folder(str(tmp_path / "a" / "model")) == tmp_path / "a" / "model"
    assert model_folder("nowhere") == Path("nowhere")
