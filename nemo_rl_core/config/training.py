"""Settings of training backends and parallelism."""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    SerializeAsAny,
    Tag,
    model_validator,
)

from nemo_rl_core.config.base import FrozenConfig, kind_or
from nemo_rl_core.config.model import DType, MatmulPrecision
from nemo_rl_core.config.registered import REGISTERED, RegisteredBackend, SectionTable
from nemo_rl_core.documented_names import documented
from nemo_rl_core.errors import ConfigError, ResourceError

Float8Recipe = Literal["none", "tensorwise", "rowwise", "rowwise_with_gw_hp"]
"""Recipes by torchao's names."""


def require_torchao(recipe: str) -> None:
    """Checks that torchao is installed if a recipe needs it."""
    if recipe != "none" and find_spec("torchao") is None:
        raise ResourceError(
            f"training.float8: {recipe} needs the package torchao",
            expected="torchao 0.18, which is in the requirements for GPUs",
            got="no such package",
            fix="pip install --no-deps torchao==0.18.0, or remove training.float8",
        )


T = TypeVar("T", bound="Parallelism")
Head = Literal["lm", "scalar"]
"""A model's outputs: logits of tokens, or one value per token (reward models, critics)."""
FlashAttention = Literal["auto", 2, 3, 4]
GradientSync = Literal["every_microbatch", "last_microbatch"]


class Parallelism(FrozenConfig):
    """Parallelism of one copy of the model; the remaining ranks are data-parallel.

    Attributes:
        tensor_parallel_size: Number of ranks that share each weight matrix.
        context_parallel_size: Number of ranks that share the tokens of a sequence.
        sequence_parallel: Whether the tensor-parallel ranks also split activations that tensor
            parallelism replicates.
    """

    tensor_parallel_size: PositiveInt = 1
    context_parallel_size: PositiveInt = 1
    sequence_parallel: bool = False

    @property
    def ranks_per_replica(self) -> int:
        """Number of ranks of one copy of the model, which share their data."""
        return self.tensor_parallel_size * self.context_parallel_size

    @property
    def smallest_world_size(self) -> int:
        """Minimum number of ranks; every number of ranks must be a multiple of it."""
        return self.ranks_per_replica

    def data_parallel_size(self, num_workers: int) -> int:
        """Returns the number of copies of the model, each with a separate shard of the data."""
        copies, left_over = divmod(num_workers, self.ranks_per_replica)
        if left_over:
            raise ConfigError(
                f"{num_workers} workers cannot hold complete copies of the model",
                expected=f"a multiple of {self.ranks_per_replica}, over which `training` spreads "
                "one copy",
                got=f"cluster.num_workers: {num_workers}",
                fix=f"set cluster.num_workers to {(copies + 1) * self.ranks_per_replica}, or "
                "spread the model over fewer ranks",
            )
        return copies

    @model_validator(mode="after")
    def _sequence_needs_tensor(self) -> "Parallelism":
        if self.sequence_parallel and self.tensor_parallel_size == 1:
            raise ValueError(
                "sequence_parallel splits over the ranks of tensor parallelism: "
                "set tensor_parallel_size to 2 or more, or remove sequence_parallel"
            )
        return self


Offload = Literal["none", "optimizer", "all"]
"""State that a trainer moves to the host while an engine uses its GPU."""


class LoRAConfig(FrozenConfig):
    """Low-rank adapters instead of full weights: `W + alpha / rank * B A`, Hu et al. (2021).

    Attributes:
        rank: Rank of the adapters.
        alpha: Numerator of the scale `alpha / rank` of the adapters' output.
        target_modules: Names of linear layers that get adapters; `all-linear` takes all except the
            head. For fused experts, name the weights: `experts.gate_up_proj`.
    """

    rank: PositiveInt = 16
    alpha: PositiveFloat = 32.0
    target_modules: Literal["all-linear"] | list[str] = "all-linear"


class BuiltInTraining(Parallelism):
    """Settings that both built-in backends have.

    Attributes:
        activation_checkpointing: Recomputes each layer in the backward pass. `auto` does so on GPUs
            that cannot hold the activations of a micro-batch; it is chosen when the workers start,
            and recorded in `choices` of the manifest.
        flash_attention: Version of FlashAttention for `varlen`: 2 is part of torch, 3 and 4 are
            separate packages. `auto` is the first of 3 (for Hopper) and 4 (Hopper, Blackwell) that
            is installed and passes a comparison on heads of the model's shape, else 2. With
            `deterministic: true` it is 2.
        share_prefixes: Computes common prefixes of sequences once, such as the prompt of a group,
            if that is cheaper and attention is not `varlen`. The results are the same as for
            separate sequences, up to rounding.
        float32_matmul_precision: Precision of matrix products if `dtype` is `float32`. `high` is
            TF32 on GPUs (10 bits of mantissa instead of 23), several times as fast. By default a
            recipe has `high` if its cluster has GPUs and `deterministic` is not true, else
            `highest`. The engine has a separate setting.
        deterministic: Uses torch's deterministic kernels, so that a resumed or reproduced run is
            bitwise identical to the first. `auto` does so on CPUs; on GPUs it uses the fastest
            kernels, which are a tenth faster on an H100.
    """

    activation_checkpointing: bool | Literal["auto"] = "auto"
    # The default is not dumped, so that cache keys from before the setting stay valid.
    flash_attention: FlashAttention = Field(
        default="auto", exclude_if=lambda value: value == "auto"
    )
    share_prefixes: bool = False
    float32_matmul_precision: MatmulPrecision = "highest"
    deterministic: bool | Literal["auto"] = "auto"

    @property
    def recomputes(self) -> bool:
        """Whether layers are recomputed; False while the setting is `auto`."""
        return self.activation_checkpointing is True

    @model_validator(mode="after")
    def _flash_attention_is_of_varlen(self) -> Self:
        attention = getattr(self, "attention", "auto")
        if self.flash_attention != "auto" and attention not in ("auto", "varlen"):
            raise ValueError(
                f"flash_attention: {self.flash_attention} is for attention: varlen, not "
                f"{attention}: remove one of the two"
            )
        return self


class DTensorTraining(BuiltInTraining):
    """Any transformers model over FSDP2 and DTensor.

    Three settings may be `auto`: they are chosen when the workers start, by the arithmetic of
    `nemo-rl plan` and the memory of the GPU, and recorded as `choices` in the manifest.

    Attributes:
        data_parallel_replicas: Number of copies of the sharded model (HSDP); 1 shards over all data
            ranks. `auto` is one copy per machine if the cluster has several machines and each can
            hold a copy, else 1.
        gradient_sync: When gradients are reduced over the ranks that shard the model:
            `every_microbatch` keeps only shards, `last_microbatch` reduces once per step and keeps
            full gradients in float32 until then. `auto` is `last_microbatch` on GPUs with enough
            memory, else `every_microbatch`. Copies of HSDP are reduced once per step.
        reduce_dtype: Dtype of the reduction of gradients over ranks.
        cpu_offload: Keeps sharded weights and optimizer state in the CPU's memory.
        offload_for_generation: State that is moved to the host's pinned memory while an engine on
            the same GPU generates: `optimizer` is the optimizer's, until its next step; `all` adds
            weights and reference, until they are next needed. Gradients and unused memory are
            always freed. Results do not change.
        compile: Compiles each layer with `torch.compile`, with or without recomputation.
        attention: Attention over packed rows. `varlen` (torch's FlashAttention over sequences of
            any length, 16 bits) and `flex` (FlexAttention, compiled) run on GPUs and, unlike
            `sdpa`, need no mask of all pairs of tokens. `auto` is `varlen` on GPUs, `flex` if
            `varlen` does not support the model, and `sdpa` on CPUs.
        tensor_parallel_plan: Parallel style by module name pattern, instead of the built-in plan of
            the model's type.
        router_aux_loss_coef: Weight of the load-balancing loss of experts, whose mean over
            sequences is added to the algorithm's loss; see `load_balancing_losses`.
        lora: Trains low-rank adapters; None trains all weights.
        weights: `full` trains the loaded weights; `8bit` and `4bit` load frozen quantized weights
            under LoRA, with bitsandbytes.
        float8: Rounds the operands of linear layers to 8-bit floats in all three products of a
            step, with torchao, on GPUs of compute capability 8.9 and later; emulated on CPUs.
            `tensorwise` has one scale per matrix, and FSDP2 gathers weights in 8 bits; `rowwise`
            has one per row; `rowwise_with_gw_hp` also computes gradients of weights in full
            precision. Saved and sent weights are the same as with `none`.
    """

    backend: Literal["dtensor"] = "dtensor"
    data_parallel_replicas: PositiveInt | Literal["auto"] = "auto"
    gradient_sync: GradientSync | Literal["auto"] = "auto"
    reduce_dtype: DType = "float32"
    cpu_offload: bool = False
    offload_for_generation: Offload = "none"
    compile: bool = False
    attention: Literal["auto", "varlen", "flex", "sdpa"] = "auto"
    tensor_parallel_plan: dict[str, Literal["colwise", "rowwise"]] | None = None
    # The default is not dumped, so that cache keys from before the setting stay valid.
    router_aux_loss_coef: NonNegativeFloat = Field(default=0.0, exclude_if=lambda value: value == 0)
    lora: LoRAConfig | None = None
    weights: Literal["full", "8bit", "4bit"] = "full"
    # The default is not dumped, so that cache keys from before the setting stay valid.
    float8: Float8Recipe = Field(default="none", exclude_if=lambda value: value == "none")

    @property
    def num_copies(self) -> int:
        """Number of HSDP copies; 1 while the setting is `auto`."""
        return 1 if self.data_parallel_replicas == "auto" else self.data_parallel_replicas

    @property
    def smallest_world_size(self) -> int:
        """Minimum number of ranks, including every HSDP copy."""
        return super().smallest_world_size * self.num_copies

    @property
    def gathers_in_float8(self) -> bool:
        """Whether FSDP2 gathers weights in 8 bits, with one scale per matrix for all shards.

        Not with `cpu_offload`, since scales of weights on the host cannot be reduced over NCCL.
        """
        return self.float8 == "tensorwise" and not self.cpu_offload

    @model_validator(mode="after")
    def _router_loss_reads_full_sequences(self) -> "DTensorTraining":
        others = {
            "tensor_parallel_size: 1": self.tensor_parallel_size > 1,
            "context_parallel_size: 1": self.context_parallel_size > 1,
            "share_prefixes: false": self.share_prefixes,
            "compile: false": self.compile,
        }
        conflicts = [name for name, is_set in others.items() if is_set]
        if self.router_aux_loss_coef and conflicts:
            raise ValueError(
                "router_aux_loss_coef needs the routers' outputs for a full sequence: set "
                f"{' and '.join(conflicts)}, or remove router_aux_loss_coef"
            )
        return self

    @model_validator(mode="after")
    def _accumulated_gradients_are_exact(self) -> "DTensorTraining":
        if self.gradient_sync == "last_microbatch" and self.reduce_dtype != "float32":
            raise ValueError(
                f"gradient_sync: last_microbatch would add up micro-batches in {self.reduce_dtype}"
                ", the reduce_dtype: remove one of the two"
            )
        return self

    @model_validator(mode="after")
    def _adapters_are_not_split(self) -> "DTensorTraining":
        if self.lora is not None and self.tensor_parallel_size > 1:
            raise ValueError(
                "adapters are not split over the ranks of tensor parallelism: "
                "leave tensor_parallel_size at 1 (FSDP shards them), or remove lora"
            )
        return self

    @model_validator(mode="after")
    def _float8_trains_full_weights(self) -> "DTensorTraining":
        if self.float8 != "none" and self.lora is not None:
            raise ValueError(
                f"float8: {self.float8} is for training all weights: torchao would compute the "
                "gradients of LoRA's frozen ones too. Remove float8 or lora"
            )
        return self

    @model_validator(mode="after")
    def _one_kind_of_offload(self) -> "DTensorTraining":
        if self.cpu_offload and self.offload_for_generation != "none":
            raise ValueError(
                "cpu_offload always keeps weights and optimizer state on the host: remove "
                "offload_for_generation or cpu_offload"
            )
        return self

    @model_validator(mode="after")
    def _attention_needs_full_rows(self) -> "DTensorTraining":
        if self.attention in ("varlen", "flex") and self.context_parallel_size > 1:
            raise ValueError(
                f"attention: {self.attention} needs full rows, which context parallelism splits: "
                "remove attention, or leave context_parallel_size at 1"
            )
        return self

    @model_validator(mode="after")
    def _quantized_weights_are_frozen(self) -> "DTensorTraining":
        if self.weights != "full" and self.lora is None:
            raise ValueError(
                f"weights: {self.weights} are frozen, so nothing would be trained: add a lora "
                "section, or remove weights"
            )
        return self


class MegatronTraining(BuiltInTraining):
    """Megatron-core with tensor, pipeline, context and expert parallelism, for supported models.

    Attributes:
        pipeline_parallel_size: Number of ranks that share the layers.
        virtual_pipeline_size: Model chunks per pipeline rank (interleaved schedule); 1 is plain.
        expert_parallel_size: Number of data-parallel ranks that share the experts.
        offload_for_generation: State that is moved to the host's pinned memory while an engine on
            the same GPU generates: `optimizer` is the optimizer's, until its next step; `all` adds
            the weights, until they are next needed. Gradients and unused memory are always freed,
            and the reference is always on the host. Results do not change.
        attention: Attention over packed rows without Transformer Engine. `varlen` (torch's
            FlashAttention over sequences of any length, 16 bits) runs on GPUs and, unlike `sdpa`,
            needs no mask of all pairs of tokens. `auto` is `varlen` on GPUs if it supports the
            model, else `sdpa`.
    """

    backend: Literal["megatron"] = "megatron"
    pipeline_parallel_size: PositiveInt = 1
    virtual_pipeline_size: PositiveInt = 1
    expert_parallel_size: PositiveInt = 1
    offload_for_generation: Offload = "none"
    attention: Literal["auto", "varlen", "sdpa"] = "auto"

    @property
    def ranks_per_replica(self) -> int:
        """Number of ranks of one copy of the model, which share their data."""
        return super().ranks_per_replica * self.pipeline_parallel_size

    @property
    def smallest_world_size(self) -> int:
        """Minimum number of ranks, including the data-parallel ones that share experts."""
        return super().smallest_world_size * self.expert_parallel_size

    @model_validator(mode="after")
    def _interleaving_needs_a_pipeline(self) -> "MegatronTraining":
        if self.virtual_pipeline_size > 1 and self.pipeline_parallel_size == 1:
            raise ValueError(
                "virtual_pipeline_size interleaves the stages of a pipeline: "
                "set pipeline_parallel_size to 2 or more, or remove virtual_pipeline_size"
            )
        return self


class RegisteredTraining(RegisteredBackend, Parallelism):
    """A custom training backend under its registered name.

    A subclass given at registration adds settings; without one the section has none, and the model
    is not split.
    """

    @classmethod
    def sections(cls) -> "SectionTable[RegisteredTraining]":
        """Returns the registered training backends."""
        return TRAINING_SECTIONS

    @model_validator(mode="after")
    def _nothing_is_split_unread(self) -> "RegisteredTraining":
        if self._is_generic() and (self.ranks_per_replica > 1 or self.sequence_parallel):
            raise ValueError(
                f"the training backend {self.backend!r} is registered without a config, so it "
                "does not split the model: remove the parallel sizes, or pass a subclass of "
                "RegisteredTraining to register_training_backend(name, config=...)"
            )
        return self


def kernel_wanted(training: DTensorTraining | MegatronTraining) -> str:
    """Returns `attention`, which is `varlen` if a FlashAttention version is set."""
    return training.attention if training.flash_attention == "auto" else "varlen"


CHOSEN_BY_PLAN: Mapping[str, Any] = {
    "data_parallel_replicas": 1,
    "gradient_sync": "every_microbatch",
    "activation_checkpointing": False,
}
"""Settings that a plan chooses if they are `auto`, with their values without a plan (on CPUs)."""


def open_choices(training: Parallelism) -> list[str]:
    """Returns the settings of `CHOSEN_BY_PLAN` that are still `auto`."""
    if not isinstance(training, BuiltInTraining):
        return []
    return [name for name in CHOSEN_BY_PLAN if getattr(training, name, None) == "auto"]


def without_plan(training: T) -> T:
    """Replaces every `auto` that a plan would choose by its value on CPUs."""
    names = open_choices(training)
    return training.replace(**{name: CHOSEN_BY_PLAN[name] for name in names}) if names else training


_BUILT_IN = ("dtensor", "megatron")
TRAINING_SECTIONS: SectionTable[RegisteredTraining] = SectionTable(
    "training backend", RegisteredTraining, _BUILT_IN, "register_training_backend"
)

TrainingConfig = Annotated[
    Annotated[DTensorTraining, Tag("dtensor")]
    | Annotated[MegatronTraining, Tag("megatron")]
    | Annotated[SerializeAsAny[RegisteredTraining], Tag(REGISTERED)],
    kind_or("dtensor", "backend", known=_BUILT_IN, otherwise=REGISTERED),
]


def __getattr__(name: str) -> Any:
    return documented(__name__, name)
