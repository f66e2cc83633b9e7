"""The generation worker over Megatron-core's model.

Every sequence is computed anew for every token. Megatron-core's own engines were left out: they
draw all rows of a batch from one generator, where here each row has its own seed, and their caches
of keys and values want sequences of one length, or kernels that a CPU lacks. vLLM is the engine to
roll out with; this one computes with the very layers that Megatron trains.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nemo_rl_core.backends.decoding.draws import Decoding
from nemo_rl_core.backends.decoding.requests import Request, as_batch, read_requests
from nemo_rl_core.backends.generation.base import GenerationSetup
from nemo_rl_core.backends.training.megatron.model import build_model
from nemo_rl_core.backends.training.megatron.packed import output_weight, own_places
from nemo_rl_core.backends.training.megatron.parts import Part
from nemo_rl_core.backends.training.megatron.step import run_parts
from nemo_rl_core.backends.training.megatron.topology import (
    initialize_topology,
    tear_down_topology,
)
from nemo_rl_core.backends.training.megatron.weights import load_hf_weights
from nemo_rl_core.config.generation import MegatronGenerationConfig
from nemo_rl_core.config.training import MegatronTraining
from nemo_rl_core.data.packing import Microbatch, pack
from nemo_rl_core.data.pretrained import load_tokenizer
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.distributed.process_group import local_device
from nemo_rl_core.distributed.weight_sync import ReceivesWeights
from nemo_rl_core.infra.timer import peak_memory_gib


class MegatronInferenceBackend(ReceivesWeights):
    """One rank of a `GPTModel` (a `GenerationBackend`); all ranks of an engine draw alike."""

    def setup(self, setup: GenerationSetup) -> None:
        """Joins the ranks and builds this rank's part of the model."""
        config = setup.config
        assert isinstance(config, MegatronGenerationConfig), config
        training = MegatronTraining(
            tensor_parallel_size=config.tensor_parallel_size,
            pipeline_parallel_size=config.pipeline_parallel_size,
        )
        initialize_topology(training, seed=setup.seed)
        self._setup, self._device = setup, local_device()
        self._tokenizer = load_tokenizer(setup.model_folder)
        self._models = [
            model.eval() for model in build_model(setup.model_folder, training, setup.dtype)
        ]
        self.load_weights(setup.model_folder)

    def generate(self, batch: BatchedDataDict, *, greedy: bool) -> BatchedDataDict:
        """Completes each row of `input_ids [B, T]` up to `input_lengths [B]`, under `seeds [B]`."""
        setup = self._setup
        requests = read_requests(batch, setup.config, max_model_len=setup.max_model_len)
        decoding = Decoding(
            requests,
            setup.config,
            greedy=greedy,
            stop_token_ids=setup.stop_token_ids,
            tokenizer=self._tokenizer,
        )
        while not decoding.ended.all():
            decoding.draw(self._next_logits(requests, decoding))
        return as_batch(requests, decoding.completed())

    def _next_logits(self, requests: list[Request], decoding: Decoding) -> torch.Tensor:
        """`[B, V]` logits of what follows each row as it stands, on every rank of the engine."""
        from megatron.core import parallel_state

        rows = [
            [*request.prompt, *done.token_ids]
            for request, done in zip(requests, decoding.completed(), strict=True)
        ]
        last = torch.tensor([len(row) - 1 for row in rows], device=self._device)

        def consume(hidden: torch.Tensor, part: Part) -> tuple[torch.Tensor, Any]:
            row_length = part.rows.position_ids.shape[1]
            wanted = torch.arange(len(rows), device=last.device) * row_length + last
            found = (own_places(part.rows) == wanted[:, None]).int().argmax(dim=1)
            return hidden.new_zeros(()), self._logits(hidden[found])

        results = run_parts(self._models, [_part(rows, self._device)], consume, forward_only=True)
        size = (len(rows), self._models[0].hf_config.vocab_size)
        logits: torch.Tensor = results[0] if results else torch.empty(size, device=self._device)
        if parallel_state.get_pipeline_model_parallel_world_size() == 1:
            return logits
        dist.broadcast(
            logits,
            parallel_state.get_pipeline_model_parallel_last_rank(),
            group=parallel_state.get_pipeline_model_parallel_group(),
        )
        return logits

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[B, V]` float32 from `[B, D]`, out of the parts of the head on all tensor ranks."""
        from megatron.core import parallel_state

        vocab_size = self._models[-1].hf_config.vocab_size
        weight, _ = output_weight(self._models[-1], vocab_size)
        part = (hidden @ weight.T).float()
        group = parallel_state.get_tensor_model_parallel_group()
        if group.size() == 1:
            return part
        # The last rank may hold fewer rows; gathering wants equal parts.
        share = -(-vocab_size // group.size())
        part = torch.nn.functional.pad(part, (0, share - part.shape[1])).contiguous()
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part, group=group)
        return torch.cat(parts, dim=1)[:, :vocab_size].contiguous()

    def take_weights(self, named_tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Replaces all weights, of which this rank takes its slices."""
        load_hf_weights(self._models, dict(named_tensors))

    def load_weights(self, model_folder: Path) -> None:
        """Replaces all weights by those of the safetensors files in `model_folder`."""
        load_hf_weights(self._models, model_folder)

    def wake(self) -> None:
        """Nothing was given away."""

    def sleep(self) -> None:
        """Nothing is kept between two calls but the weights."""

    def peak_memory_gib(self) -> float:
        """The most memory this process has held."""
        return peak_memory_gib()

    def shutdown(self) -> None:
        """Frees the model, and leaves Megatron's groups."""
        self.__dict__.clear()
        tear_down_topology()


def _part(rows: list[list[int]], device: torch.device) -> Part:
    """The rows as one micro-batch, each in a row of its own."""
    lengths = torch.tensor([len(row) for row in rows])
    input_ids = torch.zeros(len(rows), int(lengths.max()), dtype=torch.long)
    for place, row in enumerate(rows):
        input_ids[place, : len(row)] = torch.tensor(row)
    batch = BatchedDataDict({"input_ids": input_ids, "input_lengths": lengths}).to(device)
    indices = tuple(range(len(rows)))
    layout = Microbatch(tuple((place,) for place in indices), input_ids.shape[1])
    return Part(batch, indices, pack(batch["input_ids"], batch["input_lengths"], layout))
