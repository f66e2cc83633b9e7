"""A policy whose training backend runs in Ray workers."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nemo_rl_core.backends.training.base import TrainingSetup, get_training_backend
from nemo_rl_core.checkpoints.written_files import WrittenFile
from nemo_rl_core.config.registered import user_search_path
from nemo_rl_core.config.training import Head
from nemo_rl_core.data.pretrained import shares_rows
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.distributed.isolation import add_to_search_path, isolated_path, search_path
from nemo_rl_core.distributed.named_sharding import DATA, training_sharding
from nemo_rl_core.distributed.packing.prefixes import PrefixSharing
from nemo_rl_core.distributed.packing.ranks import shard_for_training
from nemo_rl_core.distributed.packing.row_shards import ShardedRows, shard_rows
from nemo_rl_core.distributed.process_group import rank
from nemo_rl_core.distributed.session import ClusterSession, memory_environment
from nemo_rl_core.distributed.step_times import RankTimesLog
from nemo_rl_core.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl_core.functional.protocols import LossFunction
from nemo_rl_core.model_files.loading import with_tied_weights
from nemo_rl_core.models.columns import training_columns, with_lengths
from nemo_rl_core.models.interfaces import PolicyInterface
from nemo_rl_core.models.policy import remote_compute
from nemo_rl_core.models.policy.choices import with_choices
from nemo_rl_core.models.policy.remote_compute import Computed
from nemo_rl_core.store.machine import process_numerics
from nemo_rl_core.telemetry import usage
from nemo_rl_core.telemetry.model_flops import Phase, model_shape
from nemo_rl_core.telemetry.usage import GpuUse, gpu_use
from nemo_rl_core.telemetry.waiting import waiting

_SECONDS_TO_ANSWER = 60.0


class Policy(PolicyInterface):
    """Trains with the backend of the setup, in a worker group over the complete cluster.

    Every copy of the model gets its shard of a batch's rows, and the results are returned in the
    order of the batch. The workers outlive the policy and serve the next stage.

    Args:
        cluster: A session with its running workers, or a custom cluster.
        setup: Model, backend, head, optimizer and budgets.
        name: Name of the worker group. A later policy of the same name reuses the workers; a policy
            and a critic that exist at the same time need two names.

    Attributes:
        workers: Workers, whose backend is a `SendsWeights` for a `WeightLink`.
        splits_steps: Whether the backend has the two halves of `train` as separate methods.
        choices: Values that workers use for settings that may be `auto`, by path in a recipe.
        offloads_weights: Whether weights are on the host while an engine generates.

    Raises:
        ConfigError: If the cluster's workers do not make up complete copies of the model.
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
        # The key excludes the set-up: workers are set up again for every policy.
        self.workers, _ = session.workers(
            backend,
            name=name,
            # A name may be registered again.
            key=f"{training.backend} {id(backend)} {setup.isolation}",
            sharding=sharding,
            env_vars={
                **memory_environment(session.cluster),
                **user_search_path(training),
                **isolated_path(setup.isolation),
            },
        )
        # For modules of custom functions; running workers may be older than a folder.
        self.workers.run_all_workers_single_data("__ray_call__", add_to_search_path, search_path())
        self.session, self._name = session, name
        self._generates = hasattr(backend, "generate")
        self.splits_steps = splits_steps(backend)
        self._saves_shards = saves_shards(backend)
        self._releases_memory = hasattr(backend, "release_memory")
        self.offloads_weights = getattr(training, "offload_for_generation", "none") == "all"
        self._num_copies = sharding.axis_size(DATA)
        self._max_tokens = setup.max_tokens_per_microbatch
        self._shares_rows = shares_rows(
            json.loads((setup.model_folder / "config.json").read_text())
        )
        self._shape = model_shape(setup.model_folder)
        self._full_weights = partial(_full_weights, folder=setup.model_folder, head=setup.head)
        gpus = self._gpus(reset_peak=True)
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

    def _gpus(self, *, reset_peak: bool = False) -> list[GpuUse]:
        """Records the GPUs of the workers in the usage of the stage; none on CPUs."""
        if not self.session.cluster.use_gpus:
            return []
        answers = self.workers.run_all_workers_single_data(
            "__ray_call__", gpu_use, reset_peak=reset_peak
        )
        gpus = [answer for answer in answers if answer is not None]
        for each in gpus:
            usage.saw_gpu(each)
        return gpus

    def get_logprobs(self, data: BatchedDataDict) -> BatchedDataDict:
        """Returns `logprobs [B, T-1]` under the weights being trained."""
        return self._computed("get_logprobs", data, ["logprobs"])

    def get_reference_logprobs(self, data: BatchedDataDict) -> BatchedDataDict:
        """Returns `logprobs [B, T-1]` under the reference policy."""
        return self._computed("get_reference_logprobs", data, ["logprobs"])

    def get_reference_topk_logprobs(self, data: BatchedDataDict, k: int) -> BatchedDataDict:
        """Returns `topk_ids` and `topk_logprobs [B, T-1, k]` under the reference policy."""
        names = ["topk_ids", "topk_logprobs"]
        return self._computed("get_reference_topk_logprobs", data, names, k=k)

    def get_values(self, data: BatchedDataDict) -> BatchedDataDict:
        """Returns `values [B, T]` under the weights being trained, from a scalar head."""
        return self._computed("get_values", data, ["values"])

    def train(self, data: BatchedDataDict, loss_fn: LossFunction) -> dict[str, Any]:
        """Makes one optimizer step on the complete batch."""
        data = data if data.is_remote else training_columns(data)
        answers = self.workers.run_all_workers_on_parts(
            remote_compute.train_step,
            self._shards(data).parts,
            axis=DATA,
            common_kwargs={"loss_fn": loss_fn},
        )
        self._times.step_ended()
        usage.count("training", self._shape, data["input_lengths"].numpy())
        metrics: dict[str, Any] = answers[0]
        return metrics

    def compute(
        self,
        data: BatchedDataDict,
        *,
        figures: remote_compute.Figures,
        scores: Mapping[str, str] | None = None,
        derived: remote_compute.Columns | None = None,
        loss_fn: LossFunction | None = None,
    ) -> Computed:
        """Computes scores, derived columns, gradients and figures of a batch in one call per rank.

        Args:
            data: Batch as for `train`; its columns may be remote.
            figures: Functions of a rank's rows with all columns, which run in the workers.
            scores: Methods (`get_logprobs`, `get_reference_logprobs`, `get_values`) by the name of
                the column that each one adds.
            derived: Function of a rank's rows and scores that returns further columns.
            loss_fn: Loss whose gradients replace those of an earlier call; its forward pass adds
                the column `prev_logprobs`. None computes no gradients.
        """
        data = data if data.is_remote else training_columns(data)
        shards = self._shards(data)
        answers = self.workers.run_all_workers_on_parts(
            remote_compute.compute_together,
            shards.parts,
            axis=DATA,
            common_kwargs={
                "scores": dict(scores or {}),
                "derived": derived,
                "loss_fn": loss_fn,
                "figures": dict(figures),
            },
            num_remote=1,
        )
        phases: list[Phase] = ["scoring"] * len(scores or {})
        phases += ["training"] * (loss_fn is not None)
        for phase in phases:
            usage.count(phase, self._shape, data["input_lengths"].numpy())
        first: remote_compute.RankAnswer = answers[0][0]
        blocks = [block for _, block in answers]
        return Computed(
            remote_compute.restored(blocks, shards, first.columns, is_remote=data.is_remote),
            {name: [answer.figures[name] for answer, _ in answers] for name in figures},
            first.metrics or {},
            first.seconds,
            shards.order,
        )

    def optimizer_step(self) -> dict[str, Any]:
        """Updates the weights with the gradients, the second half of `train`."""
        metrics: dict[str, Any] = self.workers.run_all_workers_single_data("optimizer_step")[0]
        self._times.step_ended()
        return metrics

    def _computed(
        self, method: str, data: BatchedDataDict, names: list[str], **options: Any
    ) -> BatchedDataDict:
        """Returns columns that a method of the backend computes; remote if the batch is."""
        data = data if data.is_remote else training_columns(data)
        usage.count("scoring", self._shape, data["input_lengths"].numpy())
        shards = self._shards(data)
        answers = self.workers.run_all_workers_on_parts(
            remote_compute.compute,
            shards.parts,
            axis=DATA,
            common_kwargs={**options, "what": method, "names": names},
            num_remote=1,
        )
        return remote_compute.restored(
            [block for _, block in answers], shards, names, is_remote=data.is_remote
        )

    def _shards(self, data: BatchedDataDict) -> ShardedRows:
        """Divides the rows: remote ones by their lengths, local ones with a full plan."""
        if self._num_copies == 1:  # the rank plans its own micro-batches
            return ShardedRows([[data]], np.arange(data.size), np.array([data.size]))
        if data.is_remote:
            keeps_groups = self._sharing is not None and self._shares_rows  # they share prefixes
            return shard_rows(data, num_ranks=self._num_copies, keep_groups=keeps_groups)
        shards = shard_for_training(
            data,
            num_ranks=self._num_copies,
            max_tokens=self._max_tokens,
            share_rows=self._shares_rows,
            sharing=self._sharing,
        )
        sizes = np.array([shard.size for shard in shards])
        return ShardedRows([[shard] for shard in shards], np.array(shards.order, np.int64), sizes)

    @property
    def generates(self) -> bool:
        """Whether `generate` completes prompts: with one rank, if the backend can."""
        return self._generates and self.workers.world_size == 1

    def generate(
        self, data: BatchedDataDict, greedy: bool = False, **options: Any
    ) -> BatchedDataDict:
        """Completes prompts in the training worker, slowly but without an engine.

        Args:
            data: `input_ids [B, T]` with `input_lengths [B]` or `attention_mask [B, T]`, and other
                columns that the backend's `generate` reads.

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
        """Returns all weights, unsharded on the CPU, as a strict `load_state_dict` needs them.

        It is for custom engines; built-in engines receive weights directly from the workers.
        """
        answers = self.workers.run_all_workers_single_data("__ray_call__", self._full_weights)
        weights: dict[str, torch.Tensor] = answers[0]
        return weights

    def release_memory(self) -> None:
        """Frees GPU memory as configured by `training.offload_for_generation`.

        An engine on the same GPU may use it until the policy computes again.
        """
        if self._releases_memory:
            self.workers.run_all_workers_single_data("release_memory")

    def check_alive(self) -> None:
        """Checks that all workers are alive; a run cannot continue without one of them."""
        pending = [
            self.workers.start_single_worker("__ray_ready__", rank=rank)
            for rank in range(self.workers.world_size)
        ]
        self.workers.finish(pending, timeout_seconds=_SECONDS_TO_ANSWER)

    def save_checkpoint(self, path: Path) -> None:
        """Writes weights and trainer state into an existing folder that all ranks see."""
        self.workers.run_all_workers_single_data("save_checkpoint", path)

    def start_checkpoint(self, path: Path) -> None:
        """Copies the state and starts to write it; the writing may continue after this call."""
        self.workers.run_all_workers_single_data("start_checkpoint", path)

    def start_sharded_checkpoint(self, path: Path) -> None:
        """Starts a checkpoint that training can resume from, without `model/`.

        A backend that does not support this writes a full checkpoint.
        """
        method = "start_sharded_checkpoint" if self._saves_shards else "start_checkpoint"
        self.workers.run_all_workers_single_data(method, path)

    def checkpoint_is_written(self) -> bool:
        """Returns whether `finish_checkpoint` would not have to wait for any rank."""
        return all(self.workers.run_all_workers_single_data("checkpoint_is_written"))

    def finish_checkpoint(self) -> dict[str, WrittenFile]:
        """Waits until the folder is complete; raises the error of writing it, if any.

        Returns:
            The files that ranks have written and hashed, with their machines.
        """
        answers = self.workers.run_all_workers_single_data("finish_checkpoint")
        return {
            name: replace(file, machine=machine)
            for machine, files in zip(self.workers.machines(), answers, strict=True)
            for name, file in (files or {}).items()
        }

    def load_checkpoint(self, path: Path) -> None:
        """Resumes from a saved state."""
        self.workers.run_all_workers_single_data("load_checkpoint", path)

    def peak_memory_gib(self) -> float:
        """Returns the peak host memory of all workers together."""
        self._gpus()
        return float(sum(self.workers.run_all_workers_single_data("peak_memory_gib")))

    def shutdown(self) -> None:
        """Ends the workers, if no other policy will reuse them; may be called again."""
        self.session.discard(self._name)


def splits_steps(backend: type) -> bool:
    """Whether the two halves of a step do the same as the backend's `train_step`.

    They do not if a class overrides only `train_step`, which must then be called.
    """
    return _is_defined_after(backend, "forward_backward", others=["train_step"])


def saves_shards(backend: type) -> bool:
    """Whether the backend resumes from a checkpoint without `model/`.

    It does not if a class overrides only methods of full checkpoints.
    """
    full_methods = ["save_checkpoint", "start_checkpoint", "load_checkpoint"]
    return _is_defined_after(backend, "start_sharded_checkpoint", others=full_methods)


def _is_defined_after(backend: type, method: str, *, others: Sequence[str]) -> bool:
    """Whether no class that lacks the method overrides one of the others."""
    definer = _definer(backend, method)
    return definer is not object and all(
        issubclass(definer, _definer(backend, name)) for name in others
    )


def _definer(backend: type, method: str) -> type:
    return next((each for each in backend.__mro__ if method in vars(each)), object)


def _full_weights(backend: Any, folder: Path, head: Head) -> dict[str, torch.Tensor]:
    is_first = rank() == 0
    weights = {}
    for name, tensor in backend.named_weights():
        if is_first:
            weights[name] = tensor.detach().to("cpu", copy=True)
    return with_tied_weights(weights, folder, head) if is_first else weights
