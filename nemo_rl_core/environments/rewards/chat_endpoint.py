"""A language model behind an API like OpenAI's."""

import asyncio
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from nemo_rl_core.config.judge import JudgeEndpoint
from nemo_rl_core.environments.rewards.retries import Retries
from nemo_rl_core.errors import ConfigError

if TYPE_CHECKING:
    import httpx


class EndpointError(Exception):
    """The server refused a request, or kept failing; never contains the key.

    Attributes:
        status_code: The HTTP status.
    """

    def __init__(self, message: str, status_code: int) -> None:
        super().__init__(message)
        self.status_code = status_code


class EndpointChat:
    """A `ChatModel`: greedy, some requests at a time, each with a deadline.

    A failure of the network that may pass is retried (`retries`). What will not pass (another 4xx,
    a reply of another form) fails at once.

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
        self._retries = Retries(config.num_retries, total_seconds=config.reply_timeout_seconds)

    def replies(self, questions: Sequence[str]) -> list[str | Exception]:
        """One reply a question, in order, or why there is none."""
        self._retries.begin()
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
        async def once() -> str:
            return _content(await client.post(self._url, json=self._request(question)))

        return await self._retries.awaited(once)

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
        refused = f"HTTP {response.status_code}: {response.text[:200]}"
        raise EndpointError(refused, response.status_code)
    try:
        content = response.json()["choices"][0]["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise EndpointError(f"a reply of another form: {response.text[:200]}", 200) from error
    if not isinstance(content, str):
        raise EndpointError(f"a reply without text: {response.text[:200]}", 200)
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
