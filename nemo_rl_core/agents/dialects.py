"""Dialects of the endpoint by path."""

from collections.abc import Mapping

from nemo_rl_core.agents.anthropic_messages import AnthropicMessages
from nemo_rl_core.agents.chat_completions import ChatCompletions
from nemo_rl_core.agents.responses import Responses

Dialect = ChatCompletions | AnthropicMessages
DIALECTS: Mapping[str, Dialect] = {
    "/chat/completions": ChatCompletions(),
    "/responses": Responses(),
    "/messages": AnthropicMessages(),
}
