"""A language model behind an API like OpenAI's."""

import asyncio
import os
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from nemo_rl_core.config.judge import JudgeEndpoint
from nemo_rl_core.errors import ConfigError

if TYPE_CHECKING:
    import httpx

_BUSY = frozenset({408, 409, 429})
_FIRST_PAUSE_SECONDS = 0.25
_LONGEST_PAUSE_SECONDS = 8.0


class EndpointError(Exception):
    """The server refused a request, or kept failing; never holds the key."""


class EndpointChat:
    """A `ChatModel`: greedy, some requests at a time, each with a deadline.

    What may pass (no connection, 408, 409, 429, 5xx) is tried again after a pause that doubles;
    what will not (another 4xx, a reply of another form) fails at once.

    Args:
        config: Which server and model, and the bounds.
        max_new_tokens: Of a reply.

    Raises:
        ConfigError: If the variable that should hold the key does not.
    """

    def __init__(self, config: JudgeEndpoint, *, max_new_tokens: int) -> None:
        self._config = config
        self._max_new_tokens = max_new_tokens
        self._headers = _authorization(config.api_key_variable)

    def replies(self, questions: Sequence[str]) -> list[str | Exception]:
        """One reply a question, in order, or why there is none."""
        # In a thread of its own: a notebook's has an event loop already.
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(lambda: asyncio.run(self._all(questions))).result()

    def close(self) -> None:
        """Nothing to end: connections live as long as a call of `replies`."""

    async def _all(self, questions: Sequence[str]) -> list[str | Exception]:
        import httpx

        places = asyncio.Semaphore(self._config.max_concurrency)
        # No redirects: the key goes to the server that the recipe names, and to no other.
        async with httpx.AsyncClient(headers=self._headers, timeout=None) as client:
            return await asyncio.gather(*(self._one(client, places, each) for each in questions))

    async def _one(
        self, client: "httpx.AsyncClient", places: asyncio.Semaphore, question: str
    ) -> str | Exception:
        import httpx

        seconds = self._config.reply_timeout_seconds
        async with places:  # the deadline begins when the request may
            try:
                return await asyncio.wait_for(self._attempts(client, question), seconds)
            except TimeoutError:
                return TimeoutError(f"no reply within {seconds:g} s")
            except (EndpointError, httpx.HTTPError, httpx.InvalidURL) as error:
                return error

    async def _attempts(self, client: "httpx.AsyncClient", question: str) -> str:
        import httpx

        pause = _FIRST_PAUSE_SECONDS
        for left in range(self._config.num_retries, -1, -1):
            try:
                response = await client.post(self._url, json=self._request(question))
            except httpx.TransportError:
                if not left:
                    raise
            else:
                is_busy = response.status_code in _BUSY or response.status_code >= 500
                if not is_busy or not left:
                    return _content(response)
            # Requests that failed together do not come back together.
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        raise AssertionError("the last attempt returns or raises")

    @property
    def _url(self) -> str:
        return f"{self._config.url.rstrip('/')}/chat/completions"

    def _request(self, question: str) -> dict[str, Any]:
        return {
            "model": self._config.model,
            "messages": [{"role": "user", "content": question}],
            "temperature": 0,
            "max_tokens": self._max_new_tokens,
        }


def _content(response: "httpx.Response") -> str:
    if response.status_code != 200:
        raise EndpointError(f"HTTP {response.status_code}: {response.text[:200]}")
    try:
        content = response.json()["choices"][0]["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise EndpointError(f"a reply of another form: {response.text[:200]}") from error
    if not isinstance(content, str):
        raise EndpointError(f"a reply without text: {response.text[:200]}")
    return content


def _authorization(variable: str | None) -> dict[str, str]:
    if variable is None:
        return {}
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ConfigError(
            "the judge's key is missing",
            expected=f"the key in the environment variable {variable}",
            got="nothing in it",
            fix=f"export {variable}=..., or leave api_key_variable out where none is needed",
        )
    return {"Authorization": f"Bearer {key}"}
