"""A registered backend with the four methods of document 002, run by its worker."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from nemo_rl_core.backends import register_generation_backend
from nemo_rl_core.backends.generation.base import (
    _GENERATION_BACKENDS,
    GenerationSetup,
    takes_state_dicts,
)
from nemo_rl_core.backends.generation.hugging_face import HuggingFaceBackend
from nemo_rl_core.backends.generation.state_dict import state_dict_worker
from nemo_rl_core.checkpoints.weight_files import stored_tensors
from nemo_rl_core.config.generation import GENERATION_SECTIONS, RegisteredGeneration
from nemo_rl_core.data.pretrained import load_tokenizer
from nemo_rl_core.distributed import BatchedDataDict
from nemo_rl_core.errors import ConfigError, DataError
from nemo_rl_core.models.policy.lm_policy import _full_weights
from tests.reference.code_blocks import run

STOP = 2


class Recorder:
    """Returns prepared responses, and records what it is given."""

    responses: ClassVar[Any] = []

    def setup(self, config: dict[str, Any]) -> None:
        self.config, self.calls = config, []  # type: ignore[var-annotated]

    def generate(self, prompts: list[list[int]], sampling_params: dict[str, Any]) -> Any:
        self.calls.append((prompts, sampling_params))
        return self.responses and self.responses[: len(prompts)]

    def update_weights(self, state_dict: dict[str, torch.Tensor]) -> None:
        self.weights = state_dict

    def shutdown(self) -> None:
        self.weights = {}


def started(model_folder: Path, responses: Any, **settings: Any) -> Any:
    backend = type("Prepared", (Recorder,), {"responses": responses})
    worker = state_dict_worker(backend)()
    config = RegisteredGeneration.model_construct(
        backend="custom", **{"max_new_tokens": 4, **settings}
    )
    worker.setup(GenerationSetup(model_folder, config, 16, (STOP,)))
    return worker


def batch(*lengths: int, **columns: Any) -> BatchedDataDict:
    ids = {"input_ids": torch.full((len(lengths), max(lengths)), 7)}
    rows = {"input_lengths": torch.tensor(lengths), "seeds": torch.arange(len(lengths))}
    return BatchedDataDict({**ids, **rows, **columns})


def test_prompts_and_sampling_params_are_lists_and_a_dict(tiny_model: Path) -> None:
    worker = started(tiny_model, [[5, STOP], [6, STOP]], temperature=0.5, stop_strings=["x"])
    worker.generate(batch(2, 3), greedy=False)
    (prompts, sampling_params) = worker._backend.calls[0]
    assert prompts == [[7, 7], [7, 7, 7]]
    assert sampling_params == {
        "max_new_tokens": 4,
        "temperature": 0.5,
        "top_p": 1.0,
        "top_k": None,
        "repetition_penalty": 1.0,
        "stop_strings": ["x"],
        "stop_token_ids": [STOP],
        "seeds": [0, 1],
    }
    worker.generate(batch(2, 14), greedy=True)  # 14 + 4 exceed the 16 tokens of the model
    assert [each["max_new_tokens"] for _, each in worker._backend.calls[1:]] == [4, 2]
    assert worker._backend.calls[1][1]["temperature"] == 0.0
    config = worker._backend.config
    assert (config["model_name"], config["max_new_tokens"]) == (str(tiny_model), 4)
    assert (config["stop_token_ids"], config["max_model_len"]) == ([STOP], 16)


def test_responses_are_token_ids_with_or_without_logprobs(tiny_model: Path) -> None:
    with_logprobs = {"token_ids": [5, STOP, 9], "logprobs": [-1.0, -2.0, -3.0]}
    full = {"token_ids": torch.tensor([5, 6, 7, 8, 9]), "logprobs": [-1.0] * 5}
    output = started(tiny_model, [with_logprobs, full]).generate(batch(2, 3), greedy=False)
    assert output["output_ids"].tolist() == [[7, 7, 5, STOP, 0, 0, 0], [7, 7, 7, 5, 6, 7, 8]]
    assert output["generation_lengths"].tolist() == [2, 4]
    assert output["unpadded_sequence_lengths"].tolist() == [4, 7]
    assert output["truncated"].tolist() == [False, True]
    assert output["logprobs"][0].tolist() == [0, 0, -1, -2, 0, 0, 0]
    output = started(tiny_model, [[5, STOP], full]).generate(batch(2, 3), greedy=False)
    assert "logprobs" not in output


def test_a_text_is_encoded_and_ends_with_a_stop_token(tiny_model: Path) -> None:
    tokenizer = load_tokenizer(tiny_model)
    five, six = (tokenizer(each, add_special_tokens=False)["input_ids"][0] for each in "56")
    worker = started(tiny_model, ["5", "5555", "56"], stop_strings=["6"])
    output = worker.generate(batch(1, 1, 1), greedy=False)
    ends = output["unpadded_sequence_lengths"].tolist()
    ids = [row[1:end].tolist() for row, end in zip(output["output_ids"], ends, strict=True)]
    assert ids == [[five, STOP], [five] * 4, [five, six]]
    assert output["truncated"].tolist() == [False, True, False]


def test_weights_are_a_state_dict(tiny_model: Path) -> None:
    worker = started(tiny_model, [])
    worker.load_weights(tiny_model)
    assert worker._backend.weights["model.embed_tokens.weight"].dtype == torch.float32
    sent = torch.ones(2)
    worker.take_weights(iter([("a", sent)]))
    sent.zero_()  # the sender's memory
    assert worker._backend.weights["a"].tolist() == [1, 1]
    worker.shutdown()
    assert worker._backend.weights == {}


def test_tied_weights_have_all_their_names(tiny_model: Path) -> None:
    from transformers import AutoModelForCausalLM

    stored = dict(stored_tensors(tiny_model))
    assert "lm_head.weight" not in stored
    model, worker = AutoModelForCausalLM.from_pretrained(tiny_model), started(tiny_model, [])
    worker.load_weights(tiny_model)
    model.load_state_dict(worker._backend.weights)
    worker.take_weights((name, each + 1) for name, each in stored.items())
    model.load_state_dict(worker._backend.weights)
    assert torch.equal(model.lm_head.weight, stored["model.embed_tokens.weight"] + 1)
    sender = SimpleNamespace(named_weights=stored.items)
    model.load_state_dict(_full_weights(sender, tiny_model, "lm"))
    assert "lm_head.weight" not in _full_weights(sender, tiny_model, "scalar")


@pytest.mark.parametrize(
    ("responses", "message"),
    [
        (None, "no completion for 2 prompts"),
        (["5"], "no completion for 2 prompts"),
        ([[5], [0.5]], "no completion for a prompt"),
        ([{"token_ids": [5, 6], "logprobs": [-1.0]}] * 2, "2 tokens with 1 logprobs"),
    ],
)
def test_other_responses_are_refused(tiny_model: Path, responses: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        started(tiny_model, responses).generate(batch(2, 3), greedy=False)


def test_the_class_of_the_document_takes_state_dicts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_GENERATION_BACKENDS, "_registered", {})
    monkeypatch.setattr(GENERATION_SECTIONS, "_classes", {})
    custom = run("002_L302", {"responses": ["4"]})["CustomGenerationBackend"]
    assert takes_state_dicts(custom)
    assert not takes_state_dicts(HuggingFaceBackend)
    with pytest.raises(ConfigError, match="'fixed' cannot take the weights of a policy"):
        register_generation_backend("fixed")(type("Fixed", (), {"generate": None}))
