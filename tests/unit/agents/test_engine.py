"""An agent with the client of OpenAI draws what the same episode draws in this process."""

from typing import Any

import numpy as np
import openai
import pytest
import torch

from nemo_rl_core.agents.session import Session
from nemo_rl_core.backends.generation.base import GenerationSetup, get_generation_backend
from nemo_rl_core.config.generation import HuggingFaceGenerationConfig
from nemo_rl_core.data.chat import prompt_token_ids
from nemo_rl_core.data.pretrained import load_tokenizer, stop_token_ids
from nemo_rl_core.environments.interfaces import EnvironmentReturn
from nemo_rl_core.models.generation.remote_completions import InProcessEngine
from nemo_rl_core.rollouts.engine import RolloutIndex, joined_requests, results_of
from nemo_rl_core.rollouts.episode import Bounds
from nemo_rl_core.rollouts.multi_turn import MultiTurnRollouts
from nemo_rl_core.types import Prompt

NUM_TURNS = 4
BOUNDS = Bounds(max_turns=9, max_tokens=60, max_new_tokens=5)


class Asks:
    """Asks again until there are `NUM_TURNS` turns."""

    def step(self, message_log_batch: Any, metadata: Any) -> EnvironmentReturn:
        sizes = [sum(turn["role"] == "assistant" for turn in log) for log in message_log_batch]
        return EnvironmentReturn(
            observations=[{"role": "user", "content": f"{size}+2="} for size in sizes],
            metadata=[None] * len(sizes),
            next_stop_strings=[None] * len(sizes),
            rewards=torch.zeros(len(sizes)),
            terminateds=torch.tensor([size >= NUM_TURNS for size in sizes]),
        )

    def global_post_process_and_metrics(self, batch: Any) -> Any:
        return batch, {}


class InThisProcess:
    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def generate(self, data: Any, greedy: bool) -> Any:
        return self._backend.generate(data, greedy=greedy)

    def prepare_for_generation(self) -> None: ...

    def finish_generation(self, **_: Any) -> None: ...


@pytest.fixture(scope="module")
def generation(tiny_model):
    backend = get_generation_backend("hf")()
    tokenizer = load_tokenizer(tiny_model)
    stops = stop_token_ids(tiny_model, tokenizer)
    config = HuggingFaceGenerationConfig(max_new_tokens=5)
    backend.setup(GenerationSetup(tiny_model, config, max_model_len=80, stop_token_ids=stops))
    yield InThisProcess(backend), tokenizer
    backend.shutdown()


@pytest.mark.parametrize("seed", [0, 1])
def test_the_endpoint_draws_the_bits_of_an_episode_in_this_process(generation, served, seed):
    engine, tokenizer = generation
    text = "1+2="
    prompt = Prompt("1", text, tuple(prompt_token_ids(tokenizer, text)), "3", "task")
    rollouts = MultiTurnRollouts(engine, tokenizer, Asks(), seed=seed, bounds=BOUNDS)
    (expected,) = rollouts.run([prompt], num_generations_per_prompt=1, step=3)

    async def complete(request):
        completions = InProcessEngine(engine, tokenizer).complete(joined_requests([request]))
        return results_of(completions)[0]

    index = RolloutIndex(seed, step=3, group=0, sample=0)
    session = Session(tokenizer, index, complete=complete, bounds=BOUNDS, prompt=prompt)

    async def agent(server, url):
        client = openai.AsyncOpenAI(base_url=url, api_key=server.open(session))
        messages: list[Any] = [{"role": "user", "content": text}]
        for turn in range(1, NUM_TURNS + 1):
            answer = await client.chat.completions.create(model="any", messages=messages)
            content = f"{turn}+2="
            messages += [answer.choices[0].message, {"role": "user", "content": content}]

    served(agent)
    (sample,) = session.samples()
    block, length = sample.sequence.row.reference.block, sample.sequence.length
    row = sample.sequence.row.number
    completion = expected.completion
    assert sample.opening_ids == prompt.token_ids
    start = len(sample.opening_ids)
    assert tuple(block["input_ids"][row, start:length].tolist()) == completion.token_ids
    assert tuple(block["token_mask"][row, start - 1 : length - 1].tolist()) == completion.token_mask
    logprobs = block["generation_logprobs"][row, start - 1 : length - 1]
    assert np.array(completion.logprobs, np.float32).tobytes() == logprobs.tobytes()
    assert "\n".join(sample.texts) == expected.text
    assert sum(completion.token_mask) == sample.num_written > NUM_TURNS
