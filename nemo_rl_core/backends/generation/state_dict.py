"""Worker of a registered backend that takes its weights as a state dict."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch

from nemo_rl_core.backends.decoding.requests import (
    Completed,
    DecodingRequest,
    as_batch,
    read_requests,
)
from nemo_rl_core.backends.generation.base import GenerationSetup
from nemo_rl_core.checkpoints.weights import rounded_weights
from nemo_rl_core.data.pretrained import decoded, load_tokenizer
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.distributed.weight_sync.link import ReceivesWeights
from nemo_rl_core.errors import DataError
from nemo_rl_core.model_files.loading import with_tied_weights
from nemo_rl_core.telemetry.usage import peak_memory_gib


def state_dict_worker(backend: type) -> type:
    """Returns the class of the worker that runs a backend."""
    return type(f"{backend.__name__}Worker", (StateDictWorker,), {"backend_class": backend})


class StateDictWorker(ReceivesWeights):
    """Runs a backend with the four methods of NeMo RL's architecture guide.

    - `setup(config)` gets a dict: the section `generation` of the recipe, `model_name` (a folder in
      the transformers layout), `max_model_len`, `stop_token_ids` and `dtype`.
    - `generate(prompts, sampling_params)` gets lists of token ids and a dict: `max_new_tokens`,
      `temperature` (0 is greedy), `top_p`, `top_k`, `repetition_penalty`, `stop_strings`,
      `stop_token_ids`, and `seeds`, one per prompt. It returns one response per prompt: token ids,
      a text, or a dict with `token_ids` and `logprobs`. A text is encoded again, and followed by a
      stop token if it has no stop string and fewer tokens than the limit.
    - `update_weights(state_dict)` gets all weights under transformers' names, tied ones under each.
    - `shutdown()` ends it.
    """

    backend_class: ClassVar[type]
    _has_logprobs = True

    def setup(self, setup: GenerationSetup) -> None:
        """Creates the backend; the engine then loads the weights of a folder."""
        self._setup, self._tokenizer = setup, load_tokenizer(setup.model_folder)
        self._backend = self.backend_class()
        self._backend.setup(
            {
                **setup.config.model_dump(),
                "model_name": str(setup.model_folder),
                "max_model_len": setup.max_model_len,
                "stop_token_ids": list(setup.stop_token_ids),
                "dtype": setup.dtype,
            }
        )

    def generate(self, batch: BatchedDataDict, *, greedy: bool) -> BatchedDataDict:
        """Completes all rows; the output has `logprobs` if all responses so far had them."""
        setup, rows_by_options = self._setup, dict[tuple[Any, ...], list[int]]()
        requests = read_requests(batch, setup.config, max_model_len=setup.max_model_len)
        for row, request in enumerate(requests):
            options = (request.max_new_tokens, request.stop_strings)
            rows_by_options.setdefault(options, []).append(row)
        completed: dict[int, Completed] = {}
        for rows in rows_by_options.values():
            same = [requests[row] for row in rows]
            completed |= zip(rows, self._completed(same, greedy=greedy), strict=True)
        output = as_batch(requests, [completed[row] for row in range(len(requests))])
        if not self._has_logprobs:
            del output["logprobs"]
        return output

    def _completed(self, requests: list[DecodingRequest], *, greedy: bool) -> list[Completed]:
        """Returns the completions of requests that differ only in their prompts and seeds."""
        config = self._setup.config
        sampling_params = {
            "max_new_tokens": requests[0].max_new_tokens,
            "temperature": 0.0 if greedy else config.temperature,
            "top_p": config.top_p,
            "top_k": config.top_k,
            "repetition_penalty": config.repetition_penalty,
            "stop_strings": list(requests[0].stop_strings),
            "stop_token_ids": list(self._setup.stop_token_ids),
            "seeds": [request.seed for request in requests],
        }
        torch.manual_seed(requests[0].seed)  # for backends that do not read the seeds
        responses = self._backend.generate([each.prompt for each in requests], sampling_params)
        if not isinstance(responses, list | tuple) or len(responses) != len(requests):
            self._refuse(f"{len(requests)} prompts", responses)
        return [self._read(*each) for each in zip(requests, responses, strict=True)]

    def _read(self, request: DecodingRequest, response: Any) -> Completed:
        stops, limit, logprobs = self._setup.stop_token_ids, request.max_new_tokens, None
        if isinstance(response, Mapping):
            response, logprobs = response.get("token_ids"), response.get("logprobs")
        if isinstance(response, str):
            ids = self._encoded(response, request)
        else:
            ids = response.tolist() if hasattr(response, "tolist") else response
        if not isinstance(ids, list | tuple) or not all(type(each) is int for each in ids):
            self._refuse("a prompt", response)
        self._has_logprobs &= logprobs is not None
        values = [math.nan] * len(ids) if logprobs is None else [*map(float, logprobs)]
        if len(values) != len(ids):
            self._refuse(f"{len(ids)} tokens with {len(values)} logprobs", response)
        end = min([limit, *(index + 1 for index, each in enumerate(ids) if each in stops)])
        ids, values = ids[:end], values[:end]
        is_stopped = (bool(ids) and ids[-1] in stops) or self._has_stop_string(ids, request)
        return Completed(ids, values, truncated=not is_stopped)

    def _encoded(self, text: str, request: DecodingRequest) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        is_full = len(ids) >= request.max_new_tokens or self._has_stop_string(ids, request)
        return ids if is_full else [*ids, *self._setup.stop_token_ids[:1]]

    def _has_stop_string(self, ids: Sequence[int], request: DecodingRequest) -> bool:
        text = decoded(self._tokenizer, ids) if request.stop_strings else ""
        return any(each in text for each in request.stop_strings)

    def _refuse(self, what: str, response: Any) -> NoReturn:
        raise DataError(
            f"{self.backend_class.__name__}.generate returned no completion for {what}",
            expected="one response per prompt: token ids, a text, or a dict with token_ids and "
            "logprobs, as long as token_ids",
            got=repr(response)[:200],
            fix="return a list in the order of the prompts",
        )

    def take_weights(self, named_tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Passes a copy of all weights to the backend, since received tensors are temporary."""
        self._update({name: tensor.clone() for name, tensor in named_tensors})

    def load_weights(self, model_folder: Path) -> None:
        """Passes the weights of a transformers folder to the backend."""
        dtype = getattr(torch, self._setup.dtype)
        self._update(dict(rounded_weights(model_folder, dtype)))

    def _update(self, weights: dict[str, torch.Tensor]) -> None:
        self._backend.update_weights(with_tied_weights(weights, self._setup.model_folder))

    def wake(self) -> None:
        """Does nothing: the backend always keeps its memory."""

    def sleep(self) -> None:
        """Does nothing: the backend always keeps its memory."""

    def peak_memory_gib(self) -> float:
        """Returns the peak memory of this process."""
        return peak_memory_gib()

    def shutdown(self) -> None:
        """Ends the backend."""
        self._backend.shutdown()
