"""Which backend trains, and over which axes the model is spread."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

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
from nemo_rl_core.config.float8 import Float8Recipe
from nemo_rl_core.config.model import DType, MatmulPrecision
from nemo_rl_core.config.registered import REGISTERED, RegisteredBackend, SectionTable
from nemo_rl_core.documented_names import documented
from nemo_rl_core.errors import ConfigError

T = TypeVar("T", bound="Parallelism")
Head = Literal["lm", "scalar"]
"""A model's outputs: logits of tokens, or one value per token (reward models, critics)."""
FlashAttention = Literal["auto", 2, 3, 4]
GradientSync = Literal["every_microbatch", "last_microbatch"]


class Parallelism(FrozenConfig):
    """Over how many ranks one copy of the model is spread; data parallelism takes what is left.

    Sequence parallelism splits, over the ranks of tensor parallelism, what that leaves whole.

    Attributes:
        tensor_parallel_size: Ranks that share each weight matrix.
        context_parallel_size: Ranks that share the tokens of a sequence.
        sequence_parallel: Splits activations over the tensor-parallel ranks where tensor
            parallelism leaves them whole.
    """

    tensor_parallel_size: PositiveInt = 1
    context_parallel_size: PositiveInt = 1
    sequence_parallel: bool = False

    @property
    def ranks_per_replica(self) -> int:
        """Ranks that together see one shard of the data."""
        return self.tensor_parallel_size * self.context_parallel_size

    @property
    def smallest_world_size(self) -> int:
        """Fewest ranks of this layout; every other number of ranks is a multiple of it."""
        return self.ranks_per_replica

    def data_parallel_size(self, num_workers: int) -> int:
        """Copies of the model that `num_workers` ranks hold, each with its own shard of the data.

        Raises:
            ConfigError: If a copy would be left without some of its ranks.
        """
        copies, left_over = divmod(num_workers, self.ranks_per_replica)
        if left_over:
            raise ConfigError(
                f"{num_workers} workers cannot hold whole copies of the model",
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
                "set tensor_parallel_size to 2 or more, or leave sequence_parallel out"
            )
        return self


Offload = Literal["none", "optimizer", "all"]
"""What a trainer moves to the host while an engine uses its GPU."""


class LoRAConfig(FrozenConfig):
    """Low-rank adapters in place of whole weights: `W + alpha / rank * B A`, Hu et al. (2021).

    Attributes:
        rank: Rank of the adapters.
        alpha: The adapters' output is scaled by `alpha / rank`.
        target_modules: Linear layers that get adapters, by name; `all-linear` takes all of them but
            the head. For fused experts, name the weights: `experts.gate_up_proj`.
    """

    rank: PositiveInt = 16
    alpha: PositiveFloat = 32.0
    target_modules: Literal["all-linear"] | list[str] = "all-linear"


class DTensorTraining(Parallelism):
    """Any transformers model over FSDP2 and DTensor.

    Three settings may be `auto`: they are chosen when the workers start, by the arithmetic of
    `nemo-rl plan` and the memory of the GPU, and are `choices` in the manifest.

    Attributes:
        data_parallel_replicas: Copies of the sharded model (HSDP); 1 shards over all data ranks.
            `auto` is one copy a machine where the cluster has several and a machine holds a copy,
            else 1.
        gradient_sync: When gradients are summed over the ranks that shard the model:
            `every_microbatch` keeps the shards alone, `last_microbatch` sends them once a step and
            keeps whole gradients in float32 until then. `auto` is `last_microbatch` on GPUs with
            that much memory, else `every_microbatch`. Copies of HSDP are summed once a step.
        reduce_dtype: Of the sums of gradients over ranks.
        cpu_offload: Keeps sharded weights and optimizer state in the CPU's memory.
        offload_for_generation: What waits in the host's pinned memory while an engine on the same
            GPU generates: `optimizer` its state, until the next optimizer step; `all` weights and
            reference too, until they are next needed. Gradients and unused memory leave in any
            case. No result changes.
        activation_checkpointing: Recomputes each layer in the backward pass. `auto` does so on GPUs
            that cannot hold the activations of a micro-batch.
        compile: Compiles each layer with `torch.compile`, with or without recomputation.
        attention: What attends over packed rows. `varlen` (torch's FlashAttention over sequences of
            any length, 16 bits) and `flex` (FlexAttention, compiled) run on GPUs and make no mask
            of all pairs of tokens, as `sdpa` does. `auto` is `varlen` on GPUs, `flex` where that
            cannot compute the model, and `sdpa` on CPUs.
        flash_attention: The version of FlashAttention that computes `varlen`: 2 is a part of torch,
            3 and 4 are packages besides the requirements. `auto` is the first of 3 (for Hopper) and
            4 (Hopper, Blackwell) that is installed and passes a comparison on heads of the model's
            shape, else 2. With `deterministic: true` it is 2.
        share_prefixes: Computes tokens that several sequences begin with once, such as the prompt
            of a group, wherever that is cheaper and attention is `sdpa` or `flex`. The results are
            those of sequences alone, but for rounding.
        float32_matmul_precision: Of matrix products where `dtype` is `float32`. `high` is TF32 on
            GPUs (10 bits of a number's fraction instead of 23), several times as fast. A recipe
            that does not say it has `high` where its cluster has GPUs and `deterministic` is not
            true, else `highest`. The engine has a setting of its own.
        deterministic: Takes kernels of torch that compute the same bits every time, so that a
            resumed or reproduced run has the bits of the first. `auto` does so on CPUs; on GPUs it
            takes the fastest kernels, a tenth faster on an H100.
        tensor_parallel_plan: Module name pattern to style, where the built-in plan of the model's
            type is not wanted.
        router_aux_loss_coef: Weight of the load-balancing loss of experts, of which the mean over
            sequences is added to the algorithm's loss; see `load_balancing_losses`.
        lora: Trains low-rank adapters; None trains all weights.
        weights: `full` trains what is loaded; `8bit` and `4bit` load frozen quantised weights
            under LoRA, with bitsandbytes.
        float8: Rounds the operands of linear layers to 8 bits of floating point in all three
            products of a step, with torchao, on GPUs of compute capability 8.9 and later; emulated
            on CPUs. `tensorwise` has one scale a matrix, and FSDP2 gathers weights in 8 bits;
            `rowwise` one a row; `rowwise_with_gw_hp` computes gradients of weights in full
            precision besides. What is saved and sent is as with `none`.
    """

    backend: Literal["dtensor"] = "dtensor"
    data_parallel_replicas: PositiveInt | Literal["auto"] = "auto"
    gradient_sync: GradientSync | Literal["auto"] = "auto"
    reduce_dtype: DType = "float32"
    cpu_offload: bool = False
    offload_for_generation: Offload = "none"
    activation_checkpointing: bool | Literal["auto"] = "auto"
    compile: bool = False
    attention: Literal["auto", "varlen", "flex", "sdpa"] = "auto"
    # Left out by default, so that inputs of stages are what they were without it.
    flash_attention: FlashAttention = Field(default="auto", exclude_if=lambda said: said == "auto")
    share_prefixes: bool = False
    float32_matmul_precision: MatmulPrecision = "highest"
    deterministic: bool | Literal["auto"] = "auto"
    tensor_parallel_plan: dict[str, Literal["colwise", "rowwise"]] | None = None
    # Left out by default, so that inputs of stages are what they were without it.
    router_aux_loss_coef: NonNegativeFloat = Field(default=0.0, exclude_if=lambda said: said == 0)
    lora: LoRAConfig | None = None
    weights: Literal["full", "8bit", "4bit"] = "full"
    # Left out by default, so that inputs of stages are what they were without it.
    float8: Float8Recipe = Field(default="none", exclude_if=lambda said: said == "none")

    @property
    def num_copies(self) -> int:
        """Copies of HSDP; 1 where that is `auto` still."""
        return 1 if self.data_parallel_replicas == "auto" else self.data_parallel_replicas

    @property
    def smallest_world_size(self) -> int:
        """Fewest ranks of this layout, which has every copy of HSDP."""
        return super().smallest_world_size * self.num_copies

    @property
    def recomputes(self) -> bool:
        """Whether layers are computed again; not where that is `auto` still."""
        return self.activation_checkpointing is True

    @property
    def gathers_in_float8(self) -> bool:
        """Whether FSDP2 sends weights in 8 bits: with one scale a matrix, which all shards share.

        Scales of weights on the host would have to be agreed upon over the GPUs' network.
        """
        return self.float8 == "tensorwise" and not self.cpu_offload

    @model_validator(mode="after")
    def _router_loss_reads_whole_sequences(self) -> "DTensorTraining":
        others = {
            "tensor_parallel_size: 1": self.tensor_parallel_size > 1,
            "context_parallel_size: 1": self.context_parallel_size > 1,
            "share_prefixes: false": self.share_prefixes,
            "compile: false": self.compile,
        }
        conflicts = [name for name, is_set in others.items() if is_set]
        if self.router_aux_loss_coef and conflicts:
            raise ValueError(
                "router_aux_loss_coef reads what routers compute for a full sequence: set "
                f"{' and '.join(conflicts)}, or leave router_aux_loss_coef out"
            )
        return self

    @model_validator(mode="after")
    def _whole_gradients_are_exact(self) -> "DTensorTraining":
        if self.gradient_sync == "last_microbatch" and self.reduce_dtype != "float32":
            raise ValueError(
                f"gradient_sync: last_microbatch would add up micro-batches in {self.reduce_dtype}"
                ", the reduce_dtype: leave one of the two out"
            )
        return self

    @model_validator(mode="after")
    def _adapters_are_not_split(self) -> "DTensorTraining":
        if self.lora is not None and self.tensor_parallel_size > 1:
            raise ValueError(
                "adapters are not split over the ranks of tensor parallelism: "
                "leave tensor_parallel_size at 1 (FSDP shards them), or leave lora out"
            )
        return self

    @model_validator(mode="after")
    def _float8_trains_whole_weights(self) -> "DTensorTraining":
        if self.float8 != "none" and self.lora is not None:
            raise ValueError(
                f"float8: {self.float8} is for training all weights: torchao would compute the "
                "gradients of LoRA's frozen ones too. Leave float8 out, or lora"
            )
        return self

    @model_validator(mode="after")
    def _what_is_on_the_host_is_not_moved_there(self) -> "DTensorTraining":
        if self.cpu_offload and self.offload_for_generation != "none":
            raise ValueError(
                "cpu_offload keeps weights and optimizer state on the host always: leave "
                "offload_for_generation out, or cpu_offload"
            )
        return self

    @model_validator(mode="after")
    def _attention_of_whole_rows(self) -> "DTensorTraining":
        if self.attention in ("varlen", "flex") and self.context_parallel_size > 1:
            raise ValueError(
                f"attention: {self.attention} computes whole rows, which context parallelism "
                "splits: leave attention out, or context_parallel_size at 1"
            )
        return self

    @model_validator(mode="after")
    def _flash_attention_is_of_varlen(self) -> "DTensorTraining":
        return _refuse_unused_version(self)

    @model_validator(mode="after")
    def _quantized_weights_are_frozen(self) -> "DTensorTraining":
        if self.weights != "full" and self.lora is None:
            raise ValueError(
                f"weights: {self.weights} are frozen, so that nothing would be trained: "
                "add a lora section, or leave weights out"
            )
        return self


class MegatronTraining(Parallelism):
    """Megatron-core: tensor, pipeline, context and expert parallelism for the models it knows.

    Attributes:
        pipeline_parallel_size: Ranks that share the layers.
        virtual_pipeline_size: Model chunks a pipeline rank (interleaved schedule); 1 is plain.
        expert_parallel_size: Ranks, out of the data-parallel ones, that share the experts.
        offload_for_generation: What waits in the host's pinned memory while an engine on the same
            GPU generates: `optimizer` its state, until the next optimizer step; `all` the weights
            too, until they are next needed. Gradients and unused memory leave in any case, and the
            reference is on the host always. No result changes.
        activation_checkpointing: Recomputes each layer in the backward pass. `auto` does so on GPUs
            that cannot hold the activations of a micro-batch; it is chosen when the workers start,
            and is one of the `choices` in the manifest.
        attention: What attends over packed rows where Transformer Engine is not installed. `varlen`
            (torch's FlashAttention over sequences of any length, 16 bits) runs on GPUs and makes no
            mask of all pairs of tokens, as `sdpa` does. `auto` is `varlen` on GPUs where that can
            compute the model, else `sdpa`.
        flash_attention: The version of FlashAttention that computes `varlen`: 2 is a part of torch,
            3 and 4 are packages besides the requirements. `auto` is the first of 3 (for Hopper) and
            4 (Hopper, Blackwell) that is installed and passes a comparison on heads of the model's
            shape, else 2. With `deterministic: true` it is 2.
        share_prefixes: Computes tokens that several sequences begin with once, such as the prompt
            of a group, wherever that is cheaper and attention is `sdpa`. The results are those of
            sequences alone, but for rounding.
        float32_matmul_precision: Of matrix products where `dtype` is `float32`. `high` is TF32 on
            GPUs (10 bits of a number's fraction instead of 23), several times as fast. A recipe
            that does not say it has `high` where its cluster has GPUs and `deterministic` is not
            true, else `highest`. The engine has a setting of its own.
        deterministic: Takes kernels of torch that compute the same bits every time, so that a
            resumed or reproduced run has the bits of the first. `auto` does so on CPUs; on GPUs it
            takes the fastest kernels, a tenth faster on an H100.
    """

    backend: Literal["megatron"] = "megatron"
    pipeline_parallel_size: PositiveInt = 1
    virtual_pipeline_size: PositiveInt = 1
    expert_parallel_size: PositiveInt = 1
    offload_for_generation: Offload = "none"
    activation_checkpointing: bool | Literal["auto"] = "auto"
    attention: Literal["auto", "varlen", "sdpa"] = "auto"
    # Left out by default, so that inputs of stages are what they were without it.
    flash_attention: FlashAttention = Field(default="auto", exclude_if=lambda said: said == "auto")
    share_prefixes: bool = False
    float32_matmul_precision: MatmulPrecision = "highest"
    deterministic: bool | Literal["auto"] = "auto"

    @property
    def recomputes(self) -> bool:
        """Whether layers are computed again; not where that is `auto` still."""
        return self.activation_checkpointing is True

    @property
    def ranks_per_replica(self) -> int:
        """Ranks that together see one shard of the data."""
        return super().ranks_per_replica * self.pipeline_parallel_size

    @property
    def smallest_world_size(self) -> int:
        """Fewest ranks of this layout, whose data-parallel ones share the experts."""
        return super().smallest_world_size * self.expert_parallel_size

    @model_validator(mode="after")
    def _flash_attention_is_of_varlen(self) -> "MegatronTraining":
        return _refuse_unused_version(self)

    @model_validator(mode="after")
    def _interleaving_needs_a_pipeline(self) -> "MegatronTraining":
        if self.virtual_pipeline_size > 1 and self.pipeline_parallel_size == 1:
            raise ValueError(
                "virtual_pipeline_size interleaves the stages of a pipeline: "
                "set pipeline_parallel_size to 2 or more, or leave virtual_pipeline_size out"
            )
        return self


class RegisteredTraining(RegisteredBackend, Parallelism):
    """A training backend of your own, under the name that it is registered with.

    A subclass that is named at registration adds settings; without one the section has none, and
    the model is not split.
    """

    @classmethod
    def sections(cls) -> "SectionTable[RegisteredTraining]":
        """The registered training backends."""
        return TRAINING_SECTIONS

    @model_validator(mode="after")
    def _nothing_is_split_unread(self) -> "RegisteredTraining":
        if self._is_open() and (self.ranks_per_replica > 1 or self.sequence_parallel):
            raise ValueError(
                f"the training backend {self.backend!r} is registered without a config, so that "
                "it does not split the model: leave the parallel sizes out, or name a subclass of "
                "RegisteredTraining, register_training_backend(name, config=...)"
            )
        return self


def _refuse_unused_version(training: T) -> T:
    attention = getattr(training, "attention", "auto")
    version = getattr(training, "flash_attention", "auto")
    if version != "auto" and attention not in ("auto", "varlen"):
        raise ValueError(
            f"flash_attention: {version} computes attention: varlen, not {attention}: leave one of "
            "the two out"
        )
    return training


def kernel_wanted(training: "DTensorTraining | MegatronTraining") -> str:
    """`attention`, which is `varlen` where a version of FlashAttention is asked for."""
    return training.attention if training.flash_attention == "auto" else "varlen"


CHOSEN_BY_PLAN: Mapping[str, Any] = {
    "data_parallel_replicas": 1,
    "gradient_sync": "every_microbatch",
    "activation_checkpointing": False,
}
"""What a plan chooses where a setting is `auto`, and what it is without a plan, as on CPUs."""


def open_choices(training: Parallelism) -> list[str]:
    """The settings of `CHOSEN_BY_PLAN` that are still `auto`."""
    if not isinstance(training, DTensorTraining | MegatronTraining):
        return []
    return [name for name in CHOSEN_BY_PLAN if getattr(training, name, None) == "auto"]


def without_plan(training: T) -> T:
    """The section with the values of CPUs in place of every `auto` that a plan would choose."""
    found = open_choices(training)
    return training.replace(**{name: CHOSEN_BY_PLAN[name] for name in found}) if found else training


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
