"""Follows one sampled token of an episode from the engine to the finished rollout, by profiling.

A function handles the token if an argument or its result contains the token's id or logprob, which
no other token of the step has. References to columns are not looked into: they stay in Ray's
object store between processes, although all workers run in this process here.
"""

import dataclasses
import re
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

import nemo_rl_core
from nemo_rl_core.data.loader import save_frame
from nemo_rl_core.data.module import DataModule
from nemo_rl_core.data.pretrained import load_tokenizer
from nemo_rl_core.distributed.batched_data_dict import InProcess, RemoteRow, RemoteRows
from nemo_rl_core.distributed.event_loop import event_loop
from nemo_rl_core.environments.adapt import EnvironmentScorer
from nemo_rl_core.environments.interfaces import EnvironmentReturn
from nemo_rl_core.rollouts.multi_turn import EpisodeRollouts
from nemo_rl_core.rollouts.records import RolloutRecords
from nemo_rl_core.rollouts.remote_rollouts import RemoteRollouts
from nemo_rl_core.trainers.loop import RunSpec
from tests.chat_models import qwen3_tokenizer
from tests.local_workers import LocalSession
from tests.unit.algorithms.grpo.test_remote_training import GRPO, InProcessTrainer

ROOT = Path(nemo_rl_core.__file__).parent.parent
ENGINE = "nemo_rl_core/backends/decoding/"
"""Samples the token; counted is what happens to it after that."""
MAX_FILES = 11
NUM_WORDS = 4000


class AsksAgain:
    """Offers a tool, so that turns are read by the parser of the chat template; never ends."""

    tools = ({"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}},)

    def step(self, message_log_batch: Sequence[Any], metadata: Sequence[Any]) -> EnvironmentReturn:
        count = len(metadata)
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": "and then?"}] * count,
            metadata=list(metadata),
            next_stop_strings=[None] * count,
            rewards=torch.tensor([0.1 * len(log[-1]["content"]) for log in message_log_batch]),
            terminateds=torch.tensor([False] * count),
        )


class Trip:
    """The functions that handle a token."""

    def __init__(self, token: int, logprob: float) -> None:
        self._token, self._logprob = token, np.float32(logprob)
        self.functions: dict[str, None] = {}

    def note(self, frame: FrameType, event: str, result: Any) -> None:
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(f"{ROOT}/nemo_rl"):
            return
        name = f"{Path(code.co_filename).relative_to(ROOT)}:{code.co_qualname}"
        values = [result] if event == "return" else [*frame.f_locals.values()]
        if name not in self.functions and any(self._is_in(value, 4) for value in values):
            self.functions[name] = None

    def _is_in(self, value: Any, depth: int) -> bool:
        if isinstance(value, torch.Tensor):
            value = value.detach().numpy()
        if isinstance(value, np.ndarray):
            expected = self._token if value.dtype.kind in "iu" else self._logprob
            return value.dtype.kind in "iuf" and bool((value == expected).any())
        if isinstance(value, int | float | np.generic):
            return value in (self._token, self._logprob)
        if depth == 0 or isinstance(value, InProcess | RemoteRow | RemoteRows | type):
            return False
        if isinstance(value, Mapping):
            value = list(value.values())
        elif dataclasses.is_dataclass(value):
            value = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
        if isinstance(value, list | tuple):
            return any(self._is_in(each, depth - 1) for each in value)
        return False

    def start(self) -> None:
        threading.setprofile(self.note)
        sys.setprofile(self.note)
        event_loop().call_soon_threadsafe(sys.setprofile, self.note)

    def stop(self) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
        event_loop().call_soon_threadsafe(sys.setprofile, None)

    @property
    def files(self) -> list[str]:
        return list(dict.fromkeys(name.partition(":")[0] for name in self.functions))


@pytest.fixture
def chat_model(tmp_path: Path) -> Path:
    """A random model that rarely samples a token twice."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = qwen3_tokenizer()
    tokenizer.add_tokens([f"word{number}" for number in range(NUM_WORDS)])
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen2ForCausalLM(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def recorded(model: Path, folder: Path) -> Any:
    """Trains two steps of two episodes of two turns; returns the first rollout of the second."""
    rows = [{"prompt": "2+3?", "answer": "5"}]
    data = DataModule.of(
        rows, validation=[{"prompt": "2+4?", "answer": "6"}], tokenizer=load_tokenizer(model)
    )
    (folder / "train").mkdir(parents=True)
    save_frame(data.train, folder / "train")
    steps = {"num_prompts_per_step": 1, "num_generations_per_prompt": 2}
    trainer = InProcessTrainer(
        {
            "generation": {"backend": "hf", "max_new_tokens": 6},
            "rollouts": {"max_turns": 2, "max_rollout_tokens": 100},
            "max_prompt_tokens": 1024,
            "grpo": {**GRPO, **steps},
        },
        session=LocalSession(),  # type: ignore[arg-type]
    )
    spec = RunSpec(
        train=folder / "train",
        start=model,
        work=folder / "work",
        reference=model,
        scorer=EnvironmentScorer(AsksAgain()),
    )
    result = trainer.run(spec)
    assert result.choices["rollouts.history"].startswith("as_sampled: the chat template rewrites")
    return RolloutRecords(folder / "work" / "rollouts").load(2)[0]


def documented() -> list[str]:
    """The files in the table of docs/architecture.md."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    section = page.partition("### A token of an episode")[2].partition("###")[0]
    return re.findall(r"^\| `(nemo_rl_core/\S+)` \|", section, re.MULTILINE)


@pytest.mark.slow
def test_an_episode_handles_a_token_in_the_documented_files(
    chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    completion = recorded(chat_model, tmp_path / "first").completion
    position = completion.generated.index(False) - 1  # the last token of the first turn
    trip = Trip(completion.token_ids[position], completion.logprobs[position])
    run = EpisodeRollouts.run

    def profiled(rollouts: EpisodeRollouts, *args: Any, **kwargs: Any) -> RemoteRollouts:
        if kwargs["step"] != 2:  # the first step also proves the engine and the parser
            return run(rollouts, *args, **kwargs)
        trip.start()
        try:
            return run(rollouts, *args, **kwargs)
        finally:
            trip.stop()

    monkeypatch.setattr(EpisodeRollouts, "run", profiled)
    again = recorded(chat_model, tmp_path / "second").completion
    assert again == completion
    files = [each for each in trip.files if not each.startswith(ENGINE)]
    assert sorted(files) == sorted(documented()), trip.functions
    assert len(files) <= MAX_FILES
