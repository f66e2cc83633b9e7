"""Generation backend with transformers' loop."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nemo_rl_core.backends.decoding.draws import Decoding
from nemo_rl_core.backends.decoding.requests import as_batch, read_requests
from nemo_rl_core.backends.decoding.transformers_loop import check_padding, complete
from nemo_rl_core.backends.generation.base import GenerationSetup
from nemo_rl_core.checkpoints.weights import load_pretrained, require_finite
from nemo_rl_core.data.pretrained import load_tokenizer
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.distributed.process_group import local_device
from nemo_rl_core.distributed.weight_sync import ReceivesWeights
from nemo_rl_core.telemetry.timer import peak_memory_gib

_SENT = "the trainer's weight transfer"


class HuggingFaceBackend(ReceivesWeights):
    """A transformers causal model, whole in this process (a `GenerationBackend`)."""

    def setup(self, setup: GenerationSetup) -> None:
        """Loads the model and its tokenizer, and checks the generation loop."""
        self._setup = setup
        self._tokenizer = load_tokenizer(setup.model_folder)
        self.load_weights(setup.model_folder)
        self._pads = check_padding(self._model)

    def generate(self, batch: BatchedDataDict, *, greedy: bool) -> BatchedDataDict:
        """Completes each row of `input_ids [B, T]` up to `input_lengths [B]`, under `seeds [B]`."""
        self.wake()
        setup = self._setup
        requests = read_requests(batch, setup.config, max_model_len=setup.max_model_len)
        stops = list(setup.stop_token_ids)
        decoding_of = partial(
            Decoding,
            config=setup.config,
            greedy=greedy,
            stop_token_ids=stops,
            tokenizer=self._tokenizer,
        )
        completed = complete(
            self._model, requests, decoding_of, stop_token_ids=stops, pads=self._pads
        )
        return as_batch(requests, completed)

    def take_weights(self, named_tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Replaces all weights, in place as they arrive if the model has them under these names."""
        # Weights that transformers converted on loading may have another layout under the same
        # name.
        own = {} if self._model._weight_conversions else self._model.state_dict()
        kept, filled = {}, {}
        for name, tensor in named_tensors:
            require_finite(_SENT, [(name, tensor)])
            if name in own and own[name].shape == tensor.shape:
                filled[name] = own[name].copy_(tensor)
            else:
                kept[name] = tensor
        places = {weight.data_ptr() for weight in filled.values()}
        if own and not kept and {weight.data_ptr() for weight in own.values()} <= places:
            return
        # Loaded again, since transformers maps published names only on loading.
        self._take(
            type(self._model),
            None,
            called=_SENT,
            config=self._model.config,
            state_dict={name: tensor.clone() for name, tensor in (filled | kept).items()},
        )

    def load_weights(self, model_folder: Path) -> None:
        """Replaces all weights by those of the safetensors files in `model_folder`."""
        from transformers import AutoModelForCausalLM

        self._take(
            AutoModelForCausalLM, model_folder, called=f"the model folder {model_folder.name!r}"
        )

    def _take(self, kind: Any, source: Path | None, **options: Any) -> None:
        model, _ = load_pretrained(kind, source, dtype=self._dtype, **options)
        self._model = model.eval().to(local_device())

    @property
    def _dtype(self) -> Any:
        return getattr(torch, self._setup.dtype)

    def wake(self) -> None:
        """Moves the model back to the GPU."""
        self._model.to(local_device())

    def sleep(self) -> None:
        """Moves the model to the host."""
        self._model.to("cpu")

    def peak_memory_gib(self) -> float:
        """Returns the peak memory of this process."""
        return peak_memory_gib()

    def shutdown(self) -> None:
        """Frees the model."""
        self.__dict__.clear()
