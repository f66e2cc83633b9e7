"""Generation backend with transformers' loop."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from nemo_rl_core.backends.decoding.requests import read_requests
from nemo_rl_core.backends.decoding.transformers_loop import complete, longest_batch
from nemo_rl_core.backends.generation.base import GenerationSetup
from nemo_rl_core.checkpoints.weights import load_pretrained, require_finite
from nemo_rl_core.data.pretrained import load_tokenizer
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.distributed.process_group import local_device
from nemo_rl_core.distributed.weight_sync.link import ReceivesWeights
from nemo_rl_core.telemetry.usage import peak_memory_gib

_SOURCE = "the trainer's weight transfer"


class HuggingFaceBackend(ReceivesWeights):
    """A complete transformers causal model in this process (a `GenerationBackend`)."""

    def setup(self, setup: GenerationSetup) -> None:
        """Loads the model and its tokenizer, and checks the generation loop."""
        self._setup, self._device = setup, local_device()
        self._tokenizer = load_tokenizer(setup.model_folder)
        self.load_weights(setup.model_folder)
        self._max_batch_tokens = longest_batch(self._model)

    def generate(self, batch: BatchedDataDict, *, greedy: bool) -> BatchedDataDict:
        """Completes each row of `input_ids [B, T]` up to `input_lengths [B]`, under `seeds [B]`."""
        self.wake()
        setup = self._setup
        requests = read_requests(batch, setup.config, max_model_len=setup.max_model_len)
        return complete(
            self._model,
            requests,
            setup.config,
            greedy=greedy,
            stop_token_ids=list(setup.stop_token_ids),
            tokenizer=self._tokenizer,
            max_batch_tokens=self._max_batch_tokens,
        )

    def take_weights(self, named_tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Replaces all weights.

        Copies each tensor in place when it arrives if all names and shapes match; else loads the
        model again.
        """
        # Weights that transformers converted on loading may have a different layout under the same
        # name.
        current = {} if self._model._weight_conversions else self._model.state_dict()
        kept, filled = {}, {}
        for name, tensor in named_tensors:
            require_finite(_SOURCE, [(name, tensor)])
            if name in current and current[name].shape == tensor.shape:
                filled[name] = current[name].copy_(tensor)
            else:
                kept[name] = tensor
        addresses = {weight.data_ptr() for weight in filled.values()}
        if current and not kept and {each.data_ptr() for each in current.values()} <= addresses:
            return
        # The model is loaded again, since transformers maps published names only on loading.
        self._load(
            type(self._model),
            None,
            source_name=_SOURCE,
            config=self._model.config,
            state_dict={name: tensor.clone() for name, tensor in (filled | kept).items()},
        )

    def load_weights(self, model_folder: Path) -> None:
        """Replaces all weights with those of the safetensors files in `model_folder`."""
        from transformers import AutoModelForCausalLM

        self._load(
            AutoModelForCausalLM,
            model_folder,
            source_name=f"the model folder {model_folder.name!r}",
        )

    def _load(self, kind: Any, source: Path | None, **options: Any) -> None:
        dtype = getattr(torch, self._setup.dtype)
        model, _ = load_pretrained(kind, source, dtype=dtype, **options)
        self._model = model.eval().to(self._device)

    def wake(self) -> None:
        """Moves the model back to the GPU."""
        self._model.to(self._device)

    def sleep(self) -> None:
        """Moves the model to the host."""
        self._model.to("cpu")

    def peak_memory_gib(self) -> float:
        """Returns the peak memory of this process."""
        return peak_memory_gib()

    def shutdown(self) -> None:
        """Frees the model."""
        self.__dict__.clear()
