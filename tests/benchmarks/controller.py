"""CPU time and memory of the controller in an RL step over many ranks that compute nothing.

`python -m tests.benchmarks.controller` prints the table of deployment/SCALE.md; `--others` measures
64 ranks with 64 sequences and other advantages, or conversations; `--ray` the cost of a rank
call in this process when Ray carries it.

The trainer, sampler, policy and the engine's controller side are the real ones; workers are those
of `fake_ranks.py`, with one engine and one copy of the model per rank. Rewards are drawn
immediately and weights are not sent. Prompts have 512 tokens, groups 16 completions.
"""

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from nemo_rl_core.algorithms import GRPOTrainer, PPOTrainer
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.distributed.packing.row_shards import shard_rows
from nemo_rl_core.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl_core.distributed.worker_group import RayWorkerGroup
from nemo_rl_core.environments.adapt import as_scorer
from nemo_rl_core.models.generation.engine import Generation
from nemo_rl_core.models.policy import remote_compute
from nemo_rl_core.rollouts.records import RolloutRecords
from nemo_rl_core.rollouts.sampler import Sampler
from nemo_rl_core.telemetry.usage import peak_memory_gib
from nemo_rl_core.trainers.callbacks import Callback, Metrics, RunningTrainer
from nemo_rl_core.trainers.loop import RunSpec
from nemo_rl_core.trainers.rollouts import RolloutTrainer
from tests.benchmarks.comparison.inputs import model_folder, prompts, saved
from tests.benchmarks.comparison.rows_machine import LONG
from tests.benchmarks.fake_ranks import DrawnRewards, FakeSession, Talk

GROUP, PROMPT_TOKENS = 16, 512
RANKS, SEQUENCES_A_RANK = (64, 256, 1024), (8, 16, 64)
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("grpo", {}),
    "reinforce_plus_plus": ("grpo", {"advantage": {"kind": "reinforce_plus_plus"}}),
    "kl_in_reward": ("grpo", {"loss": {"kl": {"beta": 0.1, "place": "in_reward"}}}),
    "ppo": ("ppo", {"num_epochs_per_rollout": 1}),
    "three turns": ("grpo", {}),
}
"""Algorithms and settings; `--others` measures one step size of each."""
SHORT, LONGEST = (512, 1024), (512, 3584)
"""The shortest and the longest completion: sequences of 1,024 to 1,536 and to 4,096 tokens."""


@dataclass(frozen=True)
class Step:
    """Cost of a step on the controller: CPU-seconds, and GiB above the memory in use before it."""

    cpu_seconds: float
    peak_gib: float
    num_bytes: int
    num_calls: int
    num_stored: int


class _OnController(RolloutTrainer[Any, Any]):
    """Sends no weights; records are pickled for a task, as with Ray."""

    def _set_up(self, spec: RunSpec, resources: ExitStack) -> None:
        super()._set_up(spec, resources)
        session: Any = self.session

        def start(write: Callable[[], None]) -> Callable[[], object]:
            session.elsewhere.call(write)
            return int

        self.records = RolloutRecords(spec.work / "rollouts", start, max_local_tokens=0)

    def _update_weights(self, sampler: Sampler, *, last_step: int) -> None:
        generation = sampler.generation
        assert isinstance(generation, Generation)
        generation._source = generation._proven = self.policy


class _GRPO(_OnController, GRPOTrainer):
    """GRPO on the controller."""


class _PPO(_OnController, PPOTrainer):
    """PPO on the controller."""


class _Measured(Callback):
    def __init__(self, session: FakeSession) -> None:
        self._session = session
        self.steps: list[Step] = []

    def on_step_begin(self, trainer: RunningTrainer, step: int) -> None:
        Path("/proc/self/clear_refs").write_text("5")
        self._held = peak_memory_gib()
        spent = self._session.elsewhere
        spent.num_bytes = spent.num_calls = spent.num_stored = 0
        self._before = time.process_time() - spent.seconds

    def on_step_end(self, trainer: RunningTrainer, step: int, metrics: Metrics) -> None:
        spent = self._session.elsewhere
        seconds = time.process_time() - spent.seconds - self._before
        peak_gib = peak_memory_gib() - self._held
        self.steps.append(
            Step(seconds, peak_gib, spent.num_bytes, spent.num_calls, spent.num_stored)
        )


def steps(
    scratch: Path,
    ranks: int,
    sequences: int,
    new_tokens: tuple[int, int],
    num_steps: int = 4,
    kind: str = "grpo",
) -> list[Step]:
    """Runs steps over that many ranks and sequences; without the first, which imports."""
    torch.set_num_threads(1)
    base = model_folder(scratch, LONG)
    num_prompts = sequences // GROUP
    folder = Path(tempfile.mkdtemp(dir=scratch))
    rows = prompts(num_prompts, PROMPT_TOKENS - 1)
    session = FakeSession(ranks, new_tokens)
    measured = _Measured(session)
    algorithm, section = KINDS[kind]
    has_turns = kind.startswith("three turns")
    trainer = (_PPO if algorithm == "ppo" else _GRPO)(
        {
            "generation": {"max_new_tokens": new_tokens[1], "num_engines": ranks},
            "rollouts": {"max_rollout_tokens": 4 * new_tokens[1]} if has_turns else {},
            "max_prompt_tokens": PROMPT_TOKENS,
            "cluster": {"shape": "cluster", "num_workers": ranks},
            algorithm: {
                **section,
                "num_prompts_per_step": num_prompts,
                "num_generations_per_prompt": GROUP,
                "num_steps_per_iteration": num_steps + 1,
                "save_every_num_steps": 10**6,
                "max_tokens_per_microbatch": 8192,
            },
        },
        session=session,
    )
    train = saved(rows, base, folder)
    scorer = as_scorer(Talk()) if has_turns else DrawnRewards()
    spec = RunSpec(train=train, start=base, work=folder / "run", reference=base, scorer=scorer)
    trainer.run(spec, callbacks=[measured])
    return measured.steps[1:]


class _Rank:
    def nothing(self) -> None:
        """Does nothing."""


def _keep(_: Any, batch: Any, **__: Any) -> tuple[None, dict[str, Any]]:
    return None, {"logprobs": np.zeros((len(batch["input_lengths"]), 1024), np.float32)}


def ray_microseconds(num_ranks: int = 8, num_rounds: int = 60) -> dict[str, float]:
    """Returns the CPU time of a rank call in all threads of this process when Ray carries it.

    A rank has 64 rows of all ranks' blocks; it returns a value and keeps a block.
    """
    import ray

    ray.init(num_cpus=num_ranks, include_dashboard=False, log_to_driver=False)
    microseconds: dict[str, float] = {}
    with RayVirtualCluster([num_ranks], use_gpus=False, num_cpus_per_bundle=0.1) as cluster:
        workers = RayWorkerGroup(cluster, _Rank)
        size = SEQUENCES_A_RANK[-1] * num_ranks
        batch = BatchedDataDict({"input_lengths": torch.arange(size) % 97 + 2})

        def with_rows() -> None:
            shards = shard_rows(batch, num_ranks=num_ranks)
            answers = workers.run_all_workers_on_parts(
                _keep,
                shards.parts,
                axis="data_parallel",
                common_kwargs={"loss": None},
                num_remote=1,
            )
            blocks = [each for _, each in answers]
            batch.update(remote_compute.restored(blocks, shards, ["logprobs"], is_remote=True))

        calls: dict[str, Callable[[], object]] = {
            "with rows and a block that is kept": with_rows,
            "with nothing": lambda: workers.run_all_workers_single_data("nothing"),
        }
        for name, call in calls.items():
            call()  # the first one starts the ranks
            before = time.process_time()
            for _ in range(num_rounds):
                call()
            microseconds[name] = 1e6 * (time.process_time() - before) / (num_rounds * num_ranks)
        workers.shutdown()
    ray.shutdown()
    return microseconds


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--ray", action="store_true")
    parser.add_argument("--others", action="store_true")
    options = parser.parse_args()
    if options.ray:
        rounds = [ray_microseconds() for _ in range(3)]
        for name in rounds[0]:
            low, middle, high = sorted(each[name] for each in rounds)
            Console().print(f"a call {name}: {middle:.0f} µs ({low:.0f} to {high:.0f})")
        return
    rows: list[tuple[str, int, int, tuple[int, int]]]
    if options.others:
        rows = [(kind, 64, 64, SHORT) for kind in KINDS]
    else:
        sizes = itertools.product(RANKS, SEQUENCES_A_RANK, (SHORT, LONGEST))
        rows = [("grpo", *each) for each in sizes]
    with tempfile.TemporaryDirectory() as scratch:
        table = _measured(Path(scratch), rows, options.steps)
    Console(width=140).print(table)


def _measured(
    scratch: Path, rows: Sequence[tuple[str, int, int, tuple[int, int]]], num_steps: int
) -> Table:
    table = Table(
        "kind", "ranks", "sequences", "tokens each", "CPU ms a step", "ms a 1,000", "MiB", "sent"
    )
    for kind, ranks, each, new in rows:
        sequences = ranks * each
        measured = steps(scratch, ranks, sequences, new, num_steps, kind)
        times = sorted(1e3 * step.cpu_seconds for step in measured)
        table.add_row(
            kind,
            f"{ranks:,}",
            f"{sequences:,}",
            f"{new[0] + PROMPT_TOKENS:,} to {new[1] + PROMPT_TOKENS:,}",
            f"{statistics.median(times):.1f} ({times[0]:.1f} to {times[-1]:.1f})",
            f"{1e3 * statistics.median(times) / sequences:.2f}",
            f"{1024 * max(step.peak_gib for step in measured):.0f}",
            f"{measured[0].num_bytes / 2**20:.1f} MiB, {measured[0].num_calls:,} calls, "
            f"{measured[0].num_stored:,} stored",
        )
    return table


if __name__ == "__main__":
    main()
