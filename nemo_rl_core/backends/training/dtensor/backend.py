"""Training backend for transformers models."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from nemo_rl_core.backends.training.base import (
    TrainingSetup,
    allowed_sharing,
    warn_of_balancing_loss,
)
from nemo_rl_core.backends.training.determinism import compute_deterministically, full_precision
from nemo_rl_core.backends.training.dtensor.attention import PackedAttention, packed_attention
from nemo_rl_core.backends.training.dtensor.checkpoint import TrainerState
from nemo_rl_core.backends.training.dtensor.float8 import in_high_precision, refresh_scales
from nemo_rl_core.backends.training.dtensor.generation import DTensorGeneration, wrong_head
from nemo_rl_core.backends.training.dtensor.loading import (
    as_published,
    called,
    empty_model,
    finish_loading,
    load_model,
    shared_vocabulary_size,
)
from nemo_rl_core.backends.training.dtensor.lora import Adapters
from nemo_rl_core.backends.training.dtensor.mesh import join_mesh
from nemo_rl_core.backends.training.dtensor.microbatches import Microbatches, MicrobatchPart
from nemo_rl_core.backends.training.dtensor.model import LogprobModel, ScoreModel
from nemo_rl_core.backends.training.dtensor.packed import PackedModel
from nemo_rl_core.backends.training.dtensor.packed_tokens import PackedTokens
from nemo_rl_core.backends.training.dtensor.parallelize import (
    drop_gradients,
    drop_unused_gradients,
    parallelize,
    release,
    sync_gradients,
    whole_tensor,
)
from nemo_rl_core.backends.training.dtensor.quantized import Precision, dequantized_weights
from nemo_rl_core.backends.training.dtensor.router_loss import refuse_router_loss
from nemo_rl_core.backends.training.dtensor.saving import DTensorSaving
from nemo_rl_core.backends.training.dtensor.shards import fill_from_folder
from nemo_rl_core.backends.training.dtensor.tensor_parallel import (
    check_tensor_parallel,
    refused_forward,
)
from nemo_rl_core.backends.training.flash_attention import attention_choices
from nemo_rl_core.backends.training.garbage import freeze_libraries
from nemo_rl_core.backends.training.offload import PARTS, OffloadedState, optimizer_tensors
from nemo_rl_core.backends.training.optimizers import (
    build_optimizer,
    clip_gradients,
    learning_rate_at,
)
from nemo_rl_core.checkpoints.weights import keeps_float32
from nemo_rl_core.config.training import DTensorTraining, Head
from nemo_rl_core.data.pretrained import described
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.distributed.host_copy import numbers_of, to_host
from nemo_rl_core.distributed.packing.prefixes import PrefixSharing
from nemo_rl_core.distributed.process_group import local_device
from nemo_rl_core.distributed.step_times import step_time
from nemo_rl_core.distributed.weight_sync import SendsWeights
from nemo_rl_core.errors import ConfigError, ModelError
from nemo_rl_core.functional.protocols import LossFunction
from nemo_rl_core.planning.model_parts import refuse_untrainable
from nemo_rl_core.telemetry.timer import peak_memory_gib


class DTensorBackend(DTensorGeneration, DTensorSaving, SendsWeights):
    """One rank, of one or more, that trains a transformers model (a `TrainingBackend`).

    The ranks come from environment variables, their axes from `TrainingSetup.training`.
    """

    def setup(self, setup: TrainingSetup) -> None:
        """Loads the model, checks its results on packed rows, and creates the optimizer."""
        self._finish_earlier()
        freeze_libraries()
        torch.manual_seed(setup.seed)
        assert isinstance(setup.training, DTensorTraining)
        wanted = setup.training.deterministic
        self._is_deterministic = compute_deterministically(wanted, device=local_device())
        torch.set_float32_matmul_precision(setup.training.float32_matmul_precision)
        self._setup, self._training = setup, setup.training
        self.sent_dtype = getattr(torch, setup.dtype)
        self._mesh = join_mesh(self._training)
        self._num_updates = 0
        self._policy: PackedModel
        model = self._trainable()
        if self._training.router_aux_loss_coef:
            refuse_router_loss(model, has_adapters=self._training.lora is not None)
        else:
            warn_of_balancing_loss(model.config)
        self._policy = (
            ScoreModel(
                model,
                dtype=setup.dtype,
                mesh=self._mesh,
                attention=(attention := self._attention_of(model)),
                sharing=self._sharing_of(setup.model_folder, attention),
            )
            if setup.head == "scalar"
            else self._language_model(model, setup.model_folder)
        )
        self._check(self._policy)
        self._policy.keeps_router_logits = self._training.router_aux_loss_coef > 0
        self._reference: LogprobModel | None = None
        self._pads: bool | None = None  # known after the first generation
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

    def _finish_earlier(self) -> None:
        """Waits for a save of an earlier set-up, which uses the same process group."""
        if "_trainer_state" in self.__dict__:
            self.finish_checkpoint()

    def _trainable(self) -> Any:
        training, folder = self._training, self._setup.model_folder
        model = self._load_unsharded(folder, self._setup.head, weights=training.weights)
        lora = training.lora
        torch.manual_seed(self._setup.seed)  # transformers draws numbers while it loads Nemotron-H
        self._adapters = Adapters(model, lora, base_folder=folder) if lora else None
        return self._shard(model, folder)

    def _load_unsharded(self, folder: Path, head: Head, *, weights: Precision = "full") -> Any:
        """The model with its weights, or without them if each rank reads a shard later."""
        refuse_untrainable(described(folder), called=called(folder))
        check_tensor_parallel(folder, self._training)
        if self._mesh is None or weights != "full":
            return load_model(folder, head, weights=weights)
        return empty_model(folder, head)

    def _shard(self, model: Any, folder: Path) -> Any:
        is_empty = any(parameter.is_meta for parameter in model.parameters())
        model = parallelize(model, self._training, self._mesh, dtype=self._setup.dtype)
        if is_empty:
            model = finish_loading(model, fill_from_folder(model, folder), folder)
        refresh_scales(model)
        return model

    def _language_model(self, model: Any, folder: Path) -> LogprobModel:
        attention = self._attention_of(model)
        return LogprobModel(
            model,
            temperature=self._setup.temperature,
            dtype=self._setup.dtype,
            mesh=self._mesh,
            attention=attention,
            sharing=self._sharing_of(folder, attention),
        )

    def _sharing_of(self, folder: Path, attention: PackedAttention | None) -> PrefixSharing | None:
        takes_trees = attention is None or attention.takes_trees
        is_shared = self._training.share_prefixes and takes_trees
        return allowed_sharing(folder) if is_shared else None

    def prefix_sharing(self) -> PrefixSharing | None:
        """How the trained model shares prefixes, so that a plan for several ranks does as well."""
        return self._policy.sharing

    def choices(self) -> dict[str, str]:
        """What a setting that may be `auto` is on this machine, by its path in the recipe."""
        attention = self._policy.attention
        return {
            **attention_choices(attention.kernel if attention else "sdpa"),
            "training.deterministic": str(self._is_deterministic).lower(),
        }

    def _attention_of(self, model: Any) -> PackedAttention | None:
        return packed_attention(
            model, self._training, dtype=self._setup.dtype, device=local_device()
        )

    def _check(self, model: PackedModel) -> None:
        name, training = type(model.model).__name__.removeprefix("FSDP"), self._training
        with full_precision(), in_high_precision(model.model):
            try:
                model.choose_layout()
            except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
                raise self._refused(name, error) from error
            except RuntimeError as error:
                # Shapes that do not fit; subclasses are errors of memory and communication.
                is_split = training.tensor_parallel_size * training.context_parallel_size > 1
                if not is_split or type(error) is not RuntimeError:
                    raise
                raise self._refused(name, error) from error
        release(model.model)

    def _refused(self, name: str, error: Exception) -> Exception:
        if self._training.tensor_parallel_size > 1:
            return refused_forward(name, error)
        fix = "choose another model"
        if self._training.context_parallel_size > 1:
            fix = "set context_parallel_size to 1"
        elif self._training.lora is not None:
            fix = "leave routers out of lora.target_modules, or choose another model"
        return ModelError(
            f"{name} does not compute on a batch of token ids",
            expected="a causal model of text, whose forward pass takes only input_ids",
            got=f"{type(error).__name__}: {error}",
            fix=fix,
        )

    def train_step(self, batch: BatchedDataDict, loss_fn: LossFunction) -> dict[str, float]:
        """One optimizer step over the whole batch, split into micro-batches.

        Args:
            batch: `input_ids [B, T]`, `input_lengths [B]`, `token_mask [B, T-1]`,
                `sample_mask [B]`, and the columns that the loss reads. Rows of equal `pair_ids [B]`
                stay in one micro-batch. With `topk_ids [B, T-1, K]` the loss also gets
                `current_topk_logprobs [B, T-1, K]`.
            loss_fn: The loss; its sum over micro-batches is the loss of the step. Its first
                argument is `[B, T-1]` logprobs, or `[B, T]` values with a scalar head.

        Returns:
            The loss's metrics, and `grad_norm`, `learning_rate`, `num_valid_tokens`.

        Raises:
            ConsistencyError: If the gradient is not finite; the weights are unchanged.
        """
        metrics, _ = self.forward_backward(batch, loss_fn, returns_outputs=False)
        return {**metrics, **self.optimizer_step()}

    @step_time()
    def forward_backward(
        self, batch: BatchedDataDict, loss_fn: LossFunction, *, returns_outputs: bool = True
    ) -> tuple[dict[str, float], torch.Tensor | None]:
        """The gradients of a step, in place of those of an earlier call; weights stay as they are.

        Returns:
            The loss's metrics and `num_valid_tokens`; and, if they are wanted, `[B, T-1]` logprobs
            where `token_mask` is set, or `[B, T]` values with a scalar head.
        """
        self._memory.restore("weights")
        mask = batch["token_mask"] * batch["sample_mask"][:, None]
        counts = torch.stack([mask.sum().float(), batch["sample_mask"].sum().float()])
        counts = counts if self._mesh is None else self._mesh.data_sum(counts)
        global_valid_tokens, global_valid_seqs = counts.unbind()
        totals: dict[str, torch.Tensor] = {}
        found: torch.Tensor | None = None
        if returns_outputs:
            of_each = batch["input_ids"] if self._setup.head == "scalar" else mask
            found = torch.zeros(of_each.shape)
        self._optimizer.zero_grad(set_to_none=True)  # of a step that was broken off
        drop_gradients(self._policy.model)
        for part in self._parts(self._policy, batch):
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
                router_loss = router_loss / global_valid_seqs.clamp(min=1)
                loss = loss + coefficient * router_loss
                metrics = {**metrics, "router_aux_loss": router_loss.detach()}
            torch.autograd.backward(loss)
            if found is not None:
                found[part.plan.indices, : outputs.shape[1]] = outputs.detach().cpu()
            for name, value in metrics.items():
                totals[name] = totals[name] + value if name in totals else value
        drop_unused_gradients(self._policy.model)
        summed = numbers_of(totals)
        return {
            **(summed if self._mesh is None else self._mesh.sum_metrics(summed)),
            "num_valid_tokens": global_valid_tokens.item(),
        }, found

    def optimizer_step(self) -> dict[str, float]:
        """Updates the weights; returns `grad_norm` and `learning_rate`.

        Raises:
            ConsistencyError: If the gradient is not finite; the weights are unchanged.
        """
        self._memory.restore("optimizer")
        options, step = self._setup.optimizer, self._num_updates + 1
        norm = clip_gradients(self._policy.model.parameters(), options.max_grad_norm, step=step)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate_at(step, options)
        self._optimizer.step()
        refresh_scales(self._policy.model)
        self._num_updates = step
        # An engine on the same GPU is to have their memory.
        self._optimizer.zero_grad(set_to_none=True)
        return {"grad_norm": norm, "learning_rate": self._optimizer.param_groups[0]["lr"]}

    def get_logprobs(self, batch: BatchedDataDict) -> torch.Tensor:
        """`[B, T-1]` logprobs under the weights being trained."""
        return self._all_logprobs(self._with_lm_head(), batch)

    def get_reference_logprobs(self, batch: BatchedDataDict) -> torch.Tensor:
        """`[B, T-1]` logprobs under the reference policy, loaded on first use."""
        with self._reference_model() as reference:
            return self._all_logprobs(reference, batch)

    def get_reference_topk_logprobs(
        self, batch: BatchedDataDict, k: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The k most likely next tokens of the reference, which may have another architecture.

        Returns:
            `[B, T-1, k]` int64 ids, most likely first, and `[B, T-1, k]` logprobs in nats under the
            temperature; both 0 where `token_mask` is not set.

        Raises:
            ModelError: If the reference has another vocabulary.
            ConfigError: If there are fewer than k tokens.
        """
        trained = self._with_lm_head()
        with self._reference_model() as reference:
            # Rows that only one head has are no tokens; the student could not learn them.
            num_ids = min(self._vocabulary_size, trained.num_logits, reference.num_logits)
            if not 1 <= k <= num_ids:
                raise ConfigError(
                    f"the {k} most likely tokens cannot be chosen",
                    expected=f"k from 1 to the vocabulary's {num_ids} tokens",
                    got=str(k),
                    fix="change k",
                )
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
        """`[B, T]` values under the weights being trained; reads only ids and lengths."""
        model = self._policy
        if not isinstance(model, ScoreModel):
            raise wrong_head("values", expected="scalar", got="lm")
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
                for whole, values in zip(into, to_host(computed), strict=True):
                    whole[part.plan.indices, : values.shape[1]] = values
        release(model.model)

    @contextmanager
    def _reference_model(self) -> Iterator[LogprobModel]:
        """The reference, loaded on first use, or the base model under adapters."""
        folder = self._setup.reference_folder
        if folder is None:
            raise ValueError("logprobs of the reference need a setup with a reference_folder")
        self._vocabulary_size = shared_vocabulary_size(self._setup.model_folder, folder)
        if self._adapters and self._adapters.base_is(folder):
            with self._adapters.off():
                yield self._with_lm_head()
            return
        if self._reference is None:
            model = self._shard(self._load_unsharded(folder, "lm"), folder)
            self._reference = self._language_model(model, folder)
            self._check(self._reference)
        yield self._reference
        if "reference" in PARTS[self._training.offload_for_generation]:
            self._memory.offload(["reference"])  # training needs the memory as well

    def _parts(self, model: PackedModel, batch: BatchedDataDict) -> Iterator[MicrobatchPart]:
        return self._microbatches.of(
            batch,
            share_rows=model.shares_rows,
            device=local_device(),
            sharing=model.sharing,
            independent_length=model.independent_length,
            packed=model.packed,
        )

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields whole weights under transformers' names, adapters merged, tied weights once.

        A collective, one weight at a time: every rank must iterate to the end.
        """
        weights = self._own_weights()
        merged = self._adapters.merged(weights) if self._adapters else weights
        return as_published(self._policy.model, merged)

    def weights_to_send(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields `named_weights` in the type of engines, in which ranks gather them.

        Adapters are merged in the type that they are trained in, and rounded afterwards. What
        transformers keeps in float32 is not rounded.
        """
        model = self._policy.model
        if not self._adapters:
            yield from as_published(model, self._own_weights(self.sent_dtype))
            return
        for name, weight in self.named_weights():
            yield name, weight if keeps_float32(model, name) else weight.to(self.sent_dtype)

    def _own_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        self._memory.restore("weights")
        model = self._policy.model
        if getattr(model, "is_quantized", False):
            yield from dequantized_weights(model)
            return
        seen: set[int] = set()
        for name, tensor in model.state_dict(keep_vars=True).items():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield name, whole_tensor(tensor, None if keeps_float32(model, name) else dtype)

    def release_memory(self, *, keeps_weights: bool = False) -> None:
        """Drops gradients and gathered weights, and moves what the recipe names to the host.

        Each part comes back with the next call that needs it.

        Args:
            keeps_weights: Whether the weights stay, for a transfer.
        """
        self._optimizer.zero_grad(set_to_none=True)
        for model in filter(None, (self._policy, self._reference)):
            release(model.model)
        leaving = PARTS[self._training.offload_for_generation]
        self._memory.offload(part for part in leaving if not (keeps_weights and part == "weights"))
        super().release_memory()

    def peak_memory_gib(self) -> float:
        """Returns the peak memory of this process."""
        return peak_memory_gib()

    def shutdown(self) -> None:
        """Frees the models and the optimizer after pending saves are written."""
        self._finish_earlier()
        self.__dict__.clear()
