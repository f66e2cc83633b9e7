"""Requests that the page refuses, and headers of its responses."""

import pytest
from starlette.testclient import TestClient

from nemo_rl_core.ui.app import create_app


@pytest.mark.parametrize(
    "host", ["127.0.0.1:8321", "localhost", "LOCALHOST:1", "[::1]:8321", "192.168.1.7", "box.lan"]
)
def test_addresses_and_known_names_are_served(made, host: str) -> None:
    client = TestClient(create_app(made.store, hosts=["box.lan"]))
    assert client.get("/", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example:8321", "localhost.evil.example", "", "[::1"]
)
def test_a_rebound_name_is_refused(client: TestClient, host: str) -> None:
    answer = client.get("/", headers={"host": host})
    # An address without its closing bracket is still an address.
    assert answer.status_code == (200 if host == "[::1" else 421)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_can_be_changed(client: TestClient, method: str) -> None:
    answer = client.request(method, "/")
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize("path", ["/", "/nope", "/static/style.css", "/executions/none"])
def test_every_answer_has_strict_headers(client: TestClient, path: str) -> None:
    headers = client.get(path).headers

    assert headers["x-content-type-options"] == "nosniff"
    assert "default-src 'none'; script-src 'self'" in headers["content-security-policy"]
    assert "unsafe" not in headers["content-security-policy"]
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert headers["cross-origin-resource-policy"] == "same-origin"


def test_a_deck_is_locked_into_a_sandbox(client: TestClient, made) -> None:
    node = made.nodes["grpo_iteration 1"]
    deck = client.get(f"/nodes/{node}/deck")

    assert deck.headers["content-security-policy"].startswith("sandbox; default-src 'none'")
    assert "script-src" not in deck.headers["content-security-policy"]
    assert deck.text.endswith("<h1>Deck of grpo_iteration 1</h1><script>alert(3)</script>")
    assert f'src="/nodes/{node}/deck" sandbox title' in client.get(f"/nodes/{node}").text


@pytest.mark.parametrize(
    "path",
    [
        "../../history.db",
        "%2e%2e/%2e%2e/history.db",
        "..%2f..%2fhistory.db",
        "link",
        "//etc/passwd",
    ],
)
def test_no_file_outside_an_artifact_is_served(client: TestClient, made, path: str) -> None:
    folder = made.store.artifacts / made.artifacts["train_sft"]
    if not (folder / "link").is_symlink():
        (folder / "link").symlink_to(made.store.root / "history.db")
    assert client.get(f"/artifacts/{folder.name}/files/{path}").status_code == 404


def test_a_binary_file_is_downloaded_not_shown(client: TestClient, made) -> None:
    base = f"/artifacts/{made.artifacts['evaluate']}/files"

    assert "attachment" in client.get(f"{base}/rows.parquet").headers["content-disposition"]
    deck = client.get(f"{base}/deck.html")
    assert deck.headers["content-type"] == "text/plain; charset=utf-8"
