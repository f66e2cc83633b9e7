"""Limits of the page's server on sizes, times and connections, over sockets."""

import contextlib
import re
import socket
import time
from collections.abc import Iterator

import psutil
import pytest

from nemo_rl_core.ui import server

HEADERS = ("content-security-policy", "x-content-type-options", "referrer-policy")


@pytest.fixture
def port(made, serve, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(server, "IDLE_SECONDS", 1.0)
    monkeypatch.setattr(server, "READ_SECONDS", 1.0)
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 40)
    with serve(made.store) as address:
        yield int(address.rpartition(":")[2])


@contextlib.contextmanager
def connected(port: int) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
        yield client


def received(client: socket.socket) -> bytes:
    """Returns everything until the server closes the connection."""
    answer = b""
    with contextlib.suppress(ConnectionError):
        while part := client.recv(65536):
            answer += part
    return answer


def has_headers(answer: bytes) -> bool:
    return all(f"\r\n{name}: ".encode() in answer.lower() for name in HEADERS)


def test_endless_headers_are_refused_and_use_no_memory(port: int) -> None:
    process = psutil.Process()
    before, sent = process.memory_info().rss, 0
    with connected(port) as client:
        with contextlib.suppress(ConnectionError):
            client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n")
            for _ in range(60):
                client.sendall(b"x: " + b"a" * 2**20 + b"\r\n")
                sent += 2**20
        answer = received(client)
    assert sent < 10 * 2**20
    assert process.memory_info().rss - before < 30 * 2**20
    if answer:  # a client that still sends may lose it
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert has_headers(answer)


@pytest.mark.parametrize(
    "request_bytes",
    [b"\x16\x03\x01\x00\x00\r\n\r\n", b"GET / HTTP/9\r\n\r\n", b"x: " + b"a" * 40_000],
)
def test_invalid_http_is_refused_with_the_headers(port: int, request_bytes: bytes) -> None:
    with connected(port) as client:
        client.sendall(request_bytes)
        answer = received(client)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert has_headers(answer)


@pytest.mark.slow
@pytest.mark.parametrize(
    "beginning",
    [b"", b"GET / HTTP/1.1\r\nHost: local", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\nGET / HT"],
    ids=["silent", "half a request", "half a second request"],
)
def test_a_connection_without_a_request_is_closed(port: int, beginning: bytes) -> None:
    with connected(port) as client:
        client.sendall(beginning)
        began = time.monotonic()
        received(client)
        assert time.monotonic() - began < 15


def test_a_header_that_arrives_byte_by_byte_does_not_extend_the_time(port: int) -> None:
    began = time.monotonic()
    with connected(port) as client, contextlib.suppress(ConnectionError):
        while time.monotonic() - began < 30:
            client.sendall(b"x")
            time.sleep(0.05)
    assert time.monotonic() - began < 15


def test_connections_above_the_limit_are_refused_and_earlier_ones_are_served(port: int) -> None:
    with contextlib.ExitStack() as opened:
        clients = [opened.enter_context(connected(port)) for _ in range(60)]
        time.sleep(0.3)
        answers = [received(client) for client in clients]
    refused = [answer for answer in answers if answer.startswith(b"HTTP/1.1 503 ")]
    assert len(refused) == 20
    assert all(map(has_headers, refused))
    with connected(port) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert re.match(rb"HTTP/1.1 200 ", received(client))


@pytest.mark.slow
def test_an_unread_response_is_aborted(port: int, made) -> None:
    """Its file and memory are released."""
    artifact = made.artifacts["train_sft"]
    large = made.store.artifacts / artifact / "large.bin"
    large.write_bytes(b"\0" * 64 * 2**20)
    try:
        with connected(port) as client:
            path = f"/artifacts/{artifact}/files/large.bin"
            client.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            time.sleep(4)
            assert len(received(client)) < large.stat().st_size
    finally:
        large.unlink()
