"""Generation backend with Megatron-core's model and its KV cache.

Megatron-core's engines are not used: they sample all rows of a batch from one generator, while here
each row has a separate seed, so that its tokens do not depend on the others. vLLM is the engine for
rollouts; this one computes with the same layers that Megatron trains.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from nemo_rl_core.backends.decoding.requests import (
    Decoding,
    DecodingRequest,
    as_batch,
    padded_on_the_left,
    read_requests,
)
from nemo_rl_core.backends.generation.base import GenerationSetup
from nemo_rl_core.backends.training.megatron.families import is_for_bridge
from nemo_rl_core.backends.training.megatron.kv_cache import KeyValueCache, attend_by_mask
from nemo_rl_core.backends.training.megatron.model import build_model
from nemo_rl_core.backends.training.megatron.packed import output_weight
from nemo_rl_core.backends.training.megatron.topology import (
    initialize_topology,
    tear_down_topology,
)
from nemo_rl_core.backends.training.megatron.weights import load_hf_weights, take_hf_weights
from nemo_rl_core.config.generation import MegatronGenerationConfig
from nemo_rl_core.config.megatron_types import MEGATRON_TYPES
from nemo_rl_core.config.training import MegatronTraining
from nemo_rl_core.data.pretrained import load_tokenizer
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.distributed.process_group import local_device
from nemo_rl_core.distributed.weight_sync.link import ReceivesWeights
from nemo_rl_core.errors import ConfigError
from nemo_rl_core.telemetry.usage import peak_memory_gib


class MegatronInferenceBackend(ReceivesWeights):
    """One rank of a `GPTModel` (a `GenerationBackend`); all ranks sample the same tokens."""

    def setup(self, setup: GenerationSetup) -> None:
        """Joins the ranks and builds this rank's part of the model."""
        config = setup.config
        assert isinstance(config, MegatronGenerationConfig), config
        training = MegatronTraining(
            tensor_parallel_size=config.tensor_parallel_size,
            pipeline_parallel_size=config.pipeline_parallel_size,
        )
        if is_for_bridge(setup.model_folder):
            # The bridge converts complete folders, but a trainer's weights arrive one by one.
            raise ConfigError(
                f"the megatron engine cannot load {setup.model_folder.name!r}",
                expected=f"one of the types {', '.join(sorted(MEGATRON_TYPES))}",
                got="a type that only Megatron-Bridge builds, for training",
                fix="choose another engine, such as vllm",
            )
        initialize_topology(training, seed=setup.seed)
        self._setup, self._device = setup, local_device()
        self._tokenizer = load_tokenizer(setup.model_folder)
        self._models = [
            model.eval() for model in build_model(setup.model_folder, training, setup.dtype)
        ]
        for model in self._models:
            attend_by_mask(model)
        self.load_weights(setup.model_folder)

    @torch.no_grad()
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
        if requests:
            self._complete(requests, decoding)
        return as_batch(requests, decoding.completed())

    def _complete(self, requests: list[DecodingRequest], decoding: Decoding) -> None:
        prompts = [tuple(request.prompt) for request in requests]
        distinct = {prompt: index for index, prompt in enumerate(dict.fromkeys(prompts))}
        input_ids, mask = padded_on_the_left(list(distinct))
        most = max(request.max_new_tokens for request in requests)
        cache = KeyValueCache(
            self._models[0],
            (mask == 0).sum(dim=1).to(self._device),
            # The last token of a row needs no forward pass.
            input_ids.shape[1] + most - 1,
        )
        prompt_of_row = torch.tensor([distinct[prompt] for prompt in prompts])
        logits = self._next_logits(cache, input_ids)[prompt_of_row]
        cache.select(prompt_of_row.to(self._device))
        tokens = decoding.draw(logits)
        running = torch.arange(len(requests))
        while not decoding.ended.all():
            ended = decoding.ended[running]
            if ended.any():
                cache.select((~ended).nonzero()[:, 0].to(self._device))
                running = running[~ended]
            logits = logits.new_zeros(logits.shape)
            logits[running] = self._next_logits(cache, tokens[running, None])
            tokens = decoding.draw(logits)

    def _next_logits(self, cache: KeyValueCache, input_ids: torch.Tensor) -> torch.Tensor:
        """Returns `[B, V]` logits after `input_ids [B, L]`, on every rank of the engine."""
        from megatron.core import parallel_state  # after this package has patched it

        hidden = cache.append(input_ids.to(self._device))
        size = (len(input_ids), self._models[0].hf_config.vocab_size)
        logits = torch.empty(size, device=self._device) if hidden is None else self._logits(hidden)
        if parallel_state.get_pipeline_model_parallel_world_size() > 1:
            dist.broadcast(
                logits,
                parallel_state.get_pipeline_model_parallel_last_rank(),
                group=parallel_state.get_pipeline_model_parallel_group(),
            )
        return logits.cpu()

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns `[B, V]` float32 logits of `[B, D]`, gathered from all tensor ranks."""
        from megatron.core import parallel_state

        vocab_size = self._models[-1].hf_config.vocab_size
        weight, _ = output_weight(self._models[-1], vocab_size)
        part = (hidden @ weight.T).float()
        group = parallel_state.get_tensor_model_parallel_group()
        if group.size() == 1:
            return part
        # The last rank may have fewer rows; gathering needs equal parts.
        share = -(-vocab_size // group.size())
        part = torch.nn.functional.pad(part, (0, share - part.shape[1])).contiguous()
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part, group=group)
        return torch.cat(parts, dim=1)[:, :vocab_size].contiguous()

    def take_weights(self, named_tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Replaces all weights as they arrive; this rank copies its slices."""
        take_hf_weights(self._models, named_tensors)

    def load_weights(self, model_folder: Path) -> None:
        """Replaces all weights with those of the safetensors files in `model_folder`."""
        load_hf_weights(self._models, model_folder)

    def wake(self) -> None:
        """No-op: `sleep` releases nothing."""

    def sleep(self) -> None:
        """No-op: keys and values exist only during a call, and weights stay on the device."""

    def peak_memory_gib(self) -> float:
        """Returns the peak memory of this process."""
        return peak_memory_gib()

    def shutdown(self) -> None:
        """Frees the model and leaves Megatron's process groups."""
        self.__dict__.clear()
        tear_down_topology()
