"""Training backend for transformers models."""

import posixpath
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from nemo_rl_core.backends.decoding.requests import read_requests, row_seeds
from nemo_rl_core.backends.decoding.transformers_loop import complete, longest_batch
from nemo_rl_core.backends.experimental.flash_attention import attention_choices
from nemo_rl_core.backends.training.base import (
    TrainingSetup,
    refuse_k,
)
from nemo_rl_core.backends.training.determinism import compute_deterministically
from nemo_rl_core.backends.training.dtensor.builder import ModelBuilder
from nemo_rl_core.backends.training.dtensor.checkpoint import TrainerState, written_by_rank_0
from nemo_rl_core.backends.training.dtensor.float8 import (
    refresh_scales,
    unwrapped,
)
from nemo_rl_core.backends.training.dtensor.mesh import join_mesh
from nemo_rl_core.backends.training.dtensor.microbatches import (
    Microbatches,
    MicrobatchPart,
    PackedTokens,
)
from nemo_rl_core.backends.training.dtensor.model import LogprobModel, ScoreModel
from nemo_rl_core.backends.training.dtensor.packed import PackedModel
from nemo_rl_core.backends.training.dtensor.parallelize import (
    drop_gradients,
    drop_unused_gradients,
    full_tensor,
    release,
    sync_gradients,
)
from nemo_rl_core.backends.training.garbage import freeze_libraries
from nemo_rl_core.backends.training.offload import PARTS, OffloadedState, optimizer_tensors
from nemo_rl_core.backends.training.optimizers import (
    build_optimizer,
    clip_gradients,
    learning_rate_at,
)
from nemo_rl_core.checkpoints.weight_files import distinct
from nemo_rl_core.checkpoints.weights import as_published, keeps_float32, refuse_wrong_weights
from nemo_rl_core.checkpoints.written_files import WrittenFile
from nemo_rl_core.config.generation import SamplingConfig
from nemo_rl_core.config.training import DTensorTraining
from nemo_rl_core.data.pretrained import load_tokenizer
from nemo_rl_core.data.pretrained import stop_token_ids as model_stop_token_ids
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.distributed.host_copy import numbers_of, to_host
from nemo_rl_core.distributed.packing.prefixes import PrefixSharing
from nemo_rl_core.distributed.process_group import local_device, world_size
from nemo_rl_core.distributed.step_times import step_time
from nemo_rl_core.distributed.weight_sync.link import SendsWeights
from nemo_rl_core.errors import ConfigError
from nemo_rl_core.functional.masked import num_trained_sequences
from nemo_rl_core.functional.protocols import LossFunction
from nemo_rl_core.model_files.loading import (
    name_in_errors,
    shared_vocabulary_size,
)
from nemo_rl_core.model_files.quantized import dequantized_weights
from nemo_rl_core.model_files.weights import fill_from_folder
from nemo_rl_core.telemetry.usage import peak_memory_gib


class DTensorBackend(SendsWeights):
    """One rank that trains a transformers model (a `TrainingBackend`).

    Ranks are set by environment variables, their axes by `TrainingSetup.training`.
    """

    def setup(self, setup: TrainingSetup) -> None:
        """Loads the model, checks its results on packed rows, and creates the optimizer."""
        self._finish_pending_save()
        freeze_libraries()
        torch.manual_seed(setup.seed)
        self._device = local_device()
        assert isinstance(setup.training, DTensorTraining)
        self._is_deterministic = compute_deterministically(
            setup.training.deterministic, device=self._device
        )
        torch.set_float32_matmul_precision(setup.training.float32_matmul_precision)
        self._setup, self._training = setup, setup.training
        self.sent_dtype = getattr(torch, setup.dtype)
        self._mesh = join_mesh(self._training)
        self._num_updates = 0
        self._builder = ModelBuilder(setup, self._training, self._mesh)
        self._policy, self._adapters = self._builder.policy()
        self._reference: LogprobModel | None = None
        self._vocabulary_size = 0  # shared with the reference; set by its first use
        self._max_batch_tokens: float | None = None  # of the loop; set by the first `generate`
        self._microbatches = Microbatches(setup.max_tokens_per_microbatch, self._mesh)
        adapters = self._adapters.trained if self._adapters else None
        trained = adapters or dict(self._policy.model.named_parameters())
        self._optimizer = build_optimizer(trained.items(), setup.optimizer)
        self._trainer_state = TrainerState(self._optimizer, trained, weights=adapters)
        self._memory = OffloadedState(
            {
                "weights": self._policy.model.parameters,
                "reference": lambda: self._reference.model.parameters() if self._reference else (),
                "optimizer": lambda: optimizer_tensors(self._optimizer),
            }
        )

    def _finish_pending_save(self) -> None:
        # An earlier setup's save uses the same process group.
        if "_trainer_state" in self.__dict__:
            self.finish_checkpoint()

    def prefix_sharing(self) -> PrefixSharing | None:
        """Returns how the trained model shares prefixes, for plans of several ranks."""
        return self._policy.sharing

    def choices(self) -> dict[str, str]:
        """Returns the resolved values of `auto` settings by their paths in the recipe."""
        attention = self._policy.attention
        return {
            **attention_choices(attention.kernel if attention else "sdpa"),
            "training.deterministic": str(self._is_deterministic).lower(),
        }

    def generate(
        self,
        batch: BatchedDataDict,
        *,
        greedy: bool,
        max_new_tokens: int,
        temperature: float | None = None,
        seed: int = 0,
        stop_token_ids: Sequence[int] = (),
        **sampling: Any,
    ) -> BatchedDataDict:
        """Completes prompts under the weights being trained, with transformers' loop.

        Args:
            batch: `input_ids [B, T]` padded on the right, `input_lengths [B]`, optionally `seeds
                [B]`.
            greedy: Whether to always take the most likely token.
            max_new_tokens: Maximum number of tokens in a completion.
            temperature: Sampling temperature; by default that of the setup.
            seed: Sampling seed, if rows have none.
            stop_token_ids: Tokens that end a completion, in addition to the model's stop tokens.
            **sampling: Other fields of `SamplingConfig`, such as `top_p`.
        """
        self._memory.restore("weights")
        model = self._with_lm_head().model
        if self._mesh is not None:
            raise ConfigError(
                "transformers' generation loop needs one rank with all weights",
                expected="one rank without cpu_offload",
                got=f"{world_size()} ranks",
                fix="generate with vLLM (generation.backend: vllm), or train on one rank",
            )
        folder = self._setup.model_folder
        config = SamplingConfig(
            max_new_tokens=max_new_tokens,
            temperature=self._setup.temperature if temperature is None else temperature,
            **sampling,
        )
        seeded = BatchedDataDict({"seeds": row_seeds(seed, batch.size), **batch})
        longest = batch["input_ids"].shape[1] + max_new_tokens
        requests = read_requests(seeded, config, max_model_len=longest)
        tokenizer = load_tokenizer(folder)
        stops = {*model_stop_token_ids(folder, tokenizer), *stop_token_ids}
        if self._max_batch_tokens is None:
            self._max_batch_tokens = longest_batch(model)
        return complete(
            model,
            requests,
            config,
            greedy=greedy,
            stop_token_ids=sorted(stops),
            tokenizer=tokenizer,
            max_batch_tokens=self._max_batch_tokens,
        )

    def _with_lm_head(self) -> LogprobModel:
        if not isinstance(self._policy, LogprobModel):
            raise _wrong_head("logprobs", expected="lm", got="scalar")
        return self._policy

    def train_step(self, batch: BatchedDataDict, loss_fn: LossFunction) -> dict[str, float]:
        """Runs one optimizer step, as `TrainingBackend` describes."""
        metrics, _ = self.forward_backward(batch, loss_fn, returns_outputs=False)
        return {**metrics, **self.optimizer_step()}

    @step_time()
    def forward_backward(
        self, batch: BatchedDataDict, loss_fn: LossFunction, *, returns_outputs: bool = True
    ) -> tuple[dict[str, float], torch.Tensor | None]:
        """Computes the gradients of a step, which replace earlier ones; weights do not change.

        Returns:
            The loss's metrics and `num_valid_tokens`; and with `returns_outputs`, `[B, T-1]`
            logprobs where `token_mask` is set, or `[B, T]` values with a scalar head.
        """
        self._memory.restore("weights")
        mask = batch["token_mask"] * batch["sample_mask"][:, None]
        sums = mask.sum(), num_trained_sequences(batch), batch["sample_mask"].sum()
        counts = torch.stack([each.float() for each in sums])
        counts = counts if self._mesh is None else self._mesh.data_sum(counts)
        global_valid_tokens, global_valid_seqs, num_rows = counts.unbind()
        totals: dict[str, torch.Tensor] = {}
        all_outputs: torch.Tensor | None = None
        if returns_outputs:
            is_scalar = self._setup.head == "scalar"
            all_outputs = torch.zeros(batch["input_ids"].shape if is_scalar else mask.shape)
        self._optimizer.zero_grad(set_to_none=True)  # left by an interrupted step
        if self._mesh is not None:
            drop_gradients(self._policy.model)
        for part in self._parts(self._policy, batch):
            if self._mesh is not None:
                sync_gradients(self._policy.model, self._training, is_last=part.is_last)
            outputs, part_of_loss = self._policy.loss_inputs(part.batch, part.packed)
            if part.is_filler:
                torch.autograd.backward(outputs.sum() * 0)
                continue
            loss, metrics = loss_fn(
                outputs,
                part_of_loss,
                global_valid_seqs=global_valid_seqs,
                global_valid_tokens=global_valid_tokens,
            )
            if coefficient := self._training.router_aux_loss_coef:
                router_loss = self._policy.router_loss(part.batch, part.packed)
                router_loss = router_loss / num_rows.clamp(min=1)
                loss = loss + coefficient * router_loss
                metrics = {**metrics, "router_aux_loss": router_loss.detach()}
            torch.autograd.backward(loss)
            if all_outputs is not None:
                all_outputs[part.plan.indices, : outputs.shape[1]] = outputs.detach().cpu()
            for name, value in metrics.items():
                totals[name] = totals[name] + value if name in totals else value
        if self._mesh is not None:
            drop_unused_gradients(self._policy.model)
        summed = numbers_of(totals)
        return {
            **(summed if self._mesh is None else self._mesh.sum_metrics(summed)),
            "num_valid_tokens": global_valid_tokens.item(),
        }, all_outputs

    def optimizer_step(self) -> dict[str, float]:
        """Updates the weights; returns `grad_norm` and `learning_rate`."""
        self._memory.restore("optimizer")
        options, step = self._setup.optimizer, self._num_updates + 1
        norm = clip_gradients(self._policy.model.parameters(), options.max_grad_norm, step=step)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate_at(step, options)
        self._optimizer.step()
        if self._training.float8 != "none":
            refresh_scales(self._policy.model)
        self._num_updates = step
        # Frees the gradients' memory for an engine on the same GPU.
        self._optimizer.zero_grad(set_to_none=True)
        return {"grad_norm": norm, "learning_rate": self._optimizer.param_groups[0]["lr"]}

    def get_logprobs(self, batch: BatchedDataDict) -> torch.Tensor:
        """Returns `[B, T-1]` logprobs under the weights being trained."""
        return self._all_logprobs(self._with_lm_head(), batch)

    def get_reference_logprobs(self, batch: BatchedDataDict) -> torch.Tensor:
        """Returns `[B, T-1]` logprobs under the reference policy, loaded on first use."""
        with self._reference_model() as reference:
            return self._all_logprobs(reference, batch)

    def get_reference_topk_logprobs(
        self, batch: BatchedDataDict, k: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the k most likely next tokens of the reference, whose architecture may differ.

        Returns:
            `[B, T-1, k]` int64 ids, most likely first, and `[B, T-1, k]` logprobs in nats at the
            temperature; both 0 where `token_mask` is not set.
        """
        trained = self._with_lm_head()
        with self._reference_model() as reference:
            # Rows that only one head has are not tokens; the student could not learn them.
            num_ids = min(self._vocabulary_size, trained.num_logits, reference.num_logits)
            refuse_k(k, num_ids)
            shape = (*batch["token_mask"].shape, k)
            ids, logprobs = torch.zeros(shape, dtype=torch.long), torch.zeros(shape)
            self._compute(
                reference,
                batch,
                lambda part, packed: reference.topk_logprobs(part, packed, k=k, num_ids=num_ids),
                into=(ids, logprobs),
            )
            return ids, logprobs

    def get_values(self, batch: BatchedDataDict) -> torch.Tensor:
        """Returns `[B, T]` values under the weights being trained; only reads ids and lengths."""
        model = self._policy
        if not isinstance(model, ScoreModel):
            raise _wrong_head("values", expected="scalar", got="lm")
        values = torch.zeros(batch["input_ids"].shape)
        self._compute(model, batch, lambda *part: (model.values(*part),), into=(values,))
        return values

    def _all_logprobs(self, model: LogprobModel, batch: BatchedDataDict) -> torch.Tensor:
        logprobs = torch.zeros(batch["token_mask"].shape)
        self._compute(model, batch, lambda *part: (model.logprobs(*part),), into=(logprobs,))
        return logprobs

    @torch.no_grad()
    def _compute(
        self,
        model: PackedModel,
        batch: BatchedDataDict,
        compute: Callable[[BatchedDataDict, PackedTokens], tuple[torch.Tensor, ...]],
        *,
        into: Sequence[torch.Tensor],
    ) -> None:
        """Writes the results of each micro-batch into the rows of tensors `[B, ...]` on the CPU."""
        self._memory.restore("reference" if model is self._reference else "weights")
        for part in self._parts(model, batch):
            computed = compute(part.batch, part.packed)
            if not part.is_filler:
                for target, values in zip(into, to_host(computed), strict=True):
                    target[part.plan.indices, : values.shape[1]] = values
        if self._mesh is not None:
            release(model.model)

    @contextmanager
    def _reference_model(self) -> Iterator[LogprobModel]:
        folder = self._setup.reference_folder
        if folder is None:
            raise ValueError("logprobs of the reference require TrainingSetup.reference_folder")
        if not self._vocabulary_size:
            self._vocabulary_size = shared_vocabulary_size(self._setup.model_folder, folder)
        if self._adapters and self._adapters.has_same_base(folder):
            with self._adapters.off():
                yield self._with_lm_head()
            return
        if self._reference is None:
            self._reference = self._builder.reference(folder)
        yield self._reference
        if "reference" in PARTS[self._training.offload_for_generation]:
            self._memory.offload(["reference"])  # training needs the memory as well

    def _parts(self, model: PackedModel, batch: BatchedDataDict) -> Iterator[MicrobatchPart]:
        return self._microbatches.split(
            batch,
            share_rows=model.shares_rows,
            device=self._device,
            sharing=model.sharing,
            independent_length=model.independent_length,
            packed=model.packed,
        )

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields full weights under transformers' names, adapters merged, tied weights once.

        Each weight is a collective, so every rank must iterate to the end.
        """
        weights = self._full_weights()
        merged = self._adapters.merged(weights) if self._adapters else weights
        return as_published(self._policy.model, merged)

    def weights_to_send(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields `named_weights` in the engines' dtype, in which ranks gather them.

        Adapters are merged in the dtype that they are trained in, and rounded afterwards. Weights
        that transformers keeps in float32 are not rounded.
        """
        model = self._policy.model
        if not self._adapters:
            yield from as_published(model, self._full_weights(self.sent_dtype))
            return
        for name, weight in self.named_weights():
            yield name, weight if keeps_float32(model, name) else weight.to(self.sent_dtype)

    def _full_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        self._memory.restore("weights")
        model = self._policy.model
        if getattr(model, "is_quantized", False):
            yield from dequantized_weights(model)
            return
        seen: set[int] = set()
        for name, tensor in model.state_dict(keep_vars=True).items():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                kept = tensor.dtype if dtype is None or keeps_float32(model, name) else dtype
                if isinstance(tensor, DTensor):
                    yield name, full_tensor(tensor, kept)
                else:
                    yield name, tensor.detach().to(kept)

    def save_checkpoint(self, path: Path) -> None:
        """Writes `model/` (transformers layout) and `trainer/` (optimizer, random state)."""
        self.start_checkpoint(path)
        self.finish_checkpoint()

    def start_checkpoint(self, path: Path) -> None:
        """Saves like `save_checkpoint`, but writes the trainer's state while training continues.

        Rank 0 writes `model/` first, one gathered tensor at a time.
        """
        self._memory.restore("weights", "optimizer")
        source = self._setup.model_folder
        self._policy.save(path / "model", source, load_tokenizer(source), self.named_weights())
        if self._adapters:
            (path / "trainer").mkdir(exist_ok=True)
            self._adapters.save(path / "trainer")
        self._start_saving(path, model={})

    def start_sharded_checkpoint(self, path: Path) -> None:
        """Saves like `start_checkpoint`, but with sharded weights instead of `model/`."""
        self._memory.restore("weights", "optimizer")
        self._start_saving(path, model={} if self._adapters else self._model_state())

    def _start_saving(self, path: Path, *, model: Mapping[str, torch.Tensor]) -> None:
        trainer = path / "trainer"
        trainer.mkdir(exist_ok=True)
        if self._adapters:
            self._adapters.save_base(trainer)
        self._trainer_state.start_saving(
            trainer,
            num_updates=self._num_updates,
            model=model,
            other_files=written_by_rank_0(path),
        )

    def _model_state(self) -> dict[str, torch.Tensor]:
        return {name: unwrapped(tensor) for name, tensor in distinct(self._policy.model)}

    def checkpoint_is_written(self) -> bool:
        """Returns True if `finish_checkpoint` would not wait."""
        return self._trainer_state.is_saved()

    def finish_checkpoint(self) -> dict[str, WrittenFile]:
        """Waits until the folder is complete; returns this rank's files, hashed."""
        written = self._trainer_state.finish_saving()
        return {posixpath.normpath(f"trainer/{name}"): file for name, file in written.items()}

    def load_checkpoint(self, path: Path) -> None:
        """Restores any checkpoint of the methods above, bit-identically."""
        self._memory.restore("weights", "optimizer")
        shards: Mapping[str, torch.Tensor] = {}
        if self._adapters is not None:
            if not self._adapters.has_same_base(base := path / "trainer" / "base"):
                self._adapters.replace_base(base)
        elif (weights := path / "model").is_dir():
            # A checkpoint has all weights, including the head.
            missing = fill_from_folder(self._policy.model, weights)
            refuse_wrong_weights(name_in_errors(weights), missing=missing)
        else:
            shards = self._model_state()
        self._num_updates = self._trainer_state.load(path / "trainer", model=shards)
        refresh_scales(self._policy.model)

    def release_memory(self, *, keeps_weights: bool = False) -> None:
        """Drops gradients and gathered weights, and moves offloaded parts to the host.

        Each part moves back with the next call that needs it.
        """
        self._optimizer.zero_grad(set_to_none=True)
        if self._mesh is not None:
            for model in filter(None, (self._policy, self._reference)):
                release(model.model)
        leaving = PARTS[self._training.offload_for_generation]
        self._memory.offload(part for part in leaving if not (keeps_weights and part == "weights"))
        super().release_memory()

    def peak_memory_gib(self) -> float:
        """Returns the peak memory of this process."""
        return peak_memory_gib()

    def shutdown(self) -> None:
        """Frees the models and the optimizer once pending saves are written."""
        self._finish_pending_save()
        self.__dict__.clear()


def _wrong_head(what: str, *, expected: str, got: str) -> ConfigError:
    return ConfigError(
        f"this model has no {what}",
        expected=f"a backend set up with head={expected!r}",
        got=f"head={got!r}",
        fix=f"set TrainingSetup.head to {expected!r}, or use another model",
    )
