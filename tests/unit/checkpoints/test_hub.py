"""The hub without a network, behind a mirror, and with a filled cache."""

import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_core.checkpoints.hub import hub_folder

COMMIT = "0" * 40
FILES = {"config.json": b'{"model_type": "qwen2"}', "model.safetensors": b"weights"}


class Mirror(BaseHTTPRequestHandler):
    """As much of the hub's protocol as a download of one model takes."""

    asked: list[str]
    """Requests in order."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, *_: object) -> None:
        """Says nothing."""

    def _answer(self) -> None:
        self.asked.append(f"{self.command} {self.path}")
        if self.path.startswith("/api/models/org/small/tree/"):
            tree = [
                {"type": "file", "path": name, "size": len(content), "oid": "0" * 40}
                for name, content in FILES.items()
            ]
            self._send(200, json.dumps(tree).encode(), {"Content-Type": "application/json"})
        elif self.path.startswith("/api/models/org/small"):
            siblings = [{"rfilename": name} for name in FILES]
            body = json.dumps({"id": "org/small", "sha": COMMIT, "siblings": siblings}).encode()
            self._send(200, body, {"Content-Type": "application/json"})
        elif (name := self.path.rpartition("/")[2]) in FILES:
            etag = hashlib.sha256(FILES[name]).hexdigest()
            self._send(200, FILES[name], {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT})
        else:
            self._send(404, b"", {})

    def _send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@pytest.fixture
def mirror() -> Iterator[ThreadingHTTPServer]:
    handler = type("Handler", (Mirror,), {"asked": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def closed() -> str:
    """An address at which nothing listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


def address(server: ThreadingHTTPServer) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}"


@pytest.fixture
def python(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Runs a script in a new process, as the hub's settings are read when it is imported."""

    def run(script: str, **settings: str) -> dict[str, Any]:
        names = ("HTTP_PROXY", "http_proxy", "HF_HUB_OFFLINE", "NO_PROXY", "no_proxy")
        plain = {key: value for key, value in os.environ.items() if key not in names}
        done = subprocess.run(
            [sys.executable, "-c", script],
            env={**plain, "HF_HOME": str(tmp_path / "hf"), **settings},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert "Retry" not in done.stdout + done.stderr
        payload: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return payload

    return run


_PROBE = """
import json, time
from huggingface_hub import constants
from nemo_rl_core.checkpoints.hub import hub_access
outcomes = []
for name in ("org/small", "org/small", "."):
    with hub_access(name) as problem:
        outcomes.append([problem, constants.is_offline_mode()])
print(json.dumps({"found": outcomes, "after": constants.is_offline_mode()}))
"""


def test_closed_port_counts_as_no_network(
    python: Callable[..., dict[str, Any]], closed: str
) -> None:
    output = python(_PROBE, HF_ENDPOINT=closed)
    (problem, is_offline), again, folder = output["found"]
    assert problem.startswith(f"no answer from {closed}: ") and "refused" in problem
    assert is_offline and again == [problem, True]
    assert folder == ["", False], "a folder of this machine needs no hub"
    assert not output["after"]


def test_a_mirror_and_a_proxy_are_asked_once(
    python: Callable[..., dict[str, Any]], mirror: ThreadingHTTPServer
) -> None:
    requests = mirror.RequestHandlerClass.asked  # type: ignore[attr-defined]
    assert python(_PROBE, HF_ENDPOINT=address(mirror))["found"] == [["", False]] * 3
    assert requests == ["HEAD /"], "any answer will do, also this 404"
    proxied = python(_PROBE, HF_ENDPOINT="http://hub.invalid", http_proxy=address(mirror))
    assert proxied["found"] == [["", False]] * 3
    assert requests[1:] == ["HEAD http://hub.invalid/"]


def test_unreachable_proxy_is_named(
    python: Callable[..., dict[str, Any]], mirror: ThreadingHTTPServer, closed: str
) -> None:
    output = python(_PROBE, HF_ENDPOINT=address(mirror), http_proxy=closed)
    assert output["found"][0][0].startswith(f"no answer from {address(mirror)}: ")


def test_offline_mode_is_not_changed(python: Callable[..., dict[str, Any]], closed: str) -> None:
    output = python(_PROBE, HF_ENDPOINT=closed, HF_HUB_OFFLINE="1")
    assert output == {"found": [["", True]] * 3, "after": True}


_LOAD = """
import json
from nemo_rl_core.errors import ModelError
from nemo_rl_core.config.model import PretrainedModel
from nemo_rl_core.models.policy.pretrained import local_folder
try:
    result = {name: str(local_folder(PretrainedModel(name=name))) for name in ("org/small",)}
except ModelError as error:
    result = {"error": str(error)}
print(json.dumps(result))
"""


@pytest.mark.slow
def test_model_from_a_mirror_loads_from_the_cache(
    python: Callable[..., dict[str, Any]], mirror: ThreadingHTTPServer, closed: str
) -> None:
    missing = python(_LOAD, HF_ENDPOINT=closed)["error"].splitlines()
    assert missing[0] == "the model 'org/small' cannot be loaded"
    assert missing[2].startswith(f"  got: no answer from {closed}: ")
    loaded = Path(python(_LOAD, HF_ENDPOINT=address(mirror))["org/small"])
    assert {path.name: path.read_bytes() for path in loaded.iterdir()} == FILES
    assert hub_folder("model", "org/small").name in loaded.parts
    assert python(_LOAD, HF_ENDPOINT=closed)["org/small"] == str(loaded)
