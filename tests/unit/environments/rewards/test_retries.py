"""Reward functions that call a loopback server, which sometimes fails."""

import socket
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import aiohttp
import httpx
import openai
import pytest
import requests

from nemo_rl_core.environments.rewards import retries
from nemo_rl_core.environments.rewards.functional_reward import FunctionalRewardWrapper
from nemo_rl_core.environments.rewards.retries import Retries, is_transient
from nemo_rl_core.errors import RewardError
from nemo_rl_core.types import Rollout

REPLY = b'{"choices": [{"index": 0, "message": {"role": "assistant", "content": "1"}}]}'


class Server(ThreadingHTTPServer):
    """Answers the first requests of a path as `troubles` lists, and all others with 200.

    An int is a status, None closes the connection, and a float is a delay in seconds.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.troubles: dict[str, list[int | float | None]] = {}
        self.num_requests: Counter[str] = Counter()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, *_: object) -> None:
        return


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        name = self.path.split("/")[1]
        self.server.num_requests[name] += 1
        troubles = self.server.troubles.get(name, [])
        trouble = troubles.pop(0) if troubles else 200
        if trouble is None:
            self.connection.close()
            return
        if isinstance(trouble, float):
            time.sleep(trouble)
        self.send_response(200 if isinstance(trouble, float) else trouble)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(REPLY)))
        self.end_headers()
        self.wfile.write(REPLY)

    do_POST = do_GET  # noqa: N815 (the name that http.server calls)

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(retries, "_FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with Server() as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def with_httpx(url: str) -> Callable[..., Any]:
    def reward(completion: str) -> float:
        httpx.get(f"{url}/{completion}", timeout=1).raise_for_status()
        return 1.0

    return reward


def with_httpx_async(url: str) -> Callable[..., Any]:
    async def reward(completion: str) -> float:
        async with httpx.AsyncClient(timeout=1) as client:
            (await client.get(f"{url}/{completion}")).raise_for_status()
        return 1.0

    return reward


def with_requests(url: str) -> Callable[..., Any]:
    def reward(completion: str) -> float:
        requests.get(f"{url}/{completion}", timeout=1).raise_for_status()
        return 1.0

    return reward


def with_aiohttp(url: str) -> Callable[..., Any]:
    async def reward(completion: str) -> float:
        timeout = aiohttp.ClientTimeout(1)
        async with aiohttp.ClientSession(raise_for_status=True, timeout=timeout) as session:
            await session.get(f"{url}/{completion}")
        return 1.0

    return reward


def with_urllib(url: str) -> Callable[..., Any]:
    def reward(completion: str) -> float:
        urllib.request.urlopen(f"{url}/{completion}", timeout=1).close()
        return 1.0

    return reward


def with_openai(url: str) -> Callable[..., Any]:
    def reward(completion: str) -> float:
        client = openai.OpenAI(
            base_url=f"{url}/{completion}", api_key="none", max_retries=0, timeout=1
        )
        messages: Any = [{"role": "user", "content": completion}]
        reply = client.chat.completions.create(model="m", messages=messages)
        return float(reply.choices[0].message.content or "nan")

    return reward


def of_batches(url: str) -> Callable[..., Any]:
    def reward(completions: list[str]) -> list[float]:
        return [with_httpx(url)(each) for each in completions]

    return reward


def with_another_error(url: str) -> Callable[..., Any]:
    def reward(completion: str) -> float:
        try:
            return float(with_requests(url)(completion))
        except requests.RequestException as error:
            raise RuntimeError("the judge is away") from error

    return reward


CLIENTS = [
    with_httpx,
    with_httpx_async,
    with_requests,
    with_aiohttp,
    with_urllib,
    with_openai,
    of_batches,
    with_another_error,
]


def scored(
    fn: Callable[..., Any], names: Sequence[str], rollout: Callable[..., Rollout]
) -> list[float | RewardError]:
    scorer = FunctionalRewardWrapper(fn, name="asks a server")
    outcomes = scorer.score([rollout(name) for name in names])
    scorer.close()
    return outcomes


@pytest.mark.slow
@pytest.mark.parametrize(
    "trouble",
    [503, None, 1.5, *(pytest.param(status, marks=pytest.mark.thorough) for status in (429, 500))],
)
@pytest.mark.parametrize("client", CLIENTS)
def test_two_failing_calls_of_sixteen_are_retried(
    server: Server, client: Any, trouble: Any, rollout: Callable[..., Rollout]
) -> None:
    server.troubles = {"3": [trouble], "11": [trouble, trouble]}
    if trouble == 1.5:  # beyond the client's time-out
        server.troubles = {"3": [trouble]}
    names = [str(n) for n in range(16)]
    before = retries.num_retries()
    assert scored(client(server.url), names, rollout) == [1.0] * 16
    # Calling a failed batch function for each row does not count as a retry.
    num_troubles = 1 if trouble == 1.5 else 3
    if not (client is with_aiohttp and trouble is None):  # aiohttp retries these itself
        assert retries.num_retries() - before == num_troubles - (client is of_batches)


@pytest.mark.parametrize("client", CLIENTS)
def test_permanent_failures_are_not_retried(
    server: Server, client: Any, rollout: Callable[..., Rollout]
) -> None:
    server.troubles = {"0": [404] * 9, "1": [401] * 9}
    outcomes = scored(client(server.url), ["0", "1"], rollout)
    assert all(isinstance(each, RewardError) for each in outcomes)
    # A batch function is called for both rows, then for each.
    assert server.num_requests["1"] == 1
    assert server.num_requests["0"] == (2 if client is of_batches else 1)


@pytest.mark.parametrize("client", [with_httpx, with_httpx_async])
def test_a_server_that_keeps_failing_is_an_error_with_its_attempts(
    server: Server, client: Any, rollout: Callable[..., Rollout]
) -> None:
    server.troubles = {"0": [503] * 99}
    failed, good = scored(client(server.url), ["0", "1"], rollout)
    assert isinstance(failed, RewardError)
    assert failed.got is not None
    assert "503" in failed.got
    assert "after 5 attempts" in failed.got
    assert (good, server.num_requests["0"]) == (1.0, 5)


def test_no_server_is_an_error(server: Server, rollout: Callable[..., Rollout]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    for client in CLIENTS:
        (outcome,) = scored(client(url), ["0"], rollout)
        assert isinstance(outcome, RewardError)
        assert "after 5 attempts" in str(outcome.got)


@pytest.mark.slow
def test_a_server_that_is_down_is_given_up_early(
    server: Server, rollout: Callable[..., Rollout]
) -> None:
    names = [str(n) for n in range(40)]
    server.troubles = {name: [503] * 99 for name in names}
    scorer = FunctionalRewardWrapper(with_httpx(server.url))
    outcomes = scorer.score([rollout(name) for name in names])
    assert all(isinstance(each, RewardError) for each in outcomes)
    # Eight calls with five attempts each, then one attempt for each of the others.
    assert sum(server.num_requests.values()) == 8 * 5 + 32
    # The next batch starts with all attempts again.
    server.troubles = {"0": [503]}
    assert scorer.score([rollout("0")]) == [1.0]


def test_an_error_of_the_function_is_not_retried(rollout: Callable[..., Rollout]) -> None:
    calls = []

    def reward(completion: str) -> float:
        calls.append(completion)
        raise ValueError("no number")

    (outcome,) = scored(reward, ["0"], rollout)
    assert isinstance(outcome, RewardError)
    assert calls == ["0"]


def test_no_attempt_begins_after_the_total_time() -> None:
    calls = []

    def down() -> float:
        calls.append(time.monotonic())
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        Retries(num_retries=9, total_seconds=0.9).call(down)
    # A pause between 0.25 and 0.5 s, then one of at least 0.5 s.
    assert 2 <= len(calls) <= 3
    assert calls[-1] - calls[0] < 0.9


@pytest.mark.parametrize(
    ("error", "is_due"),
    [
        (ConnectionRefusedError(), True),
        (TimeoutError(), True),
        (socket.gaierror(), True),
        (httpx.ConnectTimeout("late"), True),
        (httpx.RemoteProtocolError("cut"), True),
        (httpx.UnsupportedProtocol("ftp"), False),
        (requests.exceptions.ChunkedEncodingError(), True),
        (requests.exceptions.InvalidURL(), False),
        (aiohttp.ServerDisconnectedError(), True),
        (aiohttp.InvalidURL("x"), False),
        (openai.APIConnectionError(request=httpx.Request("GET", "http://x")), True),
        (ValueError("HTTP 503"), False),
        (SystemExit(503), False),
        (FileNotFoundError(), False),
    ],
)
def test_transient_errors_are_recognized(error: BaseException, is_due: bool) -> None:
    assert is_transient(error) == is_due
