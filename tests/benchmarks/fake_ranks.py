"""Ranks that compute nothing, in place of Ray's workers: the controller's code is the real one.

What ranks would do is done here in no time that counts: `elsewhere` collects the seconds of this
process that are not the controller's. What the controller does for Ray counts, as far as it can
without Ray: what is stored and the arguments of every call are pickled, and answers are read from
pickles. Calls and references themselves are Ray's.
"""

import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from nemo_rl_core.distributed.held_rows import InProcess
from nemo_rl_core.distributed.named_sharding import NamedSharding
from nemo_rl_core.environments.interfaces import EnvironmentReturn, Scorer
from nemo_rl_core.errors import RewardError
from nemo_rl_core.functional.advantages import Moments
from nemo_rl_core.models.generation import where_made
from nemo_rl_core.models.policy import where_held
from nemo_rl_core.types import Rollout

_DERIVED = ("advantages", "returns", "old_values")
"""Columns that ranks derive of their rows."""
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
    """The CPU seconds of this process that stand for others' work, and bytes given to them."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.num_bytes = self.num_calls = self.num_stored = 0

    @contextmanager
    def work(self) -> Iterator[None]:
        """Work of another process."""
        before = time.process_time()
        yield
        self.seconds += time.process_time() - before

    def store(self, value: Any) -> None:
        """Pickles what Ray would pickle once, into its store; it counts as the controller's."""
        self.num_bytes += len(pickle.dumps(value, protocol=5))
        self.num_stored += 1

    def call(self, arguments: Any) -> None:
        """Pickles what Ray would pickle for a call of a rank; it counts as the controller's."""
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
        wholes: Sequence[Sequence[Any]],
        *,
        axis: str,
        common_kwargs: Mapping[str, Any],
        **_: Any,
    ) -> list[Any]:
        self._elsewhere.store((function, common_kwargs))
        parts = []
        for whole in wholes:
            self._elsewhere.store(whole)
            parts += [(Unread(), place) for place in range(len(whole))]
        called = zip(parts, self._sharding.along(axis), strict=True)
        for part, _ranks in called:
            self._elsewhere.call((Unread(), *part))
        with self._elsewhere.work():
            answers = [
                self._answer(function, part, common_kwargs) for whole in wholes for part in whole
            ]
            sent = [pickle.dumps(answer) for answer in answers]
        return [pickle.loads(answer) for answer in sent]  # noqa: S301

    def _answer(self, function: Callable[..., Any], batch: Any, asked: Mapping[str, Any]) -> Any:
        if function is where_made.generate:
            return self._completions(batch)
        if function is where_made.go_on:
            return self._turns(batch)
        metrics = dict.fromkeys(_OF_STEPS, 0.0) | {"num_valid_tokens": 1.0}
        if function is where_held.train_step:
            return metrics
        assert function is where_held.compute_together, "rows that are not held"
        sums = dict.fromkeys(("num_off", "error", "kl", "ratio"), 0.0)
        zeros = np.zeros(len(batch["input_lengths"]), np.float32)
        figures = {
            "agreement": sums | dict.fromkeys(("num_tokens", "num_trained"), 1),
            "moments": Moments(count=2, mean=0.0, squares=2.0, lowest=-1.0, highest=1.0),
            "mean_advantages": zeros,
            "kl_penalties": zeros,
        }
        columns = (*asked["scores"], "prev_logprobs", *_DERIVED)
        found = {name: figures[name] for name in asked["figures"]}
        return where_held.HeldAnswer(columns, metrics, found, 0.0), Unread()

    def _completions(self, batch: Mapping[str, Any]) -> Any:
        starts = np.array(list(map(len, batch["prompts"])))[batch["prompt"]]
        return self._lengths(starts), Unread(), Unread()

    def _turns(self, batch: Mapping[str, Any]) -> Any:
        found = self._lengths(batch["input_lengths"] + batch.get("before_lengths", 0))
        size = len(found["truncated"])
        said = {"texts": [f"{place:0200d}" for place in range(size)], "last_token_ids": [5] * size}
        return found, Unread(), InProcess(said)

    def _lengths(self, starts: Any) -> dict[str, Any]:
        least, most = self._new_tokens
        lengths = self._drawn.integers(least, most + 1, len(starts))
        return {
            "input_lengths": starts + lengths,
            "completion_lengths": lengths,
            "truncated": lengths == most,
        }


class Talk:
    """Answers with two hundred characters to all turns but the third."""

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
    """Rewards at once: what an environment takes is its own."""

    def score(self, rollouts: Sequence[Rollout]) -> list[float | RewardError]:
        rewards: list[float | RewardError] = []
        rewards += np.random.default_rng(1).integers(0, 2, len(rollouts)).astype(float).tolist()
        return rewards
