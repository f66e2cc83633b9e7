"""The figures of SCALE.md, computed: `python deployment/scale.py` prints its tables.

Nothing here was measured. Each figure is a formula over the constants below, which name their
source; `tests/unit/tasks/test_deployment.py` holds SCALE.md to what this prints.
"""

import math
import sys
from dataclasses import dataclass

GPU_HOURS_PER_FAILURE = 54 * 24 * 16_384 / 419
"""The Llama 3 Herd of Models (2024), section 3.3.4: 419 unexpected interruptions of a job on 16,384
H100 within 54 days. Taken as a rate for each GPU, hosts and network included."""

PEAK_FLOPS, HBM_BYTES, HBM_BYTES_PER_SECOND = 989e12, 80e9, 3.35e12
"""NVIDIA H100 SXM data sheet: dense bfloat16, memory and its bandwidth."""

NVLINK_BYTES_PER_SECOND, NIC_BYTES_PER_SECOND = 450e9, 50e9
"""For each GPU and direction: NVLink 4 (the same data sheet), and one 400 Gbit/s port."""

NODE_WRITE_BYTES_PER_SECOND, STORE_BYTES_PER_SECOND = 2e9, 100e9
"""Assumed: what a node writes to the shared store, and what the store takes from all of them."""

LINK_SHARE, TRAIN_SHARE, DECODE_SHARE = 0.5, 0.4, 0.6
"""Assumed: of a link's peak in a collective, of peak FLOPs in training, of memory bandwidth in
decoding."""

STATE_BYTES, SAVED_BYTES = 16, 14
"""For each parameter. In memory: bfloat16 weights and gradients, float32 master weights and two
moments (2 + 2 + 4 + 8). Saved: all but the gradients."""

USED_SHARE = 0.6
"""Of the memory of a GPU for training state; the rest is for activations and the engine."""

TRAINED_FLOPS = 10
"""For each parameter and token: training 6, the trainer's logprobs 2, the reference's 2."""

RESTART_HOURS = 0.25
"""Assumed: new pods, the image from a node's cache, checkpoint read, engine started."""

SEQUENCES, CONTEXT = 128, 2048
"""Of one engine: how many it decodes at once, and their mean length in tokens."""

GPU_COUNTS = (1, 8, 64, 1024)


@dataclass(frozen=True)
class Model:
    """A class of models, with the key-value cache of its Llama 3 namesake.

    Attributes:
        name: By its size.
        num_parameters: In all.
        kv_bytes: Of one token, in bfloat16: layers * 2 * key-value heads * head size * 2.
        engine_gpus: GPUs that one engine needs for its weights and cache.
    """

    name: str
    num_parameters: float
    kv_bytes: int
    engine_gpus: int

    @property
    def min_gpus(self) -> int:
        """For training with Adam, fully sharded."""
        needed = self.num_parameters * STATE_BYTES / (HBM_BYTES * USED_SHARE)
        return max(self.engine_gpus, math.ceil(needed))


MODELS = (
    Model("1B", 1.24e9, 16 * 2 * 8 * 64 * 2, 1),
    Model("8B", 8.03e9, 32 * 2 * 8 * 128 * 2, 1),
    Model("70B", 70.6e9, 80 * 2 * 8 * 128 * 2, 8),
    Model("405B", 405.9e9, 126 * 2 * 8 * 128 * 2, 16),
)


def mtbf_hours(num_gpus: int) -> float:
    """Mean hours between two interruptions of a job that needs all of its GPUs."""
    return GPU_HOURS_PER_FAILURE / num_gpus


def sync_seconds(model: Model, num_gpus: int) -> float:
    """For bfloat16 weights from the trainer's shards to every GPU of every engine.

    Each GPU receives its engine's share of the weights once; over the network, where there is more
    than one machine.
    """
    link = NVLINK_BYTES_PER_SECOND if num_gpus <= 8 else NIC_BYTES_PER_SECOND
    # One GPU hands tensors over in its own memory.
    link = HBM_BYTES_PER_SECOND if num_gpus == 1 else link
    return 2 * model.num_parameters / model.engine_gpus / (link * LINK_SHARE)


def save_seconds(model: Model, num_gpus: int) -> float:
    """For a sharded checkpoint, all machines writing at once."""
    num_nodes = math.ceil(num_gpus / 8)
    speed = min(num_nodes * NODE_WRITE_BYTES_PER_SECOND, STORE_BYTES_PER_SECOND)
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
    """Of the time: saves, work done twice after a failure, and restarts."""
    return save / (interval + save) + (interval / 2 + RESTART_HOURS * 3600) / mtbf


def rollout_share(model: Model) -> float:
    """Of a step's time, trainer and engine taking turns on the same GPUs.

    Decoding reads the weights and every sequence's cache for each token; training computes.
    """
    read = 2 * model.num_parameters + SEQUENCES * CONTEXT * model.kv_bytes
    bandwidth = model.engine_gpus * HBM_BYTES_PER_SECOND * DECODE_SHARE
    decode = read / bandwidth / SEQUENCES * model.engine_gpus  # GPU-seconds a token
    train = TRAINED_FLOPS * model.num_parameters / (PEAK_FLOPS * TRAIN_SHARE)
    return decode / (decode + train)


def scale_table() -> list[str]:
    """A line for each number of GPUs and each model that fits."""
    lines = [
        "| GPUs | shape | model | state per GPU | weight sync | checkpoint | save takes "
        "| MTBF | save every | time lost |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for num_gpus in GPU_COUNTS:
        fitting = [model for model in MODELS if model.min_gpus <= num_gpus]
        lines += [_line(model, num_gpus) for model in fitting]
    return lines


def _line(model: Model, num_gpus: int) -> str:
    shape = {1: "one_gpu", 8: "node_8gpu"}.get(num_gpus, f"cluster({num_gpus // 8})")
    save, mtbf = save_seconds(model, num_gpus), mtbf_hours(num_gpus) * 3600
    interval = daly_seconds(save, mtbf)
    cells = [
        str(num_gpus),
        f"`{shape}`",
        model.name,
        f"{model.num_parameters * STATE_BYTES / num_gpus / 1e9:.1f} GB",
        _time(sync_seconds(model, num_gpus)),
        f"{model.num_parameters * SAVED_BYTES / 1e9:,.0f} GB",
        _time(save),
        _time(mtbf),
        _time(interval),
        f"{100 * lost_share(save, interval, mtbf):.2f} %",
    ]
    return f"| {' | '.join(cells)} |"


def model_table() -> list[str]:
    """What does not depend on the number of GPUs."""
    lines = [
        "| model | GPUs to train (Adam) | GPUs of an engine | bfloat16 weights | rollouts' share |",
        "|---|---|---|---|---|",
    ]
    for model in MODELS:
        lines.append(
            f"| {model.name} | {model.min_gpus} | {model.engine_gpus} "
            f"| {2 * model.num_parameters / 1e9:,.0f} GB | {100 * rollout_share(model):.0f} % |"
        )
    return lines


def _time(seconds: float) -> str:
    for size, unit in ((86_400 * 365, "years"), (86_400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"


if __name__ == "__main__":
    sys.stdout.write("\n".join([*model_table(), "", *scale_table(), ""]))
