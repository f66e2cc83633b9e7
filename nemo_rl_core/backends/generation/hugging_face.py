"""The generation worker over transformers' own loop."""

from pathlib import Path
from typing import Any

import torch

from nemo_rl_core.backends.decoding.draws import Decoding
from nemo_rl_core.backends.decoding.requests import as_batch, read_requests
from nemo_rl_core.backends.decoding.transformers_loop import complete
from nemo_rl_core.backends.generation.base import GenerationSetup
from nemo_rl_core.data.pretrained import load_tokenizer
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.distributed.process_group import local_device
from nemo_rl_core.distributed.weight_sync import WeightBucket, combined_digest, received_digest
from nemo_rl_core.errors import ModelError
from nemo_rl_core.infra.timer import peak_memory_gib


class HuggingFaceBackend:
    """A transformers causal model, whole in this process (a `GenerationBackend`)."""

    def setup(self, setup: GenerationSetup) -> None:
        """Loads the model and its tokenizer."""
        self._setup = setup
        self._tokenizer = load_tokenizer(setup.model_folder)
        self.load_weights(setup.model_folder)

    def generate(self, batch: BatchedDataDict, *, greedy: bool) -> BatchedDataDict:
        """Completes each row of `input_ids [B, T]` up to `input_lengths [B]`, under `seeds [B]`."""
        setup = self._setup
        requests = read_requests(batch, setup.config, max_model_len=setup.max_model_len)
        stops = list(setup.stop_token_ids)
        decoding = Decoding(
            requests,
            setup.config,
            greedy=greedy,
            stop_token_ids=stops,
            tokenizer=self._tokenizer,
        )
        completed = complete(self._model, requests, decoding, stop_token_ids=stops)
        return as_batch(requests, completed)

    def update_weights(self, buckets: list[WeightBucket]) -> str:
        """Replaces all weights; returns what arrived, digested."""
        digest = combined_digest(received_digest(bucket) for bucket in buckets)
        # Buckets lie in memory that is shared and goes away.
        self._build(
            {name: tensor.clone() for bucket in buckets for name, tensor in bucket.named_tensors()}
        )
        return digest

    def load_weights(self, model_folder: Path) -> None:
        """Replaces all weights by those of the safetensors files in `model_folder`."""
        from safetensors.torch import load_file

        files = sorted(model_folder.glob("*.safetensors"))
        self._build({name: w for file in files for name, w in load_file(file).items()})

    def _build(self, weights: dict[str, torch.Tensor]) -> None:
        """The model anew, for transformers knows what published names stand for when it loads."""
        from transformers import AutoConfig, AutoModelForCausalLM

        model, report = AutoModelForCausalLM.from_pretrained(
            None,
            config=AutoConfig.from_pretrained(self._setup.model_folder),
            state_dict=weights,
            dtype=getattr(torch, self._setup.dtype),
            output_loading_info=True,
        )
        if report["missing_keys"]:
            raise ModelError(
                "the weights for generation are not whole",
                expected="every weight of the model",
                got=f"{len(report['missing_keys'])} missing, such as "
                f"{', '.join(sorted(report['missing_keys'])[:3])}",
                fix="send the weights of a policy of the same architecture",
            )
        self._model: Any = model.eval().to(local_device())

    def wake(self) -> None:
        """Brings the model back to the GPU."""
        self._model.to(local_device())

    def sleep(self) -> None:
        """Moves the model to the host."""
        self._model.to("cpu")

    def peak_memory_gib(self) -> float:
        """The most memory this process has held."""
        return peak_memory_gib()

    def shutdown(self) -> None:
        """Frees the model."""
        self.__dict__.clear()
