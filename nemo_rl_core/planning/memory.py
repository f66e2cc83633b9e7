"""Computes the GPU memory of a stage.

The formulas follow the backends: weights and moments in float32, sharded; matrix products in 16
bits; one layer gathered while the next is fetched, embedding and head for an entire pass; logits in
chunks. `tests/unit/planning/` compares them with torch's own counts, over its fake process group
and by saved-tensor hooks, and with measurements on one H100.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from nemo_rl_core.config.training import DTensorTraining, LoRAConfig, MegatronTraining
from nemo_rl_core.distributed.weight_sync.routes import GPU_BUCKET_BYTES
from nemo_rl_core.planning.engine_memory import (
    CONTEXT_GIB,
    ENGINE_CONTEXT_GIB,
    GIB,
    parts_of_engine,
)
from nemo_rl_core.planning.float8 import bytes_less, rounding_gib
from nemo_rl_core.planning.load import Layout, StageLoad, gathered_width, layout_of
from nemo_rl_core.planning.scorers import (
    largest_dedicated_scorer_gib,
    largest_scorer_gib,
    scorer_contexts_gib,
)
from nemo_rl_core.planning.sizes import ModelSizes

_FLOAT32, _MOMENTS = 4, 8
_LOGITS_BYTES = 2**30
_MAX_ROWS, _ROW_COPIES = 1024, 4
"""Rows of logits at once on a GPU, and float32 tensors of that size; copied from
`functional/logprobs.py`, since importing torch takes seconds."""
_QUANTIZED = {"8bit": 1.0, "4bit": 0.52}
"""Bytes per weight; 4 bits include the constants, which are quantized too (QLoRA)."""
_SENT_BUCKETS = 3
"""Buckets of a sender on a GPU: two buffers, and the tensors gathered for the next one."""
_RECEIVED_COPIES = 2
"""Copies of a bucket or of a larger tensor: the receiver's and vLLM's converted one."""


@dataclass(frozen=True)
class MemoryPlan:
    """Planned memory of one GPU in GiB.

    Attributes:
        parts: Memory by name: weights, gradients, moments, reference, critic, whole gradients,
            gathered weights, gathered gradients, activations, logits, transfer, engine weights, KV
            cache, engine workspace, scorer (the largest one that shares the trainer's GPU), scorer
            on its own (the largest one on a dedicated GPU, with its context), contexts. Not all
            parts exist at the same time.
        training: Peak during training; 0 without training.
        sampling: Peak while the engine is awake; 0 without engines.
        scoring: Peak while a model scores, on the trainer's first GPU or on a dedicated GPU; 0
            without a scorer.
        kv_tokens: Number of tokens that fit the KV cache of one engine.
        host: Host memory per GPU for offloaded tensors in GiB.
    """

    parts: Mapping[str, float]
    training: float
    sampling: float
    kv_tokens: float
    host: float = 0.0
    scoring: float = 0.0

    @property
    def peak(self) -> float:
        """Peak memory of the stage."""
        return max(self.training, self.sampling, self.scoring)


def plan_memory(load: StageLoad, memory_gib: float) -> MemoryPlan:
    """Plans the memory of one GPU for a stage."""
    trained = _TrainedModel(load) if load.training else None
    resident = trained.resident if trained else {}
    engine, kv_tokens = parts_of_engine(load, memory_gib)
    trainer_context = CONTEXT_GIB * (trained is not None)
    engine_context = ENGINE_CONTEXT_GIB * bool(engine)
    contexts = trainer_context + engine_context + scorer_contexts_gib(load)
    base = sum(resident.values()) + contexts
    transfer = _transfer_gib(load) if trained and engine else 0.0
    in_passes = trained.peak - trained.reference_on_host if trained else 0.0
    awake, never_asleep = sum(engine.values()), 0.0
    training = base + in_passes if trained else 0.0
    # The KV cache wakes up after the transfer.
    offloaded = trained.offloaded if trained else (0.0, 0.0)
    sending, generating = base - offloaded[0], base - offloaded[1]
    sending += transfer + awake - engine.get("KV cache", 0.0)
    sampling = max(sending, generating + awake) if engine else 0.0
    if load.has_own_engines:  # the larger of a trainer's GPU and an engine's
        base -= engine_context
        training = base + in_passes if trained else 0.0
        sampling = max(
            base + transfer, awake + engine_context + _received_gib(load) * bool(trained)
        )
    elif load.sampling and load.sampling.is_asynchronous:
        training += awake
        sampling = base + transfer + awake
        never_asleep = awake
    scorer = largest_scorer_gib(load, memory_gib)
    own_scorer = largest_dedicated_scorer_gib(load, memory_gib)
    scoring = base - offloaded[1] + never_asleep + scorer if scorer else 0.0
    parts = resident | (trained.parts if trained else {})
    parts |= {"transfer": transfer} if transfer else {}
    parts |= {"scorer": scorer} if scorer else {}
    parts |= {"scorer on its own": own_scorer} if own_scorer else {}
    return MemoryPlan(
        parts={**parts, **engine, "contexts": contexts},
        training=training,
        sampling=sampling,
        kv_tokens=kv_tokens,
        host=trained.host if trained else 0.0,
        scoring=max(scoring, own_scorer),
    )


class _TrainedModel:
    """Memory of one rank of a trainer; all values in GiB."""

    def __init__(self, load: StageLoad) -> None:
        assert load.training is not None
        self._load, self._training, self._sizes = load, load.training, load.sizes
        self._config = load.training.config
        self._layout = layout_of(self._config, load.cluster.num_workers)
        self._is_half = load.dtype == "bfloat16"
        lora = self._config.lora if isinstance(self._config, DTensorTraining) else None
        self._num_weights = weights_of_rank(self._sizes, self._layout)
        self._trained = _adapter_weights(self._sizes, lora) if lora else self._num_weights
        self._has_lora = lora is not None
        self._adapted = lora.target_modules if lora else ()
        self._on_gpu = not (isinstance(self._config, DTensorTraining) and self._config.cpu_offload)

    @property
    def _is_quantized(self) -> bool:
        return isinstance(self._config, DTensorTraining) and self._config.weights != "full"

    @property
    def _gib_per_sharded_byte(self) -> float:
        """GiB on the GPU per byte of a sharded tensor; 0 with `cpu_offload`."""
        return 1 / self._layout.shards / GIB * self._on_gpu

    @property
    def _gradients(self) -> float:
        if isinstance(self._config, MegatronTraining):  # unsharded, in a float32 buffer
            return self._num_weights * _FLOAT32 / GIB
        return self._trained * _FLOAT32 * self._gib_per_sharded_byte

    @property
    def resident(self) -> dict[str, float]:
        """Memory that stays allocated between steps, by part."""
        moments = 2 if self._training.moments == "8bit" else _MOMENTS
        parts = {
            "weights": self._weights(),
            "moments": moments * self._trained * self._gib_per_sharded_byte,
        }
        if isinstance(self._config, MegatronTraining):
            parts["gradients"] = self._gradients
        parts["reference"] = self._reference
        if self._training.has_critic:
            parts["critic"] = self._weights() + moments * self._trained * self._gib_per_sharded_byte
        return {name: size for name, size in parts.items() if size}

    @property
    def _reference(self) -> float:
        reference = self._training.reference
        is_base = self._has_lora and self._training.reference_is_base
        # Megatron's backend keeps it on the host.
        if reference is None or is_base or isinstance(self._config, MegatronTraining):
            return 0.0
        return _FLOAT32 * weights_of_rank(reference, self._layout) * self._gib_per_sharded_byte

    @property
    def host(self) -> float:
        """Host memory for `cpu_offload` or `offload_for_generation`."""
        if self._on_gpu:
            return self._on_host[1]
        trained = (_FLOAT32 + _MOMENTS) * self._trained
        return (self._num_weights * _FLOAT32 + trained) / self._layout.shards / GIB

    @property
    def offloaded(self) -> tuple[float, float]:
        """Part of `resident` that is freed while weights are sent, and during generation."""
        sending, generating = self._on_host
        buffers = self._gradients if isinstance(self._config, MegatronTraining) else 0.0
        return sending + buffers, generating + buffers

    @property
    def _on_host(self) -> tuple[float, float]:
        """Part of `offloaded` that is on the host."""
        offload = getattr(self._config, "offload_for_generation", "none")
        resident = self.resident
        optimizer = resident.get("moments", 0.0) * (1 + self._training.has_critic)
        optimizer += self._main_weights
        if offload != "all":
            return (optimizer, optimizer) if offload == "optimizer" else (0.0, 0.0)
        everything = sum(resident.values()) - resident.get("gradients", 0.0)
        return everything - (self._weights() - self._main_weights), everything

    @property
    def reference_on_host(self) -> float:
        """The reference's part of `resident`, if it stays on the host during training."""
        is_away = getattr(self._config, "offload_for_generation", "none") == "all"
        return self._reference * is_away

    @property
    def _main_weights(self) -> float:
        """Megatron's float32 copies of 16-bit weights, a part of the optimizer's state."""
        is_copied = self._is_half and isinstance(self._config, MegatronTraining)
        return self._num_weights * _FLOAT32 / self._layout.shards / GIB * is_copied

    def _weights(self) -> float:
        config = self._config
        if isinstance(config, MegatronTraining):
            return self._num_weights * (2 if self._is_half else _FLOAT32) / GIB + self._main_weights
        if isinstance(config, DTensorTraining) and config.weights != "full":
            layers = self._sizes.num_layers * self._sizes.linear_weights
            packed = layers * _QUANTIZED[config.weights]
            return (
                packed + (self._num_weights - layers) * _FLOAT32 + self._trained * _FLOAT32
            ) / GIB
        adapters = self._trained if self._has_lora else 0
        return (self._num_weights + adapters) * _FLOAT32 * self._gib_per_sharded_byte

    @property
    def _layer(self) -> float:
        """Number of weights of a layer on this tensor rank."""
        sizes, layout = self._sizes, self._layout
        split = sizes.layer_weights - sizes.replicated_weights - sizes.expert_weights
        experts = sizes.expert_weights / layout.expert
        return sizes.replicated_weights + (split + experts) / layout.tensor

    @property
    def _outer(self) -> float:
        return self._sizes.outer_weights / self._layout.tensor

    @property
    def _width(self) -> int:
        return 2 if self._is_half else _FLOAT32

    def _gathered(self, num_layers: int) -> float:
        """Weights in the dtype of matrix products: gathered by FSDP2, or cast by autocast.

        Quantized weights are dequantized to float32, cast and freed layer by layer.
        """
        if isinstance(self._config, MegatronTraining):
            return 0.0
        if self._is_quantized:
            sizes, cast = self._sizes, self._width * self._is_half
            largest = sizes.hidden * max(sizes.mlp_width, sizes.queries)
            others = num_layers * (self._layer - sizes.linear_weights) + self._outer
            return (largest * (_FLOAT32 + cast) + others * cast) / GIB
        if not self._layout.is_wrapped and not self._is_half:
            return 0.0
        saved = num_layers * bytes_less(self._load, self._layout, self._width)
        return ((num_layers * self._layer + self._outer) * self._width - saved) / GIB

    @property
    def _keeps_casts(self) -> bool:
        """Whether autocast's copies of all weights are kept for the backward pass."""
        return self._is_half and not self._layout.is_wrapped

    @property
    def _tokens(self) -> float:
        return self._training.max_tokens_per_microbatch / self._layout.context

    @property
    def _layers_of_rank(self) -> float:
        return self._sizes.num_layers / self._layout.pipeline

    @property
    def _layer_activations(self) -> float:
        return self._tokens * layer_bytes(self._load, self._layout) / GIB + self._adapted_experts

    @property
    def _adapted_experts(self) -> float:
        """A layer's experts with added adapters, which are kept for the backward pass."""
        parts = {"experts.gate_up_proj": 2 / 3, "experts.down_proj": 1 / 3}
        share = sum(parts[n] for n in parts if any(t.endswith(n) for t in self._adapted))
        return share * self._sizes.expert_weights * self._width / GIB

    @property
    def _activations(self) -> float:
        last = self._tokens * self._sizes.hidden * 8 / GIB  # the last norm
        if not self._config_recomputes:
            return self._layers_of_rank * self._layer_activations + last
        split = self._layout.tensor if self._config.sequence_parallel else 1
        residual_width = 2 if self._is_half and self._layout.is_wrapped else _FLOAT32
        kept = self._tokens * self._sizes.hidden * residual_width / split
        return self._layers_of_rank * kept / GIB + last

    @property
    def _config_recomputes(self) -> bool:
        return bool(getattr(self._config, "recomputes", False))

    @property
    def _temporaries(self) -> float:
        """Gradients of activations within a layer, counted by torch's tracker."""
        wide = 2 * self._sizes.mlp_width / self._layout.tensor + 3.5 * self._sizes.hidden
        return self._tokens * wide * self._width / GIB + self._rounding + self._adapted_experts

    @property
    def _rounding(self) -> float:
        return rounding_gib(self._load, self._layout)

    @property
    def _logits(self) -> float:
        if not self._training.has_head:
            return 0.0
        row = _ROW_COPIES * _FLOAT32 * self._sizes.vocabulary / self._layout.tensor
        rows = max(1, min(_MAX_ROWS, _LOGITS_BYTES // row))
        return min(rows, self._tokens) * row / GIB

    @property
    def _head_gradient(self) -> float:
        if self._has_lora or not self._training.has_head:
            return 0.0
        width = self._width if self._layout.is_wrapped else _FLOAT32
        return self._sizes.vocabulary * self._sizes.hidden / self._layout.tensor * width / GIB

    def _within_head(self, inner: float) -> float:
        """The head's backward pass: float32 sums over chunks, converted to the weight's dtype."""
        kept = self._head_gradient
        if not (self._is_half and self._layout.is_wrapped):
            return inner + kept
        return 2 * kept + max(inner, kept)

    @property
    def _gathered_gradients(self) -> float:
        if not self._layout.is_wrapped or self._has_lora:
            return 0.0
        if isinstance(self._config, MegatronTraining):
            return 0.0
        return (self._layer + self._outer) * _FLOAT32 / GIB

    @property
    def parts(self) -> dict[str, float]:
        """Memory that exists only during a step, by part."""
        all_layers = self._keeps_casts and not self._config_recomputes
        parts = {
            "gradients": self._gradients,
            "whole gradients": self._whole_gradients,
            "gathered weights": self._gathered(self._sizes.num_layers if all_layers else 2),
            "gathered gradients": self._gathered_gradients,
            "activations": self._activations,
            "logits": self._logits,
        }
        return {name: size for name, size in parts.items() if size}

    @property
    def _is_one_microbatch(self) -> bool:
        rows = -(-self._training.num_sequences // self._layout.data)
        return rows * self._load.longest <= self._training.max_tokens_per_microbatch

    @property
    def _whole_gradients(self) -> float:
        """Float32 sums of all micro-batches but the last, before ranks exchange them."""
        config = self._config
        is_kept = isinstance(config, DTensorTraining) and config.gradient_sync == "last_microbatch"
        if not is_kept or self._layout.shards == 1 or self._is_one_microbatch:
            return 0.0
        return self._trained * _FLOAT32 / GIB

    @property
    def _peak_of_whole_gradients(self) -> float:
        """Peak if gradients are reduced in the last micro-batch, which starts with all sums."""
        sums = self._whole_gradients
        recomputed = self._layer_activations * self._config_recomputes
        forward = self._activations + self._gathered(2) + self._rounding
        inner = self._logits if self._config_recomputes else max(self._logits, self._temporaries)
        head = self._activations + self._within_head(inner) + self._gathered(1)
        # The last layer's backward pass, or the copy that its reduction then sends.
        sent = 0.0 if self._has_lora else self._layer * _FLOAT32 / GIB
        first = self._activations + self._gathered(2) + self._head_gradient
        first += max(recomputed + self._temporaries, sent)
        # Embedding and head come at the end, when the layers' sums are sharded.
        outer = 0.0 if self._has_lora else self._outer * _FLOAT32 / GIB
        end = self._gradients + outer + self._gathered(0) + self._gathered_gradients
        return max(sums + forward, sums + head, sums + first, end)

    @property
    def peak(self) -> float:
        """Peak memory of a step in addition to `resident`."""
        if self._whole_gradients:
            return self._peak_of_whole_gradients
        is_megatron = isinstance(self._config, MegatronTraining)
        gradients = 0.0 if is_megatron else self._gradients
        previous = 0.0 if self._is_one_microbatch else gradients
        all_layers, keeps_casts = self._sizes.num_layers, self._keeps_casts
        kept = all_layers if keeps_casts and not self._config_recomputes else 1
        # Autocast caches casts of trained weights until the end of the forward pass.
        cast = keeps_casts and not (self._has_lora and self._config_recomputes)
        forward = self._activations + self._gathered(all_layers if cast else 2) + self._rounding
        # The logits, then the gradients within the last layer, before anything is freed.
        inner = self._logits if self._config_recomputes else max(self._logits, self._temporaries)
        head = self._activations + self._within_head(inner) + self._gathered(kept)
        last = self._layer_activations + self._temporaries + self._gathered(2)
        last += self._head_gradient * self._layout.is_wrapped
        if self._gathered_gradients:
            last += self._layer * _FLOAT32 / GIB
        # FSDP2 reduces embedding and head at the very end, in float32.
        end = self._gathered(0) + self._gathered_gradients
        # Gradients of embedding and head, which the root module owns, come after the layers'.
        outer_share = self._outer / self._num_weights * bool(self._gathered_gradients)
        layer_gradients = gradients * (1 - outer_share)
        return max(previous + forward, previous + head, layer_gradients + last, gradients + end)


def layer_bytes(load: StageLoad, layout: Layout) -> float:
    """Returns the bytes per token that a layer keeps for its backward pass.

    Counted from transformers' layers by saved-tensor hooks; see the tests. `varlen` and `flex` keep
    grouped keys unchanged, while `sdpa` with a mask repeats them for every head.
    """
    assert load.training is not None
    sizes, config = load.sizes, load.training.config
    half = load.dtype == "bfloat16"
    width = 2 if half else _FLOAT32
    keys = sizes.queries if _repeats_keys(load) else sizes.keys
    inner = 2.0 * width * (sizes.queries + keys)
    if sizes.has_head_norms:
        inner += (_FLOAT32 + (width if half else _FLOAT32)) * (sizes.queries + sizes.keys)
        inner += _FLOAT32 * (sizes.num_heads + sizes.num_kv_heads)
    inner += _mlp_bytes(sizes, width, is_wrapped=layout.is_wrapped)
    if isinstance(config, MegatronTraining) and _repeats_keys(load):
        # Megatron's attention keeps scores, their float32 softmax, and weights of all pairs.
        inner += sizes.num_heads * load.longest * (2 * width + _FLOAT32)
    split = layout.tensor
    outer = _norm_bytes(sizes, half=half, is_wrapped=layout.is_wrapped) * sizes.hidden + 8
    return inner / split + outer / (split if config.sequence_parallel else 1)


def _norm_bytes(sizes: ModelSizes, *, half: bool, is_wrapped: bool) -> int:
    """Returns the bytes of both norms and the projection inputs, per token and hidden unit."""
    if half and is_wrapped:
        return 16
    return 26 if half and not sizes.num_experts else 24


def _mlp_bytes(sizes: ModelSizes, width: int, *, is_wrapped: bool) -> float:
    if not sizes.num_experts:
        return 4.0 * width * sizes.mlp_width
    # Experts of one rank compute in float32: autocast does not support grouped products.
    width = width if is_wrapped else _FLOAT32
    per_token = sizes.experts_per_token
    routed = 4.0 * width * sizes.mlp_width + 2 * width * per_token * sizes.hidden
    return routed + 40 * per_token + _FLOAT32 * sizes.num_experts


def _repeats_keys(load: StageLoad) -> bool:
    assert load.training is not None
    config = load.training.config
    attention = getattr(config, "attention", "sdpa")
    if attention == "auto":
        # In float32 that is flex, which Megatron's backend lacks.
        lacks_kernel = load.dtype == "float32" and isinstance(config, MegatronTraining)
        return lacks_kernel or config.context_parallel_size > 1
    return bool(attention == "sdpa")


def weights_of_rank(sizes: ModelSizes, layout: Layout) -> float:
    """Returns the weights of a tensor-, pipeline- and expert-parallel rank, before sharding."""
    split = sizes.layer_weights - sizes.replicated_weights - sizes.expert_weights
    layer = (
        sizes.replicated_weights + (split + sizes.expert_weights / layout.expert) / layout.tensor
    )
    # The first stage of a pipeline has the embedding, the last one the head.
    ends = sizes.outer_weights / layout.tensor / min(layout.pipeline, 2)
    return sizes.num_layers * layer / layout.pipeline + ends


def _adapter_weights(sizes: ModelSizes, lora: LoRAConfig) -> float:
    hidden, queries, keys = sizes.hidden, sizes.queries, sizes.keys
    shapes = {"q_proj": hidden + queries, "k_proj": hidden + keys, "v_proj": hidden + keys}
    shapes["o_proj"] = queries + hidden
    if not sizes.num_experts:
        names = ("gate_proj", "up_proj", "down_proj")
        shapes |= dict.fromkeys(names, hidden + sizes.mlp_width)
    adapts_all = lora.target_modules == "all-linear"
    targets = list(shapes) if adapts_all else list(lora.target_modules)
    if sizes.num_experts:  # each expert has adapters
        widths, inputs = sizes.expert_weights / (3 * hidden), sizes.num_experts * hidden
        shapes["experts.gate_up_proj"] = round(inputs + 2 * widths)
        shapes["experts.down_proj"] = round(inputs + widths)
    chosen = [size for name, size in shapes.items() if any(t.endswith(name) for t in targets)]
    return float(sizes.num_layers * lora.rank * sum(chosen))


def _transfer_gib(load: StageLoad) -> float:
    """Returns the additional memory of trainer and engine while weights are sent."""
    width, sizes = 2 if load.dtype == "bfloat16" else _FLOAT32, load.sizes
    largest = sizes.largest_weight * (gathered_width(load) + width)  # gathered and sent copies
    bucket = min(GPU_BUCKET_BYTES, sizes.num_parameters * width)
    sent = (largest + _SENT_BUCKETS * bucket) / GIB
    return sent if load.has_own_engines else sent + _received_gib(load)


def _received_gib(load: StageLoad) -> float:
    """Returns the memory of an engine for a transfer in addition to its weights."""
    width, sizes = 2 if load.dtype == "bfloat16" else _FLOAT32, load.sizes
    received = max(
        sizes.largest_weight * width, min(GPU_BUCKET_BYTES, sizes.num_parameters * width)
    )
    return _RECEIVED_COPIES * received / GIB


def missing_cache(load: StageLoad, plan: MemoryPlan) -> bool:
    """Whether the KV cache cannot fit even one sequence of maximum length."""
    return load.sampling is not None and plan.kv_tokens < load.longest
