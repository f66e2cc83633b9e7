"""A policy whose training backend runs in Ray workers."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nemo_rl_core.backends.training.base import TrainingSetup, get_training_backend
from nemo_rl_core.checkpoints.written_files import WrittenFile
from nemo_rl_core.config.registered import user_search_path
from nemo_rl_core.data.pretrained import shares_rows
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.distributed.named_sharding import (
    CONTEXT,
    DATA,
    PIPELINE,
    TENSOR,
    training_sharding,
)
from nemo_rl_core.distributed.packing.deal import DealtRows, deal_rows
from nemo_rl_core.distributed.packing.prefixes import PrefixSharing
from nemo_rl_core.distributed.packing.ranks import Shards, shard_for_training
from nemo_rl_core.distributed.process_group import rank
from nemo_rl_core.distributed.session import ClusterSession, memory_environment
from nemo_rl_core.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl_core.functional.protocols import LossFunction
from nemo_rl_core.models.columns import training_columns, with_lengths
from nemo_rl_core.models.interfaces import PolicyInterface
from nemo_rl_core.models.policy import where_held
from nemo_rl_core.models.policy.choices import with_choices
from nemo_rl_core.models.policy.rank_times import RankTimesLog
from nemo_rl_core.store.machine import process_numerics
from nemo_rl_core.telemetry import usage
from nemo_rl_core.telemetry.gpu_use import GpuUse, gpu_use
from nemo_rl_core.telemetry.model_flops import Phase, model_shape
from nemo_rl_core.telemetry.waiting import waiting

_WITHIN_A_COPY = (PIPELINE, CONTEXT, TENSOR)
_SECONDS_TO_ANSWER = 60.0


@dataclass(frozen=True)
class HeldResults:
    """What the ranks have computed of rows that lie elsewhere.

    Attributes:
        columns: `HeldRows` by name, in the order of the batch.
        figures: By name, what the function of each rank's rows returns.
        metrics: Of the loss; none without one.
        seconds: That the first rank has spent on scores.
        order: `[B]`: which row of the batch each of the ranks' rows is, one rank after the other.
    """

    columns: BatchedDataDict
    figures: dict[str, list[Any]]
    metrics: dict[str, Any]
    seconds: float
    order: "np.ndarray[Any, np.dtype[np.int64]]"

    def of_rows(self, name: str) -> torch.Tensor:
        """A figure with a value for each row: `[B]`, in the order of the batch."""
        values = np.concatenate(self.figures[name])
        found = np.empty_like(values)
        found[self.order] = values
        return torch.from_numpy(found)


class Policy(PolicyInterface):
    """Trains through a worker group over the whole cluster, with the backend that the setup names.

    Every copy of the model gets its shard of a batch's rows, and what it computes is put back in
    the batch's order. The workers outlive the policy and serve the next stage.

    Args:
        cluster: A session with its running workers, or a cluster of your own.
        setup: Model, backend, head, optimizer and budgets.
        name: Of the worker group. Policies of one name share workers, so that the later one takes
            them over; a policy and a critic that live side by side need two names.

    Attributes:
        session: Where the workers run.
        workers: Whose backend is a `SendsWeights`; a `WeightLink` leads from them.
        choices: What settings that may be `auto` are in the workers, by their paths in a recipe.
        offloads_weights: Whether they wait on the host while an engine generates.

    Raises:
        ConfigError: If the cluster's workers do not hold whole copies of the model.
    """

    def __init__(
        self,
        cluster: ClusterSession | RayVirtualCluster,
        setup: TrainingSetup,
        *,
        name: str = "training",
    ) -> None:
        session = ClusterSession(cluster) if isinstance(cluster, RayVirtualCluster) else cluster
        training = setup.training
        backend = get_training_backend(training.backend)
        sharding = training_sharding(training, session.cluster.world_size)
        # The set-up is no part of the key: workers are set up anew for every policy.
        self.workers, _ = session.workers(
            backend,
            name=name,
            key=f"{training.backend} {id(backend)}",  # a name may be registered again
            sharding=sharding,
            env_vars={**memory_environment(session.cluster), **user_search_path(training)},
        )
        self.session, self._name = session, name
        self._generates = hasattr(backend, "generate")
        self._splits_steps = splits_steps(backend)
        self._saves_shards = saves_shards(backend)
        self._releases_memory = hasattr(backend, "release_memory")
        self.offloads_weights = getattr(training, "offload_for_generation", "none") == "all"
        self._num_copies = sharding.axis_size(DATA)
        self._max_tokens = setup.max_tokens_per_microbatch
        self._shares_rows = shares_rows(
            json.loads((setup.model_folder / "config.json").read_text())
        )
        self._shape = model_shape(setup.model_folder)
        gpus = self._gpus(anew=True)
        memory_gib = min((gpu.memory_gib for gpu in gpus), default=None)
        setup, self.choices = with_choices(setup, session.cluster, memory_gib=memory_gib)
        self._times = RankTimesLog(self.workers)
        with waiting(f"loading the model into the workers of {name}"):
            self.workers.run_all_workers_single_data("setup", setup)
        numerics = self.workers.run_single_worker("__ray_call__", process_numerics)
        usage.saw_process("training", numerics)
        if hasattr(backend, "choices"):
            self.choices |= self.workers.run_single_worker("choices")
        self._sharing: PrefixSharing | None = None
        if self._num_copies > 1 and hasattr(backend, "prefix_sharing"):
            self._sharing = self.workers.run_single_worker("prefix_sharing")

    def _gpus(self, *, anew: bool = False) -> list[GpuUse]:
        """The GPUs of the workers, counted for the stage; none on CPUs."""
        if not self.session.cluster.use_gpus:
            return []
        answers = self.workers.run_all_workers_single_data("__ray_call__", gpu_use, anew=anew)
        found = [answer for answer in answers if answer is not None]
        for each in found:
            usage.saw_gpu(each)
        return found

    def get_logprobs(self, data: BatchedDataDict) -> BatchedDataDict:
        """`logprobs [B, T-1]` under the weights being trained."""
        return self._computed("get_logprobs", data, ["logprobs"])

    def get_reference_logprobs(self, data: BatchedDataDict) -> BatchedDataDict:
        """`logprobs [B, T-1]` under the reference policy."""
        return self._computed("get_reference_logprobs", data, ["logprobs"])

    def get_reference_topk_logprobs(self, data: BatchedDataDict, k: int) -> BatchedDataDict:
        """`topk_ids` and `topk_logprobs [B, T-1, k]` under the reference policy."""
        names = ["topk_ids", "topk_logprobs"]
        return self._computed("get_reference_topk_logprobs", data, names, k=k)

    def get_values(self, data: BatchedDataDict) -> BatchedDataDict:
        """`values [B, T]` under the weights being trained, of a model with a scalar head."""
        return self._computed("get_values", data, ["values"])

    def train(self, data: BatchedDataDict, loss_fn: LossFunction) -> dict[str, Any]:
        """One optimizer step over the whole batch.

        Args:
            data: As `training_columns` takes it, and the columns that the loss reads.
            loss_fn: The loss.

        Raises:
            MissingColumnError: Names a column that the batch lacks.
        """
        if data.is_held:
            answers = self._on_rows(where_held.train_step, self._dealt(data), loss_fn=loss_fn)
        else:
            data = training_columns(data)
            answers = self._on_shards("train_step", self._shards(data), loss_fn=loss_fn)
        self._times.step_ended()
        self._count("training", data)
        metrics: dict[str, Any] = answers[0]
        return metrics

    @property
    def splits_steps(self) -> bool:
        """Whether the backend has the two halves of `train` by themselves."""
        return self._splits_steps

    def forward_backward(
        self, data: BatchedDataDict, loss_fn: LossFunction
    ) -> tuple[dict[str, Any], BatchedDataDict]:
        """The first half of `train`: the gradients, in place of those of an earlier call.

        Args:
            data: As `train` takes it, of rows that are here; `compute_held` is for others.
            loss_fn: The loss.

        Returns:
            The loss's metrics, and `logprobs [B, T-1]` of the forward pass.
        """
        data = training_columns(data)
        shards = self._shards(data)
        answers = self._on_shards("forward_backward", shards, loss_fn=loss_fn)
        self._count("training", data)
        metrics: dict[str, Any] = answers[0][0]
        return metrics, _restored([found for _, found in answers], shards, ["logprobs"])

    def compute_held(
        self,
        data: BatchedDataDict,
        *,
        figures: where_held.Figures,
        scores: Mapping[str, str] | None = None,
        derived: where_held.Columns | None = None,
        loss_fn: LossFunction | None = None,
    ) -> HeldResults:
        """What a step computes of rows that lie elsewhere, before its optimizer step, in one call.

        Args:
            data: As `train` takes it, with columns that are held.
            figures: Functions of a rank's rows, with all columns; they run in the workers.
            scores: `get_logprobs`, `get_reference_logprobs` and `get_values`, by the columns that
                the ranks add.
            derived: A function of a rank's rows and the scores, which gives further columns.
            loss_fn: Of which the gradients are computed, in place of those of an earlier call;
                the forward pass adds the column `prev_logprobs`. None for scores alone.
        """
        dealt = self._dealt(data)
        answers = self._on_rows(
            where_held.compute_together,
            dealt,
            num_held=1,
            scores=dict(scores or {}),
            derived=derived,
            loss_fn=loss_fn,
            figures=dict(figures),
        )
        for _ in scores or {}:
            self._count("scoring", data)
        if loss_fn is not None:
            self._count("training", data)
        first: where_held.HeldAnswer = answers[0][0]
        return HeldResults(
            where_held.joined([block for _, block in answers], dealt, first.columns),
            {name: [answer.figures[name] for answer, _ in answers] for name in figures},
            first.metrics or {},
            first.seconds,
            dealt.order,
        )

    def optimizer_step(self) -> dict[str, Any]:
        """The second half of `train`: updates the weights by the gradients."""
        metrics: dict[str, Any] = self.workers.run_all_workers_single_data("optimizer_step")[0]
        self._times.step_ended()
        return metrics

    def _computed(
        self, method: str, data: BatchedDataDict, names: list[str], **options: Any
    ) -> BatchedDataDict:
        """What the ranks compute of their rows, in the batch's order, as columns of these names.

        Of rows that lie elsewhere, so do the results.
        """
        if data.is_held:
            self._count("scoring", data)
            dealt, options = self._dealt(data), {**options, "what": method, "names": names}
            answers = self._on_rows(where_held.compute, dealt, num_held=1, **options)
            return where_held.joined([found for _, found in answers], dealt, names)
        data = training_columns(data)
        self._count("scoring", data)
        shards = self._shards(data)
        return _restored(self._on_shards(method, shards, **options), shards, names)

    def _count(self, phase: Phase, data: BatchedDataDict) -> None:
        usage.count(phase, self._shape, data["input_lengths"].numpy())

    def _on_shards(self, method: str, shards: Shards, **options: Any) -> list[Any]:
        """The answers of the copies of the model to a method of the backend, one a shard."""
        return self.workers.run_all_workers_sharded_data(
            method,
            in_sharded_axes=[DATA],
            replicate_on_axes=_WITHIN_A_COPY,
            output_is_replicated=_WITHIN_A_COPY,
            common_kwargs=options,
            batch=shards,
        )

    def _on_rows(
        self, function: Callable[..., Any], dealt: DealtRows, *, num_held: int = 0, **options: Any
    ) -> list[Any]:
        """The answers of the copies of the model to a function of `where_held`."""
        return self.workers.run_all_workers_on_parts(
            function, dealt.parts, axis=DATA, common_kwargs=options, num_held=num_held
        )

    def _dealt(self, data: BatchedDataDict) -> DealtRows:
        keeps_groups = self._sharing is not None and self._shares_rows  # which begin alike
        return deal_rows(data, num_ranks=self._num_copies, keep_groups=keeps_groups)

    def _shards(self, data: BatchedDataDict) -> Shards:
        if self._num_copies == 1:  # which plans its micro-batches itself
            return Shards((data,), (tuple(range(data.size)),))
        return shard_for_training(
            data,
            num_ranks=self._num_copies,
            max_tokens=self._max_tokens,
            share_rows=self._shares_rows,
            sharing=self._sharing,
        )

    @property
    def generates(self) -> bool:
        """Whether `generate` completes prompts: on one rank of a backend that can."""
        return self._generates and self.workers.world_size == 1

    def generate(
        self, data: BatchedDataDict, greedy: bool = False, **options: Any
    ) -> BatchedDataDict:
        """Completes prompts in the training worker: slow, but with no engine.

        Args:
            data: `input_ids [B, T]` with `input_lengths [B]` or `attention_mask [B, T]`, and what
                the backend's `generate` reads besides.
            greedy: The likeliest token at every step, in place of a sample.
            **options: As the backend's `generate` takes them.

        Raises:
            NotImplementedError: If the backend does not generate, or the model has several ranks.
        """
        if not self.generates:
            raise NotImplementedError(
                f"{self.workers.world_size} ranks of this backend do not generate: give the "
                "weights to an engine, VllmGeneration(...).update_weights(policy)"
            )
        output: BatchedDataDict = self.workers.run_single_worker(
            "generate", with_lengths(data), greedy=greedy, **options
        )
        return output

    def state_dict(self) -> dict[str, torch.Tensor]:
        """All weights on the CPU, whole, under the names of the transformers checkpoint.

        For an engine of your own; the built-in ones take weights from worker to worker.
        """
        answers = self.workers.run_all_workers_single_data("__ray_call__", _whole_weights)
        weights: dict[str, torch.Tensor] = answers[0]
        return weights

    def release_memory(self) -> None:
        """Gives the GPU's memory away, as far as `training.offload_for_generation` says.

        An engine on the same GPU may use it until the next call that computes, which takes it back.
        """
        if self._releases_memory:
            self.workers.run_all_workers_single_data("release_memory")

    def check_alive(self) -> None:
        """Raises what ends a run: a worker that holds a part of what was trained is gone.

        Raises:
            WorkerLostError: If a worker died, or does not answer within a minute.
        """
        pending = [
            self.workers.start_single_worker("__ray_ready__", rank=rank)
            for rank in range(self.workers.world_size)
        ]
        self.workers.finish(pending, timeout_seconds=_SECONDS_TO_ANSWER)

    def save_checkpoint(self, path: Path) -> None:
        """Writes weights and trainer state into an existing folder that all ranks see."""
        self.workers.run_all_workers_single_data("save_checkpoint", path)

    def start_checkpoint(self, path: Path) -> None:
        """As `save_checkpoint`, of a copy of the state, some of which is written later."""
        self.workers.run_all_workers_single_data("start_checkpoint", path)

    def start_sharded_checkpoint(self, path: Path) -> None:
        """As `start_checkpoint`, of all that training resumes from: no whole model is written.

        A backend that cannot do this writes a whole checkpoint.
        """
        method = "start_sharded_checkpoint" if self._saves_shards else "start_checkpoint"
        self.workers.run_all_workers_single_data(method, path)

    def checkpoint_is_written(self) -> bool:
        """Whether `finish_checkpoint` would not have to wait for any rank."""
        return all(self.workers.run_all_workers_single_data("checkpoint_is_written"))

    def finish_checkpoint(self) -> dict[str, WrittenFile]:
        """Waits until the folder is whole; raises what writing it has raised.

        Returns:
            The files that ranks have written and hashed, with their machines.
        """
        answers = self.workers.run_all_workers_single_data("finish_checkpoint")
        return {
            name: replace(file, machine=machine)
            for machine, found in zip(self.workers.machines(), answers, strict=True)
            for name, file in (found or {}).items()
        }

    def load_checkpoint(self, path: Path) -> None:
        """Goes on from a saved state."""
        self.workers.run_all_workers_single_data("load_checkpoint", path)

    def peak_memory_gib(self) -> float:
        """The most memory of machines that all workers together have held."""
        self._gpus()
        return float(sum(self.workers.run_all_workers_single_data("peak_memory_gib")))

    def shutdown(self) -> None:
        """Ends the workers, where no other policy is to take them over; may be called again."""
        self.session.discard(self._name)


def _restored(answers: Sequence[Any], shards: Shards, names: Sequence[str]) -> BatchedDataDict:
    """The ranks' tensors in the order of the batch."""
    columns = [answer if len(names) > 1 else (answer,) for answer in answers]
    return shards.restored([BatchedDataDict(zip(names, each, strict=True)) for each in columns])


def splits_steps(backend: type) -> bool:
    """Whether the halves of a step are those of the backend's own `train_step`.

    They are not where a class adds to `train_step` alone, which must then be called.
    """
    return _is_as_new(backend, "forward_backward", than=["train_step"])


def saves_shards(backend: type) -> bool:
    """Whether the backend resumes from a checkpoint without `model/`.

    It does not where a class adds to what a whole checkpoint has, or to how it is loaded.
    """
    whole = ["save_checkpoint", "start_checkpoint", "load_checkpoint"]
    return _is_as_new(backend, "start_sharded_checkpoint", than=whole)


def _is_as_new(backend: type, method: str, *, than: Sequence[str]) -> bool:
    """Whether no class that lacks the method overrides one of the others."""
    own = _definer(backend, method)
    return own is not object and all(issubclass(own, _definer(backend, name)) for name in than)


def _definer(backend: type, method: str) -> type:
    return next((each for each in backend.__mro__ if method in vars(each)), object)


def _whole_weights(backend: Any) -> dict[str, torch.Tensor]:
    """The weights of a rank's backend; every rank gathers, and rank 0 returns them."""
    is_first = rank() == 0
    found = {}
    for name, tensor in backend.named_weights():
        if is_first:
            found[name] = tensor.detach().to("cpu", copy=True)
    return found
