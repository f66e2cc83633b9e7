"""Dialects of the endpoint by path."""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from nemo_rl_core.agents.anthropic_messages import AnthropicMessages
from nemo_rl_core.agents.calls import CallError, ChatResult
from nemo_rl_core.agents.chat_completions import ChatCompletions, Event
from nemo_rl_core.agents.fields import AgentCall, Body
from nemo_rl_core.agents.responses import Responses


class Dialect(Protocol):
    """Reads calls and writes answers."""

    def read(self, body: Body) -> AgentCall:
        """Reads a call; raises `CallError` if a field is malformed or not supported."""
        ...

    def answer(self, body: Body, result: ChatResult, tokenizer: Any) -> dict[str, Any]:
        """Returns the answer to a call."""
        ...

    def events(self, body: Body, answer: dict[str, Any]) -> Iterator[Event]:
        """Yields the answer as server-sent events."""
        ...

    def error(self, error: CallError) -> dict[str, Any]:
        """Returns the body of an error."""
        ...


DIALECTS: Mapping[str, Dialect] = {
    "/chat/completions": ChatCompletions(),
    "/responses": Responses(),
    "/messages": AnthropicMessages(),
}
