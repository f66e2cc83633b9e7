"""Rows and models of the hub are those of a commit, which is part of the key."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from nemo_rl_core.checkpoints import hub
from nemo_rl_core.config.data import HubData, MixtureData, MixtureSource
from nemo_rl_core.config.model import ModelFromConfig, PretrainedModel
from nemo_rl_core.config.single_turn import RewardModelScore
from nemo_rl_core.converters.materialize import materialize
from nemo_rl_core.data.pretrained import base_names
from nemo_rl_core.environments.contents import commit_in, model_content, pinned, reward_content

COMMITS = {"main": "a" * 40, "v1": "b" * 40}


class Hub(BaseHTTPRequestHandler):
    """As much of the hub's protocol as the commit of a data set takes."""

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.end_headers()

    def do_GET(self) -> None:
        revision = self.path.partition("?")[0].partition("/revision/")[2] or "main"
        is_known = self.path.startswith(("/api/datasets/org/rows", "/api/models/org/model"))
        is_known = is_known and revision in COMMITS
        body = json.dumps({"id": "org/rows", "sha": COMMITS.get(revision)}).encode()
        self.send_response(200 if is_known else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


@pytest.fixture
def a_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HTTPServer]:
    server = HTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.hf_api.constants.ENDPOINT", address)
    monkeypatch.setattr(hub, "_reached", {})
    monkeypatch.setenv("NEMO_RL_HOME", str(tmp_path / "store"))
    yield server
    server.shutdown()
    server.server_close()


def test_data_of_the_hub_is_that_of_its_commit(
    a_hub: HTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = HubData(name="org/rows")
    assert pinned(config) == config.replace(revision="a" * 40)
    assert pinned(config.replace(revision="v1")).revision == "b" * 40
    assert pinned(config.replace(revision="c" * 40)).revision == "c" * 40
    mixed = MixtureData(sources=[MixtureSource(data=config)])
    (source,) = pinned(mixed).sources
    assert source.data.revision == "a" * 40
    # A push to the hub is another input; without a network the last answer holds.
    monkeypatch.setitem(COMMITS, "main", "d" * 40)
    assert pinned(config).revision == "d" * 40
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert pinned(config).revision == "d" * 40
    assert pinned(HubData(name="org/never", revision="v2")).revision == "v2"


def test_unknown_commits_are_left_to_the_download(a_hub: HTTPServer) -> None:
    config = HubData(name="org/none")
    assert pinned(config) == config


def test_a_model_of_the_hub_is_that_of_its_commit(
    a_hub: HTTPServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = PretrainedModel(name="org/model")
    scored = RewardModelScore(model="org/model")
    assert model_content(model) == reward_content(scored) == "a" * 40
    assert commit_in(model_content(model)) == "a" * 40
    assert model_content(PretrainedModel(name="org/none")) == ""
    monkeypatch.setitem(COMMITS, "main", "d" * 40)
    assert model_content(model) == reward_content(scored) == "d" * 40
    # Without a network the hub's cache has what a load finds, and else the last answer holds.
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert model_content(model) == "d" * 40
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    refs = tmp_path / "cache" / "models--org--model" / "refs"
    refs.mkdir(parents=True)
    (refs / "main").write_text("e" * 40)
    assert model_content(model) == reward_content(scored) == "e" * 40
    (refs / "main").write_text("no commit")
    assert model_content(model) == "d" * 40
    # Rows of the same name are another repository.
    assert pinned(HubData(name="org/model")).revision is None


def test_folders_are_identified_by_their_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    output = model_content(PretrainedModel(name=str(tmp_path)))
    assert len(output) == 64
    assert commit_in(output) is None


def test_the_model_of_a_commit_is_loaded_and_no_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a cache whose main branch has moved on since the run began."""
    repository = tmp_path / "models--org--model"
    for seed, commit in enumerate(("a" * 40, "b" * 40)):
        config = ModelFromConfig(hidden_size=8, intermediate_size=8, num_layers=1, num_heads=2)
        materialize(config, repository / "snapshots" / commit, seed=seed)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("b" * 40)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    model = PretrainedModel(name="org/model")
    assert commit_in(model_content(model)) == "b" * 40
    for commit in ("a" * 40, "b" * 40):
        materialize(model, tmp_path / commit, seed=None, commit=commit)
        weights = (tmp_path / commit / "model.safetensors").read_bytes()
        expected = repository / "snapshots" / commit / "model.safetensors"
        assert weights == expected.read_bytes(), commit
        named = {"base_model_name_or_path": "org/model", "revision": commit}
        assert base_names(tmp_path / commit) == named
