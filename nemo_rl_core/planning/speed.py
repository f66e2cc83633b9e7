"""Estimates the duration of a stage by a roofline of matrix products, memory and links.

Products reach a fraction of the peak, element-wise work takes the time of its bytes, and
communication overlaps with both. The fractions were fitted to one H100 and a model of 1.5 B
(docs/h100.md), which they match within 12 %, and to published steps of another system, up to 235 B
on 128 GPUs (`docs/generate/published_steps.py`), which they match within `TOTAL_FACTOR`.
"""

from dataclasses import dataclass, replace
from typing import Literal

from nemo_rl_core.config.training import DTensorTraining, MegatronTraining
from nemo_rl_core.planning.accelerators import Accelerator
from nemo_rl_core.planning.float8 import bytes_less
from nemo_rl_core.planning.float8_speed import saved_seconds
from nemo_rl_core.planning.load import (
    Layout,
    StageLoad,
    gathered_width,
    layout_of,
    ranks_of_engine,
    transport_of,
)
from nemo_rl_core.planning.memory import MemoryPlan, layer_bytes, weights_of_rank
from nemo_rl_core.planning.rollouts import PRODUCT_SHARE, rollout_seconds
from nemo_rl_core.planning.sizes import ModelSizes

TOTAL_FACTOR = 1.45
"""Factor within which `plan_speed` estimates the duration of every published step."""
_ATTENTION_SHARE = 0.28
"""Fraction of peak FLOP/s in attention, forward and backward, for rows of 8192 tokens. Measured."""
_MEGATRON_SHARE = 0.86
"""Speed of Megatron's layers without Transformer Engine relative to dtensor. Measured."""
_LAYER_PASSES = 2.6
"""Bytes that a forward pass of a layer moves, relative to those that it keeps. Fitted."""
_LOGIT_PASSES = 23
"""Number of times that a forward pass moves the float32 logits of a token. Fitted."""
_LINK_SHARE = 0.6
"""Fraction of a link's peak in a collective. Assumed."""
_UPDATE_BYTES = 40
"""Bytes per weight that AdamW and the gradient norm move."""

_TRANSFER_PASSES = 18
"""Number of times that both ends of a transfer read or write the bytes of all weights: the sender 3
to convert, 2 to pack and 2 for the checksum; the receiver 2 to copy, 2 for the checksum, 1 to look
for NaN and 6 in vLLM. Counted."""
_PASS_SHARE = 0.54
"""Fraction of the memory bandwidth in these passes. Measured: 3.2 GB by CUDA IPC in 0.17 s on an
H100, with 96 passes at that time."""
_GATHER_SECONDS = 0.3e-3
"""Overhead of a rank per tensor that several ranks gather. Assumed."""
_TENSOR_SECONDS = 1e-3
"""Overhead of an engine per tensor. Measured on a CPU: 0.4 ms in vLLM's reload and its checks; the
rest, for launches and synchronization on a GPU, is assumed."""
_TRANSFER_SECONDS = 1.2
"""Overhead per transfer: the 5.8 s of 1.5 B on an H100 minus 3.8 s of the transport at that time,
the overhead of its tensors, and at least 0.4 s for copies of the embedding to the host, which no
longer exist. docs/planning.md lists the parts; most of the rest is unknown."""
_REFIT_BYTES, _REFIT_SECONDS = 12.5e9, 3.2
"""Bytes per second and overhead of NeMo RL's weight transfer (v0.3). Fitted to
`docs/generate/published_steps.py`."""
_EXPERT_WIDTH = 4500
"""Width of an expert at which layers are as fast as dense ones with as many active weights;
narrower experts are proportionally slower, since their products are small. Fitted to
`docs/generate/published_steps.py`."""
_GOAL_BYTES = {False: 7.6e9, True: 14.1e9}
"""Goal of the project in bytes per second, by whether there are several machines: 7B on one machine
in 2 s, 70B on eight machines in 10 s."""


@dataclass(frozen=True)
class TransferPlan:
    """The transfer of new weights from the trainer to all engines.

    Attributes:
        published_seconds: Duration of NeMo RL's transfer of as many bytes, in which all ranks
            gather weights and pass them to the engine on their GPU.
        least_seconds: Duration if every GPU received only its part over the fastest link.
    """

    transport: str
    seconds: float
    published_seconds: float
    goal_seconds: float
    least_seconds: float


@dataclass(frozen=True)
class SpeedPlan:
    """Expected speed of a stage on all GPUs together.

    Attributes:
        trained: Tokens per second of optimizer steps; None without training.
        scored: Tokens per second of logprobs; None if there are none.
        sampled: New tokens per second; None without engines.
        step_seconds: Sum of its parts and the transfer; of an asynchronous step the longer of
            training and sampling counts. Sequences have the mean length if it is known.
    """

    trained: float | None
    utilization: float | None
    scored: float | None
    sampled: float | None
    transfer: TransferPlan | None
    training_seconds: float
    scoring_seconds: float
    rollout_seconds: float
    step_seconds: float


def plan_speed(load: StageLoad, memory: MemoryPlan, gpu: Accelerator) -> SpeedPlan | None:
    """Estimates the speed of a stage; None if the GPU's peak for its dtype is unknown."""
    peak = gpu.flops(load.dtype)
    if peak is None:
        return None
    trained = scored = sampled = utilization = None
    training_seconds = scoring_seconds = rollouts = 0.0
    if (training := load.training) is not None:
        trained = _tokens_per_second(load, gpu, peak, passes="training")
        flops = load.sizes.flops.flops("training", [load.longest]) / load.longest
        utilization = trained * flops / peak / load.cluster.num_workers
        tokens = load.mean_length * _sequences(load)
        training_seconds = tokens / trained * training.num_epochs
        if training.num_scorings:
            scored = _tokens_per_second(load, gpu, peak, passes="scoring")
            scoring_seconds = tokens / scored * training.num_scorings
    transfer = plan_transfer(load, gpu)
    step = training_seconds + scoring_seconds
    if load.sampling is not None:
        rollouts = rollout_seconds(load, memory, gpu, peak)
        sampled = load.sampling.num_sequences * load.mean_completion / rollouts
        step = max(step, rollouts) if load.sampling.is_asynchronous else step + rollouts
        step += transfer.seconds if transfer else 0.0
    return SpeedPlan(
        trained,
        utilization,
        scored,
        sampled,
        transfer,
        training_seconds,
        scoring_seconds,
        rollouts,
        step,
    )


def _sequences(load: StageLoad) -> int:
    if load.sampling is not None:
        return load.sampling.num_sequences
    return load.training.num_sequences if load.training else 0


def _tokens_per_second(
    load: StageLoad, gpu: Accelerator, peak: float, *, passes: Literal["training", "scoring"]
) -> float:
    """Returns the throughput of all ranks together."""
    assert load.training is not None
    config, sizes = load.training.config, load.sizes
    layout = layout_of(config, load.cluster.num_workers)
    tokens = load.training.max_tokens_per_microbatch
    is_training = passes == "training"
    # A backward pass is two forward passes; layers and logits may be recomputed.
    recomputes = bool(getattr(config, "recomputes", False))
    layer_passes = 3 + recomputes if is_training else 1
    head_passes = 4 if is_training else 1
    ranks = layout.tensor * layout.context * layout.pipeline
    head = 2.0 * sizes.vocabulary * sizes.hidden
    layers = 2.0 * sizes.flops.num_multiplied - head
    products = (layers * layer_passes / _speed_of_experts(sizes) + head * head_passes) / (
        peak * PRODUCT_SHARE
    )
    pairs = 2.0 * sizes.num_layers * sizes.queries * (load.longest + 1)
    products += pairs * layer_passes / (peak * _ATTENTION_SHARE)
    forward_passes = layer_passes - 2 * is_training
    products -= saved_seconds(
        load,
        layout,
        gpu,
        share=PRODUCT_SHARE,
        forward_passes=forward_passes,
        is_training=is_training,
    )
    kept = sizes.num_layers * layer_bytes(load, layout) * layout.tensor
    moved_bytes = (
        _LAYER_PASSES * kept * layer_passes + _LOGIT_PASSES * 4 * sizes.vocabulary * head_passes
    )
    seconds = tokens / ranks * (products + moved_bytes / (gpu.memory_gb_per_second * 1e9))
    if isinstance(config, MegatronTraining):
        seconds /= _MEGATRON_SHARE
    seconds += _tensor_seconds(load, layout, gpu) * layer_passes
    rows = max(load.training.num_sequences * load.mean_length / (layout.data * tokens), 1.0)
    # The stages of a pipeline are idle while it fills and drains.
    seconds *= 1 + (layout.pipeline - 1) / rows
    sent = _gather_seconds(load, layout, gpu, microbatches=rows if is_training else None)
    per_microbatch = max(seconds, sent)
    if not is_training:
        return layout.data * tokens / per_microbatch
    update = _UPDATE_BYTES * sizes.num_parameters / (layout.shards * layout.tensor)
    per_microbatch += update / (gpu.memory_gb_per_second * 1e9) / rows
    return layout.data * tokens / per_microbatch


def _speed_of_experts(sizes: ModelSizes) -> float:
    """Returns the speed of a model's layers relative to dense ones with as many active weights."""
    if not sizes.num_experts:
        return 1.0
    return min(sizes.mlp_width / sizes.experts_per_token / _EXPERT_WIDTH, 1.0)


def _busy_link(load: StageLoad, gpu: Accelerator, num_ranks: int, *, num_rings: int = 1) -> float:
    """Returns the bytes per second of each rank in rings that share a machine's network ports."""
    per_node = max(load.cluster.bundles_per_node)
    link = gpu.link_gb_per_second
    if num_ranks > per_node:
        link = min(link, gpu.network_gb_per_second * max(per_node // num_rings, 1))
    return link * 1e9 * _LINK_SHARE


def _gather_seconds(
    load: StageLoad, layout: Layout, gpu: Accelerator, *, microbatches: float | None
) -> float:
    """Returns the time to send weights, and in training float32 gradients, per micro-batch.

    FSDP2 gathers weights for every pass. Megatron's ranks keep their weights, and exchange
    gradients and new weights once per step. `microbatches` are per optimizer step; None for a
    forward pass without training, which gathers once.
    """
    assert load.training is not None
    width, weights = 2 if load.dtype == "bfloat16" else 4, load.sizes.num_parameters / layout.tensor
    config = load.training.config
    num_ranks, ring = layout.shards * layout.tensor, (layout.shards - 1) / layout.shards
    link = _busy_link(load, gpu, num_ranks, num_rings=layout.tensor)
    if isinstance(config, MegatronTraining):
        num_weights = weights_of_rank(load.sizes, layout)
        return (width + 4.0) * num_weights * ring / link / microbatches if microbatches else 0.0
    is_last = isinstance(config, DTensorTraining) and config.gradient_sync == "last_microbatch"
    gradient_bytes = 4.0 / (microbatches if is_last and microbatches else 1.0)
    gathered = width * weights - load.sizes.num_layers * bytes_less(load, layout, width)
    sent = 2 * gathered + gradient_bytes * weights if microbatches else gathered
    seconds = sent * ring / link
    copies = layout.data * layout.context // layout.shards
    if copies > 1 and microbatches:
        # Each rank sums its shard with those of the other copies, once per step.
        shard = 4.0 * weights / layout.shards
        network = gpu.network_gb_per_second * 1e9 * _LINK_SHARE
        seconds += 2 * (copies - 1) / copies * shard / network / microbatches
    return seconds


def _tensor_seconds(load: StageLoad, layout: Layout, gpu: Accelerator) -> float:
    """Returns the time that a forward pass of a micro-batch waits for tensor parallelism."""
    if layout.tensor == 1:
        return 0.0
    assert load.training is not None
    width = 2 if load.dtype == "bfloat16" else 4
    tokens = load.training.max_tokens_per_microbatch / layout.context
    layers = load.sizes.num_layers / layout.pipeline
    sent = 2 * layers * tokens * load.sizes.hidden * width
    return sent * 2 * (layout.tensor - 1) / layout.tensor / _busy_link(load, gpu, layout.tensor)


def plan_transfer(load: StageLoad, gpu: Accelerator) -> TransferPlan | None:
    """Plans the weight transfer before a step; None without training or sampling."""
    if load.training is None or load.sampling is None:
        return None
    linked = replace(load, own_scorers=())  # scorers receive no weights
    width = 2 if load.dtype == "bfloat16" else 4
    num_bytes = load.sizes.num_parameters * width
    over_machines = len(linked.machines) > 1
    link = gpu.network_gb_per_second if over_machines else gpu.link_gb_per_second
    link = gpu.memory_gb_per_second if linked.num_gpus == 1 else link
    seconds = _TRANSFER_SECONDS + load.sizes.num_tensors * _TENSOR_SECONDS
    seconds += _full_tensors_seconds(load, gpu)
    seconds += num_bytes * _TRANSFER_PASSES / (gpu.memory_gb_per_second * 1e9 * _PASS_SHARE)
    if transport_of(load) == "nccl":
        seconds += num_bytes / (link * 1e9 * _LINK_SHARE)  # a ring, through one port of the sender
    return TransferPlan(
        transport_of(load),
        seconds,
        num_bytes / _REFIT_BYTES + _REFIT_SECONDS,
        num_bytes / _GOAL_BYTES[over_machines],
        num_bytes / ranks_of_engine(load.sampling.config) / (link * 1e9 * _LINK_SHARE),
    )


def _full_tensors_seconds(load: StageLoad, gpu: Accelerator) -> float:
    """Returns the time until every rank of the trainer has gathered every weight."""
    assert load.training is not None
    layout = layout_of(load.training.config, load.cluster.num_workers)
    ranks = layout.shards * layout.tensor * layout.pipeline
    if ranks == 1:
        return 0.0
    sent = load.sizes.num_parameters * gathered_width(load) * (ranks - 1) / ranks
    return sent / _busy_link(load, gpu, ranks) + load.sizes.num_tensors * _GATHER_SECONDS
