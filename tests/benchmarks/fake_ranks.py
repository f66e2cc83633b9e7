"""Ranks that compute nothing instead of Ray workers; the controller's code is the real one.

The work of ranks is done here and does not count: `elsewhere` collects the seconds of this process
that are not the controller's. The controller's work for Ray counts as far as possible without Ray:
stored values and the arguments of every call are pickled, and answers are read from pickles. Only
the calls and references themselves would be Ray's.
"""

import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from nemo_rl_core.distributed.batched_data_dict import InProcess
from nemo_rl_core.distributed.named_sharding import NamedSharding
from nemo_rl_core.environments.interfaces import EnvironmentReturn, Scorer
from nemo_rl_core.errors import RewardError
from nemo_rl_core.functional.advantages import Moments
from nemo_rl_core.models.generation import remote_completions
from nemo_rl_core.models.policy import remote_compute
from nemo_rl_core.types import Rollout

_DERIVED = ("advantages", "returns", "old_values")
"""Columns that ranks derive from their rows."""
_OF_STEPS = (
    "loss",
    "grad_norm",
    "learning_rate",
    "value_loss",
    "value_mean",
    "value_clip_fraction",
    "return_mean",
    "return_square",
    "value_error_mean",
    "value_error_square",
)
"""Metrics of an optimizer step of any model."""


class Elsewhere:
    """CPU seconds of this process that represent other processes' work, and bytes sent to them."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.num_bytes = self.num_calls = self.num_stored = 0

    @contextmanager
    def work(self) -> Iterator[None]:
        """Counts the block as work of another process."""
        before = time.process_time()
        yield
        self.seconds += time.process_time() - before

    def store(self, value: Any) -> None:
        """Pickles a value that Ray would pickle once; counts as the controller's work."""
        self.num_bytes += len(pickle.dumps(value, protocol=5))
        self.num_stored += 1

    def call(self, arguments: Any) -> None:
        """Pickles the arguments of a rank call as Ray would; counts as the controller's work."""
        self.num_bytes += len(pickle.dumps(arguments, protocol=5))
        self.num_calls += 1


class Unread:
    """A reference to a block that must not be read."""

    def __reduce__(self) -> Any:
        return Unread, ()


@dataclass(frozen=True)
class FakeCluster:
    """As many bundles without a GPU as there are ranks."""

    world_size: int
    use_gpus: bool = False

    @property
    def bundle_ct_per_node_list(self) -> list[int]:
        return [self.world_size]


class FakeSession:
    """Worker groups of ranks that compute nothing.

    Args:
        num_ranks: Number of training ranks and of engines.
        new_tokens: Shortest and longest completion, in tokens.
    """

    def __init__(self, num_ranks: int, new_tokens: tuple[int, int]) -> None:
        self.cluster = FakeCluster(num_ranks)
        self.elsewhere = Elsewhere()
        self._new_tokens = new_tokens

    def workers(
        self, worker_class: type, *, sharding: NamedSharding, **_: Any
    ) -> "tuple[FakeWorkers, bool]":
        return FakeWorkers(sharding, self.elsewhere, self._new_tokens), True

    def discard(self, name: str) -> None:
        """Nothing runs."""


class FakeWorkers:
    """The calls of `RayWorkerGroup`."""

    def __init__(
        self, sharding: NamedSharding, elsewhere: Elsewhere, new_tokens: tuple[int, int]
    ) -> None:
        self.world_size, self._elsewhere = sharding.world_size, elsewhere
        self._sharding = sharding
        self._new_tokens = new_tokens
        self._drawn = np.random.default_rng(0)

    def machines(self) -> list[str]:
        return [""] * self.world_size

    def run_single_worker(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return {} if method == "choices" else None

    def run_all_workers_single_data(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        for _ in range(self.world_size):
            self._elsewhere.call((method, args, kwargs))
        if method == "optimizer_step":
            return [{"grad_norm": 0.0, "learning_rate": 0.0}] * self.world_size
        return [0.0 if method == "peak_memory_gib" else None] * self.world_size

    def run_all_workers_on_parts(
        self,
        function: Callable[..., Any],
        shared_parts: Sequence[Sequence[Any]],
        *,
        axis: str,
        common_kwargs: Mapping[str, Any],
        **_: Any,
    ) -> list[Any]:
        self._elsewhere.store((function, common_kwargs))
        parts = []
        for block in shared_parts:
            self._elsewhere.store(block)
            parts += [(Unread(), index) for index in range(len(block))]
        called = zip(parts, self._sharding.along(axis), strict=True)
        for part, _ranks in called:
            self._elsewhere.call((Unread(), *part))
        with self._elsewhere.work():
            answers = [
                self._answer(function, part, common_kwargs)
                for block in shared_parts
                for part in block
            ]
            sent = [pickle.dumps(answer) for answer in answers]
        return [pickle.loads(answer) for answer in sent]  # noqa: S301

    def _answer(
        self, function: Callable[..., Any], batch: Any, call_kwargs: Mapping[str, Any]
    ) -> Any:
        if function is remote_completions.complete:
            return self._completions(batch)
        metrics = dict.fromkeys(_OF_STEPS, 0.0) | {"num_valid_tokens": 1.0}
        if function is remote_compute.train_step:
            return metrics
        assert function is remote_compute.compute_together, "rows are not remote"
        sums = dict.fromkeys(("num_off", "error", "kl", "ratio"), 0.0)
        zeros = np.zeros(len(batch["input_lengths"]), np.float32)
        figures = {
            "agreement": sums | dict.fromkeys(("num_tokens", "num_trained"), 1),
            "moments": Moments(count=2, mean=0.0, squares=2.0, lowest=-1.0, highest=1.0),
            "mean_advantages": zeros,
            "kl_penalties": zeros,
        }
        derived = _DERIVED if call_kwargs["derived"] is not None else ()
        gradients = ("prev_logprobs",) if call_kwargs["loss_fn"] is not None else ()
        columns = (*call_kwargs["scores"], *derived, *gradients)
        reported = {name: figures[name] for name in call_kwargs["figures"]}
        return remote_compute.RankAnswer(columns, metrics, reported, 0.0), Unread()

    def _completions(self, requests: remote_completions.Requests) -> Any:
        starts = np.array(list(map(len, requests.prompts)))[requests.prompt_indices]
        lengths = self._lengths(starts + requests.columns.get("before_lengths", 0))
        if "max_new_tokens" not in requests.columns:  # single turns, whose texts nobody reads
            return lengths, Unread(), Unread()
        size = len(requests)
        replies = {
            "texts": [f"{index:0200d}" for index in range(size)],
            "last_token_ids": [5] * size,
        }
        return lengths, Unread(), InProcess(replies)

    def _lengths(self, starts: Any) -> dict[str, Any]:
        least, most = self._new_tokens
        lengths = self._drawn.integers(least, most + 1, len(starts))
        return {
            "input_lengths": starts + lengths,
            "completion_lengths": lengths,
            "has_logprobs": np.full(len(lengths), True),
            "truncated": lengths == most,
        }


class Talk:
    """Answers with two hundred characters to all turns except the third."""

    def step(self, message_log_batch: Sequence[Any], metadata: Sequence[Any]) -> EnvironmentReturn:
        is_last = torch.tensor([len(log) == 6 for log in message_log_batch])
        size = len(is_last)
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": "1" * 200}] * size,
            metadata=list(metadata),
            next_stop_strings=[None] * size,
            rewards=torch.from_numpy(np.random.default_rng(size).integers(0, 2, size)).float(),
            terminateds=is_last,
        )


class DrawnRewards(Scorer):
    """Rewards without delay: the time of an environment is not measured."""

    def score(self, rollouts: Sequence[Rollout]) -> list[float | RewardError]:
        rewards: list[float | RewardError] = []
        rewards += np.random.default_rng(1).integers(0, 2, len(rollouts)).astype(float).tolist()
        return rewards
