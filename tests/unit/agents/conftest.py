"""A chat tokenizer, an engine that answers with recorded texts, and an endpoint in this process."""

import asyncio
import random
from collections.abc import Callable, Iterator
from importlib.resources import files
from typing import Any

import numpy as np
import pytest

from nemo_rl_core.agents.server import AgentServer
from nemo_rl_core.agents.session import Session
from nemo_rl_core.data.renderer import Renderer
from nemo_rl_core.distributed.batched_data_dict import InProcess, RemoteRow
from nemo_rl_core.rollouts.engine import (
    CompletionRequest,
    CompletionResult,
    RemoteTokens,
    RolloutIndex,
)
from nemo_rl_core.rollouts.episode import Bounds
from nemo_rl_core.types import Prompt

WIDE = Bounds(max_turns=10_000, max_tokens=100_000, max_new_tokens=1000)
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
    },
}
CALL = 'Wait.\n<tool_call>\n{"name": "add", "arguments": {"a": 1.0, "b": "x"}}\n</tool_call>'


def build_chat_tokenizer() -> Any:
    """Builds a small BPE tokenizer with the control tokens and the chat template of Qwen 2.5."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    core.train_from_iterator(
        [f"The answer is {n}, not {n + 1}. {CALL}" for n in range(60)], trainer
    )
    template = files("trl").joinpath("chat_templates/qwen2_5.jinja").read_text()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


@pytest.fixture(scope="session")
def chat_tokenizer() -> Any:
    return build_chat_tokenizer()


class RecordedEngine:
    """Answers with the tokens of texts, split at random so that encoding them again differs.

    Attributes:
        completions: The full prompt and the new tokens of each completion, in order.
    """

    def __init__(self, tokenizer: Any, text: Callable[[CompletionRequest], str]) -> None:
        self.tokenizer, self._text = tokenizer, text
        self.requests: list[CompletionRequest] = []
        self.completions: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        self.delay = asyncio.Event()
        self.delay.set()

    async def __call__(self, request: CompletionRequest) -> CompletionResult:
        self.requests.append(request)
        await self.delay.wait()
        text = self._text(request)
        draw = random.Random(f"{request.seed} {text}")
        new = self._split(text, draw)[: request.max_new_tokens]
        is_cut = len(new) == request.max_new_tokens
        columns = {
            "input_ids": np.zeros((1, 0), np.int64),
            "token_mask": np.zeros((1, 0), np.bool_),
            "generation_logprobs": np.zeros((1, 0), np.float32),
            "weight_versions": np.zeros((1, 0), np.int64),
        }
        if request.before is not None:
            columns = request.before.row.reference.block
        prompt = (*columns["input_ids"][0].tolist(), *request.token_ids)
        first = request.before is None
        added = {
            "input_ids": [*request.token_ids, *new],
            "token_mask": [False] * (len(request.token_ids) - first) + [True] * len(new),
            "generation_logprobs": [0.0] * (len(request.token_ids) - first)
            + [-draw.random() for _ in new],
            "weight_versions": [0] * (len(request.token_ids) - first)
            + [len(self.requests)] * len(new),
        }
        block = {
            name: np.concatenate([values, np.array([added[name]], values.dtype)], axis=1)
            for name, values in columns.items()
        }
        self.completions.append((prompt, tuple(new)))
        row = RemoteRow(InProcess(block), 0)
        return CompletionResult(
            RemoteTokens(row, len(prompt) + len(new)), len(new), new[-1], text, is_cut
        )

    def _split(self, text: str, draw: random.Random) -> list[int]:
        ids: list[int] = []
        while text:
            size = draw.randint(1, 6)
            ids += self.tokenizer.encode(text[:size], add_special_tokens=False)
            text = text[size:]
        return [*ids, self.tokenizer.eos_token_id]


def numbered(request: CompletionRequest) -> str:
    return f"The answer is {request.seed % 1000}."


@pytest.fixture
def engine(chat_tokenizer: Any) -> RecordedEngine:
    return RecordedEngine(chat_tokenizer, numbered)


def session_of(engine: RecordedEngine, number: int = 0, **options: Any) -> Session:
    turns = [{"role": "user", "content": "Hi"}]
    ids = tuple(Renderer(engine.tokenizer).opening(turns, row="the prompt"))
    prompt = Prompt("1", "Hi", ids, "", "chat")
    options = {"bounds": WIDE, **options}
    index = RolloutIndex(seed=7, step=3, group=2, sample=number)
    return Session(engine.tokenizer, index, complete=engine, prompt=prompt, **options)


@pytest.fixture
def served() -> Iterator[Callable[[Any], Any]]:
    """Runs a coroutine function with a started server and its base URL."""

    def run(test: Any) -> Any:
        async def body() -> Any:
            server = AgentServer()
            url = await server.start()
            try:
                return await test(server, url)
            finally:
                await server.stop()

        return asyncio.run(body())

    yield run
