"""Prints the tables of `deployment/SCALE.md`: `cd docs && ../.venv/bin/python -m generate.scale`.

Nothing here was measured by this project. The seconds of a step are those of `nemo-rl plan`
(`nemo_rl_core/planning/`), which has all constants of the roofline; those of saves and failures are
here. `tests/unit/planning/test_scale.py` compares SCALE.md with the output.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from generate.published_steps import MODELS as CONFIGS
from generate.published_steps import SOURCES, STEPS, Published, StepSetting
from nemo_rl_core.config.training import DTensorTraining, MegatronTraining, TrainingConfig
from nemo_rl_core.planning.accelerators import ACCELERATORS
from nemo_rl_core.planning.sizes import sizes_of
from nemo_rl_core.planning.speed import plan_transfer

GPU_HOURS_PER_FAILURE = 54 * 24 * 16_384 / 419
"""The Llama 3 Herd of Models (2024), section 3.3.4: 419 unexpected interruptions of a job on 16,384
H100 within 54 days. Used as a rate per GPU, hosts and network included."""

NODE_WRITE_BYTES_PER_SECOND, STORE_BYTES_PER_SECOND = 2e9, 100e9
"""Assumed rate at which a node writes to the shared store, and the total rate of the store."""

SENT_BYTES_PER_NODE_AND_SECOND = 4 * 2**30 / 3.0
"""Rate to the bucket: four processes per machine, each with 3.0 CPU-seconds per GiB, measured with
an S3 server on loopback (docs/results.md); ports and the bucket are assumed to be faster."""

STATE_BYTES, SAVED_BYTES = 16, 12
"""Bytes per parameter, in float32. In memory: weights, gradients, two moments. During a save:
weights and moments."""

USED_SHARE = 0.6
"""Share of GPU memory for training state; the rest is for activations and the engine."""

RESTART_HOURS = 0.25
"""Assumed restart time: new pods, image from the node's cache, checkpoint read, engine started."""

MEAN_TOKENS, NUM_SEQUENCES = 900, 2048
"""Step size: average tokens of a sequence with its prompt, of at most 4,096; and completions, or 8
per GPU if that is more."""

GPU_COUNTS = (1, 8, 64, 1024)
H100 = ACCELERATORS["nvidia-h100"]


@dataclass(frozen=True)
class Model:
    """A class of models, with the sizes of its Llama 3 namesake.

    Attributes:
        name: Class of the model, such as 8B.
        config: Name in `generate.published_steps`.
        engine_gpus: GPUs of an engine: the fewest that fit its weights and a cache.
        training: Training layout.
        engine_memory: Share of a GPU that an engine reserves.
    """

    name: str
    config: str
    engine_gpus: int
    training: TrainingConfig
    engine_memory: float = 0.6

    @property
    def num_parameters(self) -> float:
        """Number of parameters."""
        return sizes_of(CONFIGS[self.config]).num_parameters

    @property
    def min_gpus(self) -> int:
        """The fewest GPUs for training with Adam, fully sharded."""
        needed = self.num_parameters * STATE_BYTES / (H100.memory_gib * 2**30 * USED_SHARE)
        return max(self.engine_gpus, math.ceil(needed))

    def step(self, num_gpus: int) -> StepSetting:
        """Returns a step of GRPO on that many GPUs, with one update from all of its completions."""
        number = max(NUM_SEQUENCES, 8 * num_gpus)
        return StepSetting(
            self.config,
            num_gpus,
            self.training,
            self.engine_gpus,
            MEAN_TOKENS,
            num_sequences=number,
            num_trained_at_once=number,
            engine_memory=self.engine_memory,
        )


_SHARDED = DTensorTraining(activation_checkpointing=True)
MODELS = (
    Model("1B", "Llama 3.2 1B", 1, _SHARDED),
    Model("8B", "Llama 3.1 8B", 1, _SHARDED),
    Model(
        "70B",
        "Llama 3.1 70B",
        4,
        MegatronTraining(tensor_parallel_size=4, pipeline_parallel_size=4),
    ),
    Model(
        "405B",
        "Llama 3.1 405B",
        16,
        MegatronTraining(tensor_parallel_size=8, pipeline_parallel_size=16),
        engine_memory=0.85,
    ),
)


def mtbf_hours(num_gpus: int) -> float:
    """Mean hours between two interruptions of a job that needs all of its GPUs."""
    return GPU_HOURS_PER_FAILURE / num_gpus


def save_seconds(model: Model, num_gpus: int) -> float:
    """Seconds of a sharded checkpoint that all machines write at once."""
    num_nodes = math.ceil(num_gpus / 8)
    speed = min(num_nodes * NODE_WRITE_BYTES_PER_SECOND, STORE_BYTES_PER_SECOND)
    return model.num_parameters * SAVED_BYTES / speed


def send_seconds(model: Model, num_gpus: int) -> float:
    """Seconds until all machines have sent their shards of a save to the bucket."""
    speed = math.ceil(num_gpus / 8) * SENT_BYTES_PER_NODE_AND_SECOND
    return model.num_parameters * SAVED_BYTES / speed


def daly_seconds(save: float, mtbf: float) -> float:
    """The best time between two saves.

    Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart dumps",
    equation 37; its first factor is that of Young 1974.

    Args:
        save: Seconds that a save stops the work.
        mtbf: Mean seconds between failures.
    """
    if save >= 2 * mtbf:
        return mtbf
    ratio = save / (2 * mtbf)
    return math.sqrt(2 * save * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save


def lost_share(save: float, interval: float, mtbf: float) -> float:
    """Share of time that is lost to saves, repeated work after failures, and restarts."""
    return save / (interval + save) + (interval / 2 + RESTART_HOURS * 3600) / mtbf


def fitting() -> list[tuple[Model, int]]:
    """Every model with every number of GPUs that can train it."""
    return [(model, count) for count in GPU_COUNTS for model in MODELS if model.min_gpus <= count]


def model_table() -> list[str]:
    """Returns the table of figures that do not depend on the number of GPUs."""
    lines = _heading("model", "GPUs to train (Adam)", "GPUs of an engine", "bfloat16 weights")
    lines += [
        _row(model.name, model.min_gpus, model.engine_gpus,
             f"{2 * model.num_parameters / 1e9:,.0f} GB")
        for model in MODELS
    ]  # fmt: skip
    return lines


def published_table() -> list[str]:
    """Returns each published step next to the estimate of the roofline."""
    lines = _heading(
        "model", "backend", "GPUs", "seconds a step", "training", "logprobs", "rollouts",
        "weight sync", "rollouts' share", "tokens/s a GPU", "source",
    )  # fmt: skip
    return [*lines, *map(_published_line, STEPS)]


def _published_line(step: Published) -> str:
    setting, expected = step.setting, step.setting.seconds
    total = sum(expected.values())
    shown = [
        _with_measured(expected[part], step.parts[part] if step.parts else None)
        for part in expected
    ]
    share = step.parts["rollouts"] / step.total_seconds if step.parts else None
    rate = setting.num_sequences * setting.mean_tokens / setting.num_gpus
    return _row(
        setting.model,
        setting.training.backend,
        setting.num_gpus,
        _with_measured(total, step.total_seconds),
        *shown,
        _with_measured(100 * expected["rollouts"] / total, share and 100 * share) + " %",
        _with_measured(rate / total, rate / step.total_seconds),
        step.source,
    )


def _with_measured(expected: float, measured: float | None) -> str:
    digits = 0 if max(expected, measured or 0) >= 10 else 1
    text = f"{expected:,.{digits}f}"
    return text if measured is None else f"{measured:,.{digits}f} ({text})"


def source_lines() -> list[str]:
    """Returns the sources that the letters of the published table stand for."""
    return [f"- {letter}: {text}." for letter, text in SOURCES.items()]


def step_table() -> list[str]:
    """Returns the expected seconds of a step, by part."""
    lines = _heading(
        "GPUs", "shape", "model", "completions", "seconds a step", "training", "logprobs",
        "rollouts", "weight sync", "rollouts' share", "tokens/s a GPU",
    )  # fmt: skip
    for model, num_gpus in fitting():
        setting = model.step(num_gpus)
        seconds = setting.seconds
        total = sum(seconds.values())
        tokens = setting.num_sequences * setting.mean_tokens
        lines.append(
            _row(
                num_gpus,
                _shape(num_gpus),
                model.name,
                f"{setting.num_sequences:,}",
                f"{total:,.0f}",
                *(f"{value:,.1f}" for value in seconds.values()),
                f"{100 * seconds['rollouts'] / total:.0f} %",
                f"{tokens / total / num_gpus:,.0f}",
            )
        )
    return lines


def scale_table() -> list[str]:
    """Returns saves, failures and transfers, for each number of GPUs and each model that fits."""
    lines = _heading(
        "GPUs", "shape", "model", "state per GPU", "weight sync of this code", "checkpoint",
        "save takes", "sent in", "MTBF", "save every", "time lost",
    )  # fmt: skip
    return [*lines, *(_scale_line(model, num_gpus) for model, num_gpus in fitting())]


def _scale_line(model: Model, num_gpus: int) -> str:
    save, mtbf = save_seconds(model, num_gpus), mtbf_hours(num_gpus) * 3600
    interval = save_every_seconds(model, num_gpus)
    transfer = plan_transfer(model.step(num_gpus).load, H100)
    assert transfer is not None
    return _row(
        num_gpus,
        _shape(num_gpus),
        model.name,
        f"{model.num_parameters * STATE_BYTES / num_gpus / 1e9:.1f} GB",
        _time(transfer.seconds),
        f"{model.num_parameters * SAVED_BYTES / 1e9:,.0f} GB",
        _time(save),
        _time(send_seconds(model, num_gpus)),
        _time(mtbf),
        _time(interval),
        f"{100 * lost_share(save, interval, mtbf):.2f} %",
    )


def save_every_seconds(model: Model, num_gpus: int) -> float:
    """Returns the best interval, or the time to send a save if that is longer."""
    best = daly_seconds(save_seconds(model, num_gpus), mtbf_hours(num_gpus) * 3600)
    return max(best, send_seconds(model, num_gpus))


def _shape(num_gpus: int) -> str:
    return f"`{ ({1: 'one_gpu', 8: 'node_8gpu'}.get(num_gpus) or f'cluster({num_gpus // 8})') }`"


def _heading(*names: str) -> list[str]:
    return [_row(*names), "|" + "---|" * len(names)]


def _row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _time(seconds: float) -> str:
    for size, unit in ((86_400 * 365, "years"), (86_400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"


def tables() -> Sequence[list[str]]:
    """Returns all tables of SCALE.md, in its order."""
    return model_table(), published_table(), source_lines(), step_table(), scale_table()


if __name__ == "__main__":
    sys.stdout.write("\n\n".join("\n".join(table) for table in tables()) + "\n")
