"""Training backend with Megatron-core."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from nemo_rl_core.backends.experimental.flash_attention import attention_choices
from nemo_rl_core.backends.experimental.megatron_bridge_check import (
    PROOF_TOKENS,
    refuse_changed_weights,
    refuse_different_logprobs,
)
from nemo_rl_core.backends.training.base import (
    TrainingSetup,
    allowed_sharing,
    refuse_k,
    warn_of_balancing_loss,
)
from nemo_rl_core.backends.training.determinism import compute_deterministically, full_precision
from nemo_rl_core.backends.training.garbage import freeze_libraries
from nemo_rl_core.backends.training.megatron import checkpoint
from nemo_rl_core.backends.training.megatron.attention import (
    refuse_dense_rows,
    takes_boundaries,
)
from nemo_rl_core.backends.training.megatron.heads import LogprobHead
from nemo_rl_core.backends.training.megatron.model import build_model
from nemo_rl_core.backends.training.megatron.optimizer import (
    make_optimizer,
    state_tensors,
    step_with_norm,
    wrap,
)
from nemo_rl_core.backends.training.megatron.parts import MegatronMicrobatch, make_parts
from nemo_rl_core.backends.training.megatron.probe import PROBE_TOKENS, refuse_unless_faithful
from nemo_rl_core.backends.training.megatron.reference import ReferenceWeights
from nemo_rl_core.backends.training.megatron.settings import has_transformer_engine
from nemo_rl_core.backends.training.megatron.step import run_parts
from nemo_rl_core.backends.training.megatron.topology import (
    initialize_topology,
    tear_down_topology,
)
from nemo_rl_core.backends.training.megatron.weights import iter_hf_weights, load_hf_weights
from nemo_rl_core.backends.training.megatron.writing import PendingWrite
from nemo_rl_core.backends.training.offload import PARTS, OffloadedState
from nemo_rl_core.backends.training.optimizers import learning_rate_at, require_finite_norm
from nemo_rl_core.checkpoints.written_files import WrittenFile
from nemo_rl_core.config.megatron_types import BRIDGE, bridge_version
from nemo_rl_core.config.training import MegatronTraining
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.distributed.host_copy import numbers_of, to_host
from nemo_rl_core.distributed.packing.prefixes import PrefixSharing
from nemo_rl_core.distributed.process_group import local_device
from nemo_rl_core.distributed.step_times import step_time
from nemo_rl_core.distributed.weight_sync.link import SendsWeights
from nemo_rl_core.errors import ConfigError
from nemo_rl_core.functional.masked import num_trained_sequences
from nemo_rl_core.functional.protocols import LossFunction
from nemo_rl_core.telemetry.usage import peak_memory_gib


class MegatronBackend(SendsWeights):
    """One rank that trains a `GPTModel` with AdamW (a `TrainingBackend`).

    Every method except `setup`, `shutdown` and `peak_memory_gib` is a collective: all ranks call
    it, each with the rows of its data-parallel replica.
    """

    def setup(self, setup: TrainingSetup) -> None:
        """Joins the ranks, builds this rank's part of the model and creates the optimizer."""
        training = setup.training
        assert isinstance(training, MegatronTraining), training
        if setup.head != "lm":
            raise _no_scalar_head()
        self._finish_pending_save()
        freeze_libraries()
        initialize_topology(training, seed=setup.seed)
        self._device = local_device()
        self._is_deterministic = compute_deterministically(
            training.deterministic, device=self._device
        )
        torch.set_float32_matmul_precision(training.float32_matmul_precision)
        self._setup = setup
        self.sent_dtype = getattr(torch, setup.dtype)
        self._num_updates = 0
        self._models = build_model(setup.model_folder, training, setup.dtype)
        for model in self._models:
            model.takes_boundaries = takes_boundaries(
                model,
                training,
                dtype=setup.dtype,
                device=self._device,
                fused=has_transformer_engine(),
            )
        warn_of_balancing_loss(self._models[0].hf_config)
        load_hf_weights(self._models, setup.model_folder)
        self._chunks = wrap(self._models)
        self._optimizer = make_optimizer(self._chunks, setup.optimizer, self.sent_dtype)
        self._offload = PARTS[training.offload_for_generation]
        self._memory = OffloadedState(
            {
                "weights": lambda: (each for model in self._models for each in model.parameters()),
                "optimizer": lambda: state_tensors(self._optimizer),
            }
        )
        self._writing: PendingWrite | None = None
        self._head = LogprobHead(
            self._models[-1],
            vocab_size=self._models[-1].hf_config.vocab_size,
            temperature=setup.temperature,
        )
        self._reference: ReferenceWeights | None = None
        # Kernels with boundaries, such as Transformer Engine's, do not support prefix trees.
        by_boundaries = has_transformer_engine() or self._models[0].takes_boundaries
        is_shared = training.share_prefixes and not by_boundaries
        self._sharing = allowed_sharing(setup.model_folder) if is_shared else None
        with full_precision():
            layers = [layer for model in self._models for layer in model.decoder.layers]
            probed = partial(self._all_logprobs, max_tokens=PROBE_TOKENS)
            refuse_unless_faithful(probed, layers, dtype=setup.dtype)
            if self._models[0].hf_family is None:
                refuse_changed_weights(self.named_weights(), setup.model_folder)
                refuse_different_logprobs(
                    partial(self._all_logprobs, max_tokens=PROOF_TOKENS),
                    setup.model_folder,
                    dtype=setup.dtype,
                    temperature=setup.temperature,
                )

    def choices(self) -> dict[str, str]:
        """Returns the resolved values of `auto` settings by their paths in the recipe.

        A model of Megatron-Bridge also has the bridge's version.
        """
        kernel = "varlen" if self._models[0].takes_boundaries else "sdpa"
        fused = has_transformer_engine()
        choices = {
            **attention_choices("transformer_engine" if fused else kernel),
            "training.deterministic": str(self._is_deterministic).lower(),
        }
        if self._models[0].hf_family is None:
            choices["training.backend"] = f"megatron, by {BRIDGE} {bridge_version()}"
        return choices

    def _finish_pending_save(self) -> None:
        if "_writing" in self.__dict__:
            self.finish_checkpoint()

    def train_step(self, batch: BatchedDataDict, loss_fn: LossFunction) -> dict[str, float]:
        """Runs one optimizer step, as `TrainingBackend` describes."""
        metrics, _ = self.forward_backward(batch, loss_fn, returns_outputs=False)
        return {**metrics, **self.optimizer_step()}

    @step_time()
    def forward_backward(
        self, batch: BatchedDataDict, loss_fn: LossFunction, *, returns_outputs: bool = True
    ) -> tuple[dict[str, float], torch.Tensor | None]:
        """Computes the gradients of a step, which replace earlier ones; weights do not change.

        Returns metrics of the full step on every rank; and with `returns_outputs`, `[B, T-1]`
        logprobs where `token_mask` is set, on every rank of the replica.
        """
        valid_tokens, valid_seqs = self._global_numbers(batch)

        def consume(hidden: torch.Tensor, part: MegatronMicrobatch) -> tuple[torch.Tensor, Any]:
            logprobs, rows = self._head.loss_inputs(hidden, part.batch, part.rows)
            loss, metrics = loss_fn(
                logprobs, rows, global_valid_seqs=valid_seqs, global_valid_tokens=valid_tokens
            )
            return loss, (metrics, [logprobs.detach()] if returns_outputs else [])

        self._memory.restore("weights")
        for chunk in self._chunks:
            chunk.restore_grad_buffers(synchronize=False)
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        parts = self._parts(batch, self._setup.max_tokens_per_microbatch)
        results = run_parts(self._chunks, parts, consume, forward_only=False)
        metrics = _summed_over_ranks([metrics for metrics, _ in results])
        logprobs: torch.Tensor | None = None
        if returns_outputs:
            empty = torch.zeros(batch["token_mask"].shape)
            (logprobs,) = self._in_rows(parts, [outputs for _, outputs in results], into=[empty])
        return {**metrics, "num_valid_tokens": valid_tokens.item()}, logprobs

    def optimizer_step(self) -> dict[str, float]:
        """Updates the weights; returns `grad_norm` and `learning_rate` on every rank."""
        self._memory.restore("optimizer")
        step = self._num_updates + 1
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate_at(step, self._setup.optimizer)
        # Checked here, since the step clips by the norm without checking it.
        self._optimizer.prepare_grads()
        norm = float(self._optimizer.get_grad_norm())
        require_finite_norm(norm, step=step)
        step_with_norm(self._optimizer, norm)
        self._num_updates = step
        return {"grad_norm": norm, "learning_rate": self._optimizer.param_groups[0]["lr"]}

    def _global_numbers(self, batch: BatchedDataDict) -> tuple[torch.Tensor, torch.Tensor]:
        numbers = torch.zeros(2)
        if batch.size:
            mask = batch["token_mask"] * batch["sample_mask"][:, None]
            numbers[0], numbers[1] = mask.sum(), num_trained_sequences(batch)
        numbers = numbers.to(self._device)
        dist.all_reduce(numbers, group=parallel_state.get_data_parallel_group())
        return numbers[0], numbers[1]

    def get_logprobs(self, batch: BatchedDataDict) -> torch.Tensor:
        """Returns `[B, T-1]` logprobs under the trained weights, on every rank of the replica."""
        return self._all_logprobs(batch, max_tokens=self._setup.max_tokens_per_microbatch)

    def _all_logprobs(self, batch: BatchedDataDict, *, max_tokens: int) -> torch.Tensor:
        def values(hidden: torch.Tensor, part: MegatronMicrobatch) -> Sequence[torch.Tensor]:
            return [self._head.logprobs(hidden, part.batch, part.rows)]

        empty = torch.zeros(batch["token_mask"].shape)
        (logprobs,) = self._compute(self._parts(batch, max_tokens), values, into=[empty])
        return logprobs

    def get_reference_logprobs(self, batch: BatchedDataDict) -> torch.Tensor:
        """Returns `[B, T-1]` logprobs under the reference policy, loaded on first use."""
        with self._loaded_reference().swapped_in():
            return self.get_logprobs(batch)

    def get_reference_topk_logprobs(
        self, batch: BatchedDataDict, k: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the reference's k most likely next tokens, like `DTensorBackend`."""
        reference = self._loaded_reference()
        num_ids = min(reference.vocabulary_size, self._models[-1].hf_config.vocab_size)
        refuse_k(k, num_ids)
        shape = (*batch["token_mask"].shape, k)
        empty = [torch.zeros(shape, dtype=torch.long), torch.zeros(shape)]

        def values(hidden: torch.Tensor, part: MegatronMicrobatch) -> Sequence[torch.Tensor]:
            return self._head.topk_logprobs(hidden, part.batch, part.rows, k=k, num_ids=num_ids)

        with reference.swapped_in():
            parts = self._parts(batch, self._setup.max_tokens_per_microbatch)
            ids, logprobs = self._compute(parts, values, into=empty)
        return ids, logprobs

    def get_values(self, batch: BatchedDataDict) -> torch.Tensor:
        """Raises `ConfigError`, since there is no scalar head."""
        raise _no_scalar_head()

    def _compute(
        self,
        parts: list[MegatronMicrobatch],
        values: Callable[[torch.Tensor, MegatronMicrobatch], Sequence[torch.Tensor]],
        *,
        into: list[torch.Tensor],
    ) -> list[torch.Tensor]:
        """Writes the results of each micro-batch into `[B, ...]` CPU tensors of every rank."""

        def consume(hidden: torch.Tensor, part: MegatronMicrobatch) -> tuple[torch.Tensor, Any]:
            return hidden.new_zeros(()), values(hidden, part)

        self._memory.restore("weights")
        results = run_parts(self._chunks, parts, consume, forward_only=True)
        return self._in_rows(parts, results, into=into)

    def _in_rows(
        self,
        parts: list[MegatronMicrobatch],
        results: Sequence[Sequence[torch.Tensor]],
        *,
        into: list[torch.Tensor],
    ) -> list[torch.Tensor]:
        if parallel_state.is_pipeline_last_stage():
            real_parts = [part for part in parts if part.indices]
            for part, values in zip(real_parts, results, strict=True):
                for target, value in zip(into, to_host(values), strict=True):
                    target[list(part.indices), : value.shape[1]] = value
        return [self._from_last_stage(target) for target in into]

    def _from_last_stage(self, tensor: torch.Tensor) -> torch.Tensor:
        if parallel_state.get_pipeline_model_parallel_world_size() == 1:
            return tensor
        sent = tensor.to(self._device)
        source = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast(sent, source, group=parallel_state.get_pipeline_model_parallel_group())
        return sent.cpu()

    def _parts(self, batch: BatchedDataDict, max_tokens: int) -> list[MegatronMicrobatch]:
        config = self._models[0].config
        parts = make_parts(
            batch, config, max_tokens=max_tokens, device=self._device, sharing=self._sharing
        )
        has_mask = not (has_transformer_engine() or self._models[0].takes_boundaries)
        if has_mask and self._device.type == "cuda":
            shapes = ((part.rows.last.shape[0], part.rows.last.shape[1]) for part in parts)
            memory = torch.cuda.get_device_properties(self._device).total_memory
            refuse_dense_rows(config, shapes, memory_bytes=memory)
        return parts

    def prefix_sharing(self) -> PrefixSharing | None:
        """Returns how the model shares prefixes, for plans of several ranks."""
        return self._sharing

    def _loaded_reference(self) -> ReferenceWeights:
        self._memory.restore("weights")  # the reference is loaded into the same memory
        if self._reference is None:
            folder = self._setup.reference_folder
            if folder is None:
                raise ValueError("logprobs of the reference require TrainingSetup.reference_folder")
            self._reference = ReferenceWeights(self._models, self._setup.model_folder, folder)
        return self._reference

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields full weights under transformers' names; every rank iterates."""
        self._memory.restore("weights")
        return iter_hf_weights(self._models)

    def save_checkpoint(self, path: Path) -> None:
        """Writes `model/` (transformers layout) and `trainer/` (Megatron's sharded layout)."""
        self.start_checkpoint(path)
        self.finish_checkpoint()

    def start_checkpoint(self, path: Path) -> None:
        """Saves like `save_checkpoint`, but writes the trainer's state while training continues."""
        self.finish_checkpoint()
        self._memory.restore("weights", "optimizer")
        checkpoint.save_model(
            path / "model",
            self.named_weights(),
            self._setup.model_folder,
            dtype=self._setup.dtype,
        )
        self.start_sharded_checkpoint(path)

    def start_sharded_checkpoint(self, path: Path) -> None:
        """Saves like `start_checkpoint`, but with sharded weights instead of `model/`."""
        self.finish_checkpoint()
        self._memory.restore("weights", "optimizer")
        self._writing = checkpoint.start_saving_trainer(
            path / "trainer", self._chunks, self._optimizer, self._num_updates
        )

    def checkpoint_is_written(self) -> bool:
        """Returns True if `finish_checkpoint` would not wait for this rank."""
        return self._writing is None or self._writing.is_done()

    def finish_checkpoint(self) -> dict[str, WrittenFile]:
        """Waits until the folder is complete; returns this rank's shards, hashed."""
        writing, self._writing = self._writing, None
        written = writing.finish() if writing is not None else {}
        return {f"trainer/{name}": file for name, file in written.items()}

    def load_checkpoint(self, path: Path) -> None:
        """Restores a checkpoint of `save_checkpoint`, at any layout."""
        self._memory.restore("weights", "optimizer")
        self._num_updates = checkpoint.load_trainer(path / "trainer", self._chunks, self._optimizer)

    def release_memory(self, *, keeps_weights: bool = False) -> None:
        """Drops gradient buffers, and moves the recipe's offloaded parts to the host.

        Each part moves back with the next call that needs it.
        """
        for chunk in self._chunks:
            chunk.offload_grad_buffers(synchronize=False, empty_cache=False)
        self._memory.offload(
            part for part in self._offload if not (keeps_weights and part == "weights")
        )
        super().release_memory()

    def peak_memory_gib(self) -> float:
        """Returns the peak memory of this process."""
        return peak_memory_gib()

    def shutdown(self) -> None:
        """Frees the model and optimizer after pending saves, and leaves Megatron's groups."""
        self._finish_pending_save()
        self.__dict__.clear()
        tear_down_topology()


def _summed_over_ranks(metrics: list[dict[str, torch.Tensor]]) -> dict[str, float]:
    """Sums the metrics of this rank's micro-batches, then over replicas; the same on every rank."""
    local: dict[str, torch.Tensor] = {}
    for part in metrics:
        for name, value in part.items():
            local[name] = local[name] + value if name in local else value
    # Only last stages have metrics, and only ranks with rows.
    group = parallel_state.get_data_parallel_group()
    gathered: list[dict[str, float]] = [{}] * group.size()
    dist.all_gather_object(gathered, numbers_of(local), group=group)
    names = {name: None for part in gathered for name in part}
    totals = [{name: sum(part.get(name, 0.0) for part in gathered) for name in names}]
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        source = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast_object_list(
            totals, source, group=parallel_state.get_pipeline_model_parallel_group()
        )
    return totals[0]


def _no_scalar_head() -> ConfigError:
    return ConfigError(
        "the megatron backend has no scalar head",
        expected="head='lm'",
        got="head='scalar'",
        fix="train reward models and critics with the dtensor backend",
    )
