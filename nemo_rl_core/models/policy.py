"""A policy whose training backend runs in Ray workers."""

from pathlib import Path
from typing import Any

from nemo_rl_core.backends.training.base import TrainingSetup, get_training_backend
from nemo_rl_core.config.training import TrainingConfig
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.distributed.session import ClusterSession
from nemo_rl_core.functional.protocols import LossFunction
from nemo_rl_core.models.interfaces import PolicyInterface


class Policy(PolicyInterface):
    """Trains through a worker group; its workers outlive it and serve the next stage.

    Args:
        session: The cluster and its running workers.
        config: Which backend.
        setup: Model, head, optimizer and budgets.
        name: Of the worker group. Policies of one name share workers, so that the later one takes
            them over; a policy and a critic that live side by side need two names.
    """

    def __init__(
        self,
        session: ClusterSession,
        config: TrainingConfig,
        setup: TrainingSetup,
        *,
        name: str = "training",
    ) -> None:
        backend = get_training_backend(config.backend)
        # The set-up is no part of the key: workers are set up anew for every policy.
        self._workers, _ = session.workers(backend, name=name, key=config.backend)
        self._workers.run_all_workers_single_data("setup", setup)

    def get_logprobs(self, data: BatchedDataDict) -> BatchedDataDict:
        """`logprobs [B, T-1]` under the weights being trained."""
        return BatchedDataDict({"logprobs": self._workers.run_single_worker("get_logprobs", data)})

    def get_reference_logprobs(self, data: BatchedDataDict) -> BatchedDataDict:
        """`logprobs [B, T-1]` under the reference policy."""
        logprobs = self._workers.run_single_worker("get_reference_logprobs", data)
        return BatchedDataDict({"logprobs": logprobs})

    def get_reference_topk_logprobs(self, data: BatchedDataDict, k: int) -> BatchedDataDict:
        """`topk_ids` and `topk_logprobs [B, T-1, k]` under the reference policy."""
        ids, logprobs = self._workers.run_single_worker("get_reference_topk_logprobs", data, k)
        return BatchedDataDict({"topk_ids": ids, "topk_logprobs": logprobs})

    def get_values(self, data: BatchedDataDict) -> BatchedDataDict:
        """`values [B, T]` under the weights being trained, of a model with a scalar head."""
        return BatchedDataDict({"values": self._workers.run_single_worker("get_values", data)})

    def train(self, data: BatchedDataDict, loss_fn: LossFunction) -> dict[str, Any]:
        """One optimizer step over the whole batch."""
        metrics: dict[str, Any] = self._workers.run_single_worker("train_step", data, loss_fn)
        return metrics

    def send_weights(self) -> tuple[Any, str]:
        """A reference to all weights in shared memory, and the digest of what was put there."""
        buckets, digest = self._workers.start_single_worker("weight_buckets", num_returns=2)
        return buckets, self._workers.finish([digest])[0]

    def save_checkpoint(self, path: Path) -> None:
        """Writes weights and trainer state into an existing folder."""
        self._workers.run_single_worker("save_checkpoint", path)

    def load_checkpoint(self, path: Path) -> None:
        """Goes on from a saved state."""
        self._workers.run_all_workers_single_data("load_checkpoint", path)

    def peak_memory_gib(self) -> float:
        """The most memory that all workers together have held."""
        return float(sum(self._workers.run_all_workers_single_data("peak_memory_gib")))
