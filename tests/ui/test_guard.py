"""Requests that the page refuses, and headers of its responses."""

import pytest
from click.testing import CliRunner
from starlette.testclient import TestClient

from nemo_rl_core.ui.app import create_app
from tasks.cli.records.ui import ui
from tests.ui.conftest import FIRST


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


TOKEN = "a-secret-of-16.."
EVERY_ROUTE = ["/", "/executions/none", "/executions/none/curves.json", "/events", "/compare"]


@pytest.fixture
def closed(made) -> TestClient:
    """A page with a token; redirects are not followed."""
    app = create_app(made.store, token=TOKEN)
    return TestClient(app, base_url="http://127.0.0.1", follow_redirects=False)


@pytest.mark.parametrize("path", [*EVERY_ROUTE, "/static/style.css", "/nope"])
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": TOKEN},
        {"authorization": f"Basic {TOKEN}"},
        {"authorization": f"Bearer {TOKEN}x"},
        {"cookie": f"nemo_rl_token={TOKEN[:-1]}"},
        {"cookie": "nemo_rl_token=\xff"},
    ],
)
def test_nothing_is_answered_without_the_token(closed, path: str, headers: dict) -> None:
    answer = closed.get(path, headers={k: v.encode("latin-1") for k, v in headers.items()})
    assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
    assert closed.get(f"{path}?token={TOKEN[:-1]}").status_code == 401
    assert "set-cookie" not in answer.headers


def test_a_bearer_token_opens_pages_and_json(closed) -> None:
    headers = {"authorization": f"Bearer {TOKEN}"}
    assert closed.get("/", headers=headers).status_code == 200
    assert closed.get("/", headers={"authorization": f"bearer {TOKEN}"}).status_code == 200
    data = closed.get(f"/executions/{FIRST}/curves.json", headers=headers)
    assert data.json()["state"] == "succeeded"
    assert closed.head("/events", headers=headers).status_code == 200


def test_a_token_in_the_address_becomes_a_cookie(closed) -> None:
    answer = closed.get(f"/compare?run=a%26b&token={TOKEN}&metric=x")
    assert (answer.status_code, answer.headers["location"]) == (303, "/compare?run=a%26b&metric=x")
    cookie = answer.headers["set-cookie"]
    assert cookie == f"nemo_rl_token={TOKEN}; HttpOnly; Path=/; SameSite=lax"
    assert closed.get("/").status_code == 200  # the client has the cookie
    assert closed.get("/events", headers={"cookie": ""}).status_code == 401


def test_a_token_leads_to_no_other_host(closed) -> None:
    answer = closed.get(f"http://127.0.0.1//evil.example/x?token={TOKEN}")
    assert answer.headers["location"] == "/evil.example/x"


@pytest.mark.parametrize("path", ["/artifacts/a/files/b%20%25%C3%A9", "/%5Cevil.example"])
def test_a_token_keeps_the_path_of_the_address(closed, path: str) -> None:
    assert closed.get(f"{path}?token={TOKEN}").headers["location"] == path


def test_a_weak_token_is_refused() -> None:
    result = CliRunner().invoke(ui, ["--token", "short"])
    assert result.exit_code == 2
    assert "more letters, digits" in result.output
