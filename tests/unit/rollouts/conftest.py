"""A game and an engine with scripted answers, for rollouts of several turns."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl_core.data.chat import prompt_token_ids
from nemo_rl_core.data.tokenizer import build_arithmetic_tokenizer
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.environments.interfaces import EnvironmentReturn
from nemo_rl_core.models.interfaces import GenerationInterface
from nemo_rl_core.rollouts.episode import Bounds
from nemo_rl_core.rollouts.multi_turn import MultiTurnRollouts
from nemo_rl_core.types import Prompt


class Countdown:
    """The policy writes one digit per turn until they add up to the row's answer.

    Each turn earns 0.5; the environment answers with the remainder and sets the stop string `-`.
    A turn that is not a digit cannot be scored.
    """

    def __init__(self) -> None:
        self.seen: list[tuple[Any, Any]] = []

    def step(self, message_log_batch: Sequence[Any], metadata: Sequence[Any]) -> EnvironmentReturn:
        self.seen += zip(message_log_batch, metadata, strict=True)
        answers = [log[-1]["content"] for log in message_log_batch]
        left = [
            int(state["answer"]) - (int(text) if text.isdigit() else 0)
            for text, state in zip(answers, metadata, strict=True)
        ]
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": f"{number}="} for number in left],
            metadata=[{"answer": str(number)} for number in left],
            next_stop_strings=[["-"]] * len(left),
            rewards=torch.full((len(left),), 0.5),
            terminateds=torch.tensor([number <= 0 for number in left]),
            errors=[None if text.isdigit() else f"{text!r} is not a digit" for text in answers],
        )

    def global_post_process_and_metrics(
        self, batch: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, float]]:
        return batch, {}


class Scripted(GenerationInterface):
    """Answers each request with a function's text; records all requests.

    Args:
        tokenizer: Tokenizer of requests and answers.
        answer: Function of a request that returns the answer; a final `!` omits the stop token.
    """

    def __init__(self, tokenizer: Any, answer: Any) -> None:
        self._tokenizer = tokenizer
        self._answer = answer
        self.asked: list[list[dict[str, Any]]] = []

    def generate(self, data: BatchedDataDict, greedy: bool) -> BatchedDataDict:
        rows = [self._row(data, row) for row in range(len(data["seeds"]))]
        self.asked.append([request for request, _, _ in rows])
        width = max((len(request["ids"]) + len(ids) for request, ids, _ in rows), default=0)
        output = BatchedDataDict(
            output_ids=torch.zeros(len(rows), width, dtype=torch.long),
            logprobs=torch.zeros(len(rows), width),
            truncated=torch.tensor([cut for _, _, cut in rows], dtype=torch.bool),
            generation_lengths=torch.tensor([len(ids) for _, ids, _ in rows], dtype=torch.long),
            unpadded_sequence_lengths=torch.tensor(
                [len(request["ids"]) + len(ids) for request, ids, _ in rows], dtype=torch.long
            ),
        )
        for row, (request, ids, _) in enumerate(rows):
            start, end = len(request["ids"]), len(request["ids"]) + len(ids)
            output["output_ids"][row, :end] = torch.tensor(request["ids"] + ids)
            output["logprobs"][row, start:end] = -torch.arange(1.0, len(ids) + 1)
        return output

    def _row(self, data: BatchedDataDict, row: int) -> tuple[dict[str, Any], list[int], bool]:
        ids = data["input_ids"][row, : data["input_lengths"][row]].tolist()
        request = {
            "ids": ids,
            "text": self._tokenizer.decode(ids),
            "seed": data["seeds"][row].item(),
            "stop": data["stop_strings"][row] if "stop_strings" in data else None,
            "limit": data["max_new_tokens"][row].item() if "max_new_tokens" in data else None,
        }
        text = self._answer(request)
        ending = [] if text.endswith("!") else [self._tokenizer.eos_token_id]
        answer = self._tokenizer.encode(text.removesuffix("!"), add_special_tokens=False) + ending
        limit = request["limit"] or len(answer)
        return request, answer[:limit], len(answer) > limit

    def prepare_for_generation(self) -> None: ...

    def finish_generation(self) -> None: ...


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return build_arithmetic_tokenizer()


@pytest.fixture(scope="session")
def tokenizer_folder(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder from which an engine loads the tokenizer."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def ask(tokenizer: Any):
    def make(text: str, answer: str, **metadata: Any) -> Prompt:
        ids = tuple(prompt_token_ids(tokenizer, text))
        return Prompt(text, text, ids, answer, "countdown", json.dumps(metadata))

    return make


@pytest.fixture
def play(tokenizer: Any):
    """Function that plays prompts against `Countdown` or another environment.

    It returns the rollouts, the engine and the environment.
    """

    def run(
        prompts: list[Prompt],
        answer: Any,
        *,
        bounds: Bounds,
        group: int = 1,
        first_stops: list[str] | None = None,
        environment: Any = None,
        **options: Any,
    ):
        engine, game = Scripted(tokenizer, answer), environment or Countdown()
        if first_stops is not None:
            game.first_stop_strings = first_stops
        rollouts = MultiTurnRollouts(engine, tokenizer, game, seed=3, bounds=bounds)
        options = {"num_generations_per_prompt": group, "step": 5, **options}
        return rollouts.run(prompts, **options), engine, game

    return run
