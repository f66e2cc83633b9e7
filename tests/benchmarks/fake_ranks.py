"""Ranks that compute nothing, in place of Ray's workers: the controller's code is the real one.

What ranks would do is done here in no time that counts: `elsewhere` collects the seconds of this
process that are not the controller's. What the controller does for Ray counts, as far as it can
without Ray: the arguments of every rank are pickled. Calls and references themselves are Ray's.
"""

import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from nemo_rl_core.distributed.named_sharding import NamedSharding
from nemo_rl_core.environments.interfaces import Scorer
from nemo_rl_core.errors import RewardError
from nemo_rl_core.models.generation import where_made
from nemo_rl_core.models.policy import where_held
from nemo_rl_core.types import Rollout


class Elsewhere:
    """The CPU seconds of this process that stand for others' work, and bytes given to them."""

    def __init__(self) -> None:
        self.seconds, self.num_bytes, self.num_calls = 0.0, 0, 0

    @contextmanager
    def work(self) -> Iterator[None]:
        """Work of another process."""
        before = time.process_time()
        yield
        self.seconds += time.process_time() - before

    def give(self, arguments: Any) -> None:
        """Pickles what Ray would pickle; it counts as the controller's."""
        self.num_bytes += len(pickle.dumps(arguments, protocol=5))
        self.num_calls += 1


class Unread:
    """A reference to a block that nobody may read."""

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
        num_ranks: Of training, and as many engines.
        new_tokens: The shortest and the longest completion.
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
        self._new_tokens = new_tokens
        self._drawn = np.random.default_rng(0)

    def machines(self) -> list[str]:
        return [""] * self.world_size

    def run_single_worker(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return {} if method == "choices" else None

    def run_all_workers_single_data(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        for _ in range(self.world_size):
            self._elsewhere.give((method, args, kwargs))
        if method == "optimizer_step":
            return [{"grad_norm": 0.0, "learning_rate": 0.0}] * self.world_size
        return [0.0 if method == "peak_memory_gib" else None] * self.world_size

    def run_all_workers_sharded_data(
        self,
        method: str,
        *,
        common_kwargs: Mapping[str, Any],
        batch: Sequence[Any],
        **_: Any,
    ) -> list[Any]:
        assert method == "__ray_call__", "rows that are not held"
        for rank in range(self.world_size):
            self._elsewhere.give((method, batch[rank], common_kwargs))
        with self._elsewhere.work():
            return [self._answer(common_kwargs["fn"], batch[rank]) for rank in range(len(batch))]

    def _answer(self, function: Callable[..., Any], batch: Any) -> Any:
        if function is where_made.generate:
            return self._completions(batch)
        if function is where_held.compute:
            return None, Unread()
        if function is where_held.evaluate:
            sums = {name: torch.zeros(()) for name in ("num_off", "error", "kl", "ratio")}
            return sums | {name: torch.ones(()) for name in ("num_tokens", "num_trained")}
        metrics = {"loss": 0.0, "num_valid_tokens": 1.0, "grad_norm": 0.0, "learning_rate": 0.0}
        return (metrics, Unread()) if function is where_held.forward_backward else metrics

    def _completions(self, batch: Mapping[str, Any]) -> Any:
        starts = np.array(list(map(len, batch["prompts"])))[batch["prompt"]]
        least, most = self._new_tokens
        lengths = self._drawn.integers(least, most + 1, len(starts))
        found = {
            "input_lengths": starts + lengths,
            "completion_lengths": lengths,
            "truncated": lengths == most,
        }
        return found, Unread(), Unread()


class DrawnRewards(Scorer):
    """Rewards at once: what an environment takes is its own."""

    def score(self, rollouts: Sequence[Rollout]) -> list[float | RewardError]:
        rewards: list[float | RewardError] = []
        rewards += np.random.default_rng(1).integers(0, 2, len(rollouts)).astype(float).tolist()
        return rewards
