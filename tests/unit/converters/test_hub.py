"""Pushing a model to a hub: a real upload by huggingface_hub to a server on loopback."""

from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest
from click.testing import CliRunner

from nemo_rl_core.converters.hub import push_to_hub
from nemo_rl_core.errors import ModelError
from tests.unit.converters.fake_hub import TOKEN, FakeHub, fake_hub
from workflows.cli import group

MODEL_FILES = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with fake_hub() as served:
        # The server has the HTTP protocol for large files; that of Xet is closed.
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", served.url)
        monkeypatch.setattr(huggingface_hub.hf_api.constants, "ENDPOINT", served.url)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield served


def test_a_new_repository_is_private_and_holds_the_model(hub: FakeHub, tiny_model: Path) -> None:
    (tiny_model / "optimizer.pt").write_bytes(b"not the model's")
    try:
        url = push_to_hub(tiny_model, "me/mine")
    finally:
        (tiny_model / "optimizer.pt").unlink()
    assert url == f"{hub.url}/me/mine/commit/abc"
    assert hub.private == {"me/mine": True}
    result = hub.files["me/mine"]
    assert result.keys() >= MODEL_FILES
    assert "optimizer.pt" not in result
    for name, content in result.items():
        assert content == (tiny_model / name).read_bytes(), name


def test_public_only_when_asked(hub: FakeHub, tiny_model: Path) -> None:
    hub.private["me/open"], hub.files["me/open"] = False, {}
    with pytest.raises(ModelError, match="the repository 'me/open' is public"):
        push_to_hub(tiny_model, "me/open")
    assert hub.files["me/open"] == {}
    push_to_hub(tiny_model, "me/open", is_public=True)
    assert hub.files["me/open"].keys() >= MODEL_FILES
    push_to_hub(tiny_model, "me/new", is_public=True)
    assert hub.private["me/new"] is False


@pytest.mark.parametrize("refused", ["repos/create", "preupload", "lfs/objects", "commit"])
def test_a_refusal_is_named_and_nothing_is_committed(
    hub: FakeHub, tiny_model: Path, refused: str
) -> None:
    hub.refuses = refused
    with pytest.raises(ModelError) as caught:
        push_to_hub(tiny_model, "me/mine")
    message = str(caught.value)
    assert f"{hub.url} refused to write 'me/mine'" in message
    assert "403" in message
    assert TOKEN not in message
    assert not hub.files.get("me/mine")


def test_without_a_token_no_request_is_made(
    hub: FakeHub, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    with pytest.raises(ModelError, match="no token to write 'me/mine'"):
        push_to_hub(tiny_model, "me/mine")
    assert hub.num_requests == 0


def test_a_wrong_token_and_a_wrong_name(
    hub: FakeHub, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ModelError, match="is not a valid repository name"):
        push_to_hub(tiny_model, "me/mine/too")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(ModelError, match="refused to write"):
        push_to_hub(tiny_model, "me/mine")


def test_missing_server_error_names_the_fix(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_hub() as gone:
        pass
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", gone.url)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with pytest.raises(ModelError, match="cannot be reached") as caught:
        push_to_hub(tiny_model, "me/mine")
    assert str(tiny_model) in str(caught.value.fix)


def test_the_command_pushes(hub: FakeHub, tiny_model: Path) -> None:
    result = CliRunner().invoke(group, ["export", str(tiny_model), "--hub", "me/mine"])
    assert result.exit_code == 0, result.output
    assert result.stdout == f"pushed to {hub.url}/me/mine/commit/abc\n"
    result = CliRunner().invoke(group, ["export", str(tiny_model)])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--gguf FILE or --hub OWNER/NAME" in result.stderr
