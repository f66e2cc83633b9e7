"""The training worker for transformers models."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from nemo_rl_core.backends.training.base import TrainingSetup
from nemo_rl_core.backends.training.dtensor.model import LogprobModel, load_model
from nemo_rl_core.data.packing import Microbatch, plan_microbatches
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.distributed.weight_sync import WeightBucket, combined_digest, make_buckets
from nemo_rl_core.errors import ConsistencyError
from nemo_rl_core.functional.protocols import LossFunction
from nemo_rl_core.infra.checkpointing import (
    load_tensors,
    optimizer_tensors,
    restore_optimizer,
    save_tensors,
)
from nemo_rl_core.infra.timer import peak_memory_gib


class DTensorBackend:
    """One rank that trains a transformers model with AdamW (a `TrainingBackend`)."""

    def setup(self, setup: TrainingSetup) -> None:
        """Loads the model, checks that its packed logprobs are right, and makes an optimizer."""
        torch.manual_seed(setup.seed)
        torch.use_deterministic_algorithms(True)
        self._setup = setup
        self._num_updates = 0
        self._policy = self._load(setup.model_folder)
        self._policy.refuse_unless_faithful()
        self._reference: LogprobModel | None = None
        self._plans: dict[tuple[int, ...], list[Microbatch]] = {}
        options = setup.optimizer
        self._optimizer = torch.optim.AdamW(
            self._policy.model.parameters(),
            lr=options.learning_rate,
            betas=(options.adam_beta1, options.adam_beta2),
            eps=options.adam_epsilon,
            weight_decay=options.weight_decay,
            fused=True,
        )

    def _load(self, folder: Path) -> LogprobModel:
        return LogprobModel(
            load_model(folder), temperature=self._setup.temperature, dtype=self._setup.dtype
        )

    def train_step(self, batch: BatchedDataDict, loss_fn: LossFunction) -> dict[str, float]:
        """One optimizer step over the whole batch, split into micro-batches.

        Args:
            batch: `input_ids [B, T]`, `input_lengths [B]`, `token_mask [B, T-1]`,
                `sample_mask [B]`, and whatever the loss reads.
            loss_fn: The loss; its values over micro-batches sum to that of the step.

        Returns:
            The loss's metrics, and `grad_norm`, `learning_rate`, `num_valid_tokens`.

        Raises:
            ConsistencyError: If the gradient is not finite; the weights stay as they were.
        """
        mask = batch["token_mask"] * batch["sample_mask"][:, None]
        global_valid_tokens = mask.sum().float()
        global_valid_seqs = batch["sample_mask"].sum().float()
        totals: dict[str, torch.Tensor] = {}
        self._optimizer.zero_grad(set_to_none=True)
        for part, microbatch in self._microbatches(batch):
            loss, metrics = loss_fn(
                self._logprobs_of(self._policy, part, microbatch),
                part,
                global_valid_seqs=global_valid_seqs,
                global_valid_tokens=global_valid_tokens,
            )
            torch.autograd.backward(loss)
            for name, value in metrics.items():
                totals[name] = totals[name] + value if name in totals else value
        norm = self._update()
        return {
            **{name: value.item() for name, value in totals.items()},
            "grad_norm": norm,
            "learning_rate": self._optimizer.param_groups[0]["lr"],
            "num_valid_tokens": global_valid_tokens.item(),
        }

    def _update(self) -> float:
        options = self._setup.optimizer
        norm = torch.nn.utils.clip_grad_norm_(
            self._policy.model.parameters(), options.max_grad_norm
        ).item()
        if not norm < float("inf"):
            raise ConsistencyError(
                f"the gradient of optimizer step {self._num_updates + 1} is not finite",
                expected="a finite norm",
                got=str(norm),
                fix="lower learning_rate, or look at the completions of this step for a reward or "
                "logprob that is not finite",
            )
        self._num_updates += 1
        warmup = min(1.0, self._num_updates / max(options.num_warmup_steps, 1))
        for group in self._optimizer.param_groups:
            group["lr"] = options.learning_rate * warmup
        self._optimizer.step()
        return float(norm)

    def get_logprobs(self, batch: BatchedDataDict) -> torch.Tensor:
        """`[B, T-1]` logprobs under the weights being trained."""
        return self._all_logprobs(self._policy, batch)

    def get_reference_logprobs(self, batch: BatchedDataDict) -> torch.Tensor:
        """`[B, T-1]` logprobs under the reference policy, loaded when first asked for."""
        if self._reference is None:
            if self._setup.reference_folder is None:
                raise ValueError("get_reference_logprobs needs a setup with a reference_folder")
            self._reference = self._load(self._setup.reference_folder)
        return self._all_logprobs(self._reference, batch)

    @torch.no_grad()
    def _all_logprobs(self, model: LogprobModel, batch: BatchedDataDict) -> torch.Tensor:
        result = torch.zeros(batch["token_mask"].shape)
        for part, microbatch in self._microbatches(batch):
            values = self._logprobs_of(model, part, microbatch)
            result[microbatch.indices, : values.shape[1]] = values.cpu()
        return result

    def _logprobs_of(
        self, model: LogprobModel, part: BatchedDataDict, microbatch: Microbatch
    ) -> torch.Tensor:
        return model.logprobs(
            part["input_ids"], part["input_lengths"], part["token_mask"].bool(), microbatch
        )

    def _microbatches(self, batch: BatchedDataDict) -> Iterator[tuple[BatchedDataDict, Microbatch]]:
        lengths = tuple(batch["input_lengths"].tolist())
        if lengths not in self._plans:
            # A step asks three times with the same lengths: old logprobs, reference, training.
            budget = self._setup.max_tokens_per_microbatch
            self._plans = {lengths: plan_microbatches(lengths, max_tokens=budget)}
        for microbatch in self._plans[lengths]:
            part = batch.select_indices(microbatch.indices).to(self._policy.model.device)
            width = int(part["input_lengths"].max())
            yield _cropped(part, width), microbatch

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights as the transformers checkpoint names them, tied ones once."""
        seen: set[int] = set()
        for name, tensor in self._policy.model.state_dict(keep_vars=True).items():
            if tensor.data_ptr() not in seen:
                seen.add(tensor.data_ptr())
                yield name, tensor.detach()

    def weight_buckets(self) -> tuple[list[WeightBucket], str]:
        """The weights in the type the engine computes with, and the digest of all of them."""
        dtype = getattr(torch, self._setup.dtype)
        buckets = list(make_buckets((name, w.to(dtype)) for name, w in self.named_weights()))
        return buckets, combined_digest(bucket.digest for bucket in buckets)

    def save_checkpoint(self, path: Path) -> None:
        """Writes `model/` (transformers layout) and `trainer/` (optimizer, random state)."""
        from transformers import AutoTokenizer

        self._policy.model.save_pretrained(path / "model")
        AutoTokenizer.from_pretrained(self._setup.model_folder).save_pretrained(path / "model")
        trainer = path / "trainer"
        trainer.mkdir()
        tensors = optimizer_tensors(self._optimizer, dict(self._policy.model.named_parameters()))
        save_tensors(trainer / "optimizer.safetensors", tensors)
        save_tensors(trainer / "random.safetensors", {"cpu": torch.get_rng_state()})
        (trainer / "state.json").write_text(json.dumps({"num_updates": self._num_updates}))

    def load_checkpoint(self, path: Path) -> None:
        """Goes on from what `save_checkpoint` wrote, to the bit."""
        weights = load_model(path / "model").state_dict()
        self._policy.model.load_state_dict(weights)
        trainer = path / "trainer"
        tensors = load_tensors(trainer / "optimizer.safetensors")
        restore_optimizer(self._optimizer, dict(self._policy.model.named_parameters()), tensors)
        torch.set_rng_state(load_tensors(trainer / "random.safetensors")["cpu"])
        self._num_updates = json.loads((trainer / "state.json").read_text())["num_updates"]

    def peak_memory_gib(self) -> float:
        """The most memory this process has held."""
        return peak_memory_gib()

    def shutdown(self) -> None:
        """Frees the models and the optimizer."""
        self.__dict__.clear()


def _cropped(part: BatchedDataDict, width: int) -> BatchedDataDict:
    """The batch without columns of padding that none of its sequences reaches."""
    widths = {"input_ids": width}

    def crop(name: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dim() == 2:
            return value[:, : widths.get(name, width - 1)]
        return value

    return BatchedDataDict({name: crop(name, value) for name, value in part.items()})
