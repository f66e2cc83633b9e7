"""Settings of rollout engines and sampling."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

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
from nemo_rl_core.config.cluster import ClusterConfig
from nemo_rl_core.config.engine_options import refuse_engine_options
from nemo_rl_core.config.model import MatmulPrecision
from nemo_rl_core.config.placement import (
    DedicatedBundles,
    OwnPlacement,
    Placement,
    dedicated_bundles,
)
from nemo_rl_core.config.registered import REGISTERED, RegisteredBackend, SectionTable
from nemo_rl_core.errors import ConfigError

_SMALLEST_TEMPERATURE = 0.01
_RESHAPING = ("top_p", "top_k", "repetition_penalty")
"""Settings that change the distribution from which tokens are sampled."""


class SamplingConfig(FrozenConfig):
    """Settings of all engines: sampling, number of engines, placement.

    Rollouts for training are sampled at `temperature`, under which the trainer also computes
    logprobs. Evaluation is greedy, and samples at this temperature for pass@k.

    Attributes:
        max_new_tokens: Maximum length of a completion in one turn.
        temperature: Divisor of logits; 0 is greedy.
        top_p: Samples from the most likely tokens that together have this probability.
        top_k: Samples from this many most likely tokens; None samples from all.
        repetition_penalty: Divides (or, if negative, multiplies) the logits of earlier tokens:
            Keskar et al. (2019), "CTRL".
        stop_strings: Strings that end a completion once its text contains one; its tokens are kept.
            The text includes special tokens, such as `<|im_end|>`.
        num_engines: Number of copies of the model that share the rows of a batch. By default a
            recipe has as many as fit the GPUs of its cluster, or one without GPUs.
        placement: Location of the engines. `colocated`: on the trainer's GPUs, asleep while it
            trains. `{own: 4}`: on four dedicated GPUs in addition to those of
            `cluster.num_workers`, always awake; without GPUs, in processes with separate cores.
        generate_timeout_seconds: Time limit of a call of `generate`, after which its workers are
            killed and restarted. None waits forever.
    """

    renamed: ClassVar[Mapping[str, str]] = {"timeout_seconds": "generate_timeout_seconds"}

    max_new_tokens: PositiveInt = 8
    temperature: NonNegativeFloat = 1.0
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: PositiveInt | None = None
    repetition_penalty: PositiveFloat = 1.0
    stop_strings: list[Annotated[str, Field(min_length=1)]] = Field(default=[])
    num_engines: PositiveInt = 1
    placement: Placement = "colocated"
    generate_timeout_seconds: PositiveFloat | None = 3600.0

    @property
    def draws_from_all(self) -> bool:
        """Whether tokens are sampled from the policy's distribution under the temperature."""
        return not self.reshaping

    @property
    def reshaping(self) -> dict[str, float | int | None]:
        """Settings that change the distribution from which tokens are sampled."""
        values = {name: getattr(self, name) for name in _RESHAPING}
        defaults = {name: type(self).model_fields[name].default for name in _RESHAPING}
        return {name: value for name, value in values.items() if value != defaults[name]}

    @property
    def ranks_per_engine(self) -> int:
        """Number of workers of one copy of the model."""
        return 1

    @property
    def num_dedicated_bundles(self) -> int:
        """Number of dedicated bundles; 0 for engines that share the trainer's."""
        return sum(each.number for each in self.dedicated_bundles)

    @property
    def dedicated_bundles(self) -> tuple[DedicatedBundles, ...]:
        """The engines' dedicated bundles; empty for engines that share the trainer's."""
        ranks = self.ranks_per_engine
        return dedicated_bundles(self.placement, "generation", "generation", ranks_per_engine=ranks)

    @model_validator(mode="before")
    @classmethod
    def _engines_fill_their_bundles(cls, values: Any) -> Any:
        if not isinstance(values, dict) or "num_engines" in values:
            return values
        placement = values.get("placement")
        number = placement.get("own") if isinstance(placement, dict) else placement
        number = number.own if isinstance(number, OwnPlacement) else number
        sizes = [values.get(f"{axis}_parallel_size", 1) for axis in ("tensor", "pipeline")]
        if not all(isinstance(each, int) and each > 0 for each in (number, *sizes)):
            return values  # refused below, or colocated
        return {**values, "num_engines": max(number // (sizes[0] * sizes[1]), 1)}

    @model_validator(mode="after")
    def _dedicated_bundles_are_all_used(self) -> "SamplingConfig":
        needed = self.num_engines * self.ranks_per_engine
        if self.num_dedicated_bundles in (0, needed):
            return self
        raise ConfigError(
            "the engines do not fill their dedicated bundles",
            expected=f"placement: {{own: {needed}}} for {self.num_engines} engines of "
            f"{self.ranks_per_engine} workers",
            got=f"placement: {{own: {self.num_dedicated_bundles}}}",
            fix=f"set placement.own to {needed}, or change num_engines or the parallel sizes",
        )

    @model_validator(mode="after")
    def _engines_support_temperature(self) -> "SamplingConfig":
        # vLLM raises a temperature in this range to 0.01, and the trainer would use another.
        if 0 < self.temperature < _SMALLEST_TEMPERATURE:
            raise ValueError(
                f"temperature is {self.temperature}: set it to 0 (greedy), or at least "
                f"{_SMALLEST_TEMPERATURE}"
            )
        return self


class SplitEngine(SamplingConfig):
    """An engine that may split the model over several workers.

    Attributes:
        tensor_parallel_size: Number of workers of one engine that share each weight matrix.
        pipeline_parallel_size: Number of workers of one engine that share the layers.
    """

    tensor_parallel_size: PositiveInt = 1
    pipeline_parallel_size: PositiveInt = 1

    @property
    def ranks_per_engine(self) -> int:
        """Number of workers of one copy of the model."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


class VllmGenerationConfig(SplitEngine):
    """vLLM's engine.

    Attributes:
        kv_cache_gib: Size of the KV cache on a CPU.
        max_num_seqs: Maximum number of sequences that are computed at once.
        block_size: Number of tokens per block of the KV cache. Sequences share full blocks of
            common prefixes, such as a system prompt, so smaller blocks share more of short prompts.
            None takes vLLM's default (128 on CPUs, 16 on GPUs); CPUs need multiples of 32.
        gpu_memory_utilization: Fraction of a GPU's memory for weights and KV cache. By default a
            recipe has 0.9 for engines on dedicated GPUs.
        enforce_eager: Disables CUDA graphs, which a CPU never uses.
        load_format: Initial weights of vLLM, before it receives the model's. `auto` loads the
            model's on a CPU and with `quantization`, and zeros on a GPU, so that weights are read
            once. `dummy` uses random numbers.
        float32_matmul_precision: Precision of matrix products if `dtype` is `float32`; `high` is
            TF32 on GPUs. A recipe that omits it gets the same as the trainer.
        quantization: Rounds weights and activations of projections to FP8 while loading, on GPUs
            with FP8 support (Ada, Hopper and later), with one scale per matrix, per output channel,
            or per block of 128. Embedding, head and norms stay in 16 bits. The trainer computes in
            16 bits, and the gate compares the two.
        skip_tokenizer_init: Starts without a tokenizer, and so without stop strings.
        engine_options: Further options of vLLM (fields of its `EngineArgs`), passed unchanged, such
            as `{speculative_config: {method: ngram, num_speculative_tokens: 4}}`. Options that a
            key sets or that the project relies on are refused. The gate compares the
            engine's logprobs of sampled tokens with the trainer's, whatever the options; it does
            not check how tokens are drawn.
    """

    backend: Literal["vllm"] = "vllm"
    kv_cache_gib: PositiveInt = 1
    max_num_seqs: PositiveInt = 512
    block_size: PositiveInt | None = None
    gpu_memory_utilization: float = Field(default=0.5, gt=0, lt=1)
    enforce_eager: bool = False
    load_format: Literal["auto", "dummy"] = "auto"
    float32_matmul_precision: MatmulPrecision = "highest"
    quantization: Literal["none", "fp8_per_tensor", "fp8_per_channel", "fp8_per_block"] = "none"
    skip_tokenizer_init: bool = False
    engine_options: dict[str, Any] = Field(default_factory=dict, exclude_if=lambda value: not value)

    @model_validator(mode="after")
    def _engine_options_are_vllms(self) -> "VllmGenerationConfig":
        refuse_engine_options(self.engine_options)
        return self

    @model_validator(mode="after")
    def _stop_strings_need_text(self) -> "VllmGenerationConfig":
        if self.skip_tokenizer_init and self.stop_strings:
            raise ValueError(
                "stop_strings need text, which is not available with skip_tokenizer_init: "
                "remove one of them"
            )
        return self


class HuggingFaceGenerationConfig(SamplingConfig):
    """Transformers' generation loop, for models that no engine supports and for comparison."""

    backend: Literal["hf"] = "hf"


class MegatronGenerationConfig(SplitEngine):
    """Megatron-core's model with a KV cache, with the same layers as in training."""

    backend: Literal["megatron"] = "megatron"


class RegisteredGeneration(RegisteredBackend, SamplingConfig):
    """A custom engine under its registered name.

    A subclass given at registration adds settings.
    """

    @classmethod
    def sections(cls) -> "SectionTable[RegisteredGeneration]":
        """Returns the registered engines."""
        return GENERATION_SECTIONS


_BUILT_IN = ("vllm", "hf", "megatron")
GENERATION_SECTIONS: SectionTable[RegisteredGeneration] = SectionTable(
    "generation backend", RegisteredGeneration, _BUILT_IN, "register_generation_backend"
)

GenerationConfig = Annotated[
    Annotated[VllmGenerationConfig, Tag("vllm")]
    | Annotated[HuggingFaceGenerationConfig, Tag("hf")]
    | Annotated[MegatronGenerationConfig, Tag("megatron")]
    | Annotated[SerializeAsAny[RegisteredGeneration], Tag(REGISTERED)],
    kind_or("vllm", "backend", known=_BUILT_IN, otherwise=REGISTERED),
]


def refuse_misplaced(
    cluster: ClusterConfig, generation: SamplingConfig, scorers: Sequence[DedicatedBundles] = ()
) -> None:
    """Refuses engines and scorers that do not fit the cluster of a recipe."""
    cluster.refuse_unplaced((*generation.dedicated_bundles, *scorers))
    if not generation.dedicated_bundles:
        refuse_more_than(cluster.num_workers, generation)


def refuse_more_than(num_workers: int, generation: SamplingConfig) -> None:
    """Refuses engines that need more workers than there are."""
    engines, ranks = generation.num_engines, generation.ranks_per_engine
    if engines * ranks > num_workers:
        raise ConfigError(
            f"{engines} engines of {ranks} workers do not fit the cluster",
            expected=f"at most {num_workers} workers (cluster.num_workers)",
            got=f"{engines * ranks}",
            fix="raise cluster.num_workers, lower generation.num_engines or the parallel sizes of "
            "an engine, or give the engines dedicated bundles: "
            f"generation.placement: {{own: {engines * ranks}}}",
        )


def refuse_for_training(generation: SamplingConfig) -> None:
    """Refuses rollouts that are not drawn from the policy's full distribution.

    The trainer computes logprobs over the full vocabulary at the sampling temperature. `top_p`,
    `top_k` and `repetition_penalty` sample from another distribution, which biases the gradient.
    Neither the gate nor an importance weight detects it, since at temperature 1 engines also report
    logprobs of the full distribution.
    """
    if generation.temperature == 0:
        raise ConfigError(
            "rollouts for training must be sampled, not greedy",
            expected="a generation.temperature greater than 0",
            got="0",
            fix="set it to 1; evaluation is always greedy",
        )
    if changed := generation.reshaping:
        raise ConfigError(
            "rollouts for training must be sampled from all tokens, over which their logprobs are "
            "computed",
            expected="no top_p, top_k or repetition_penalty in the section generation",
            got=", ".join(f"{name}: {value}" for name, value in changed.items()),
            fix=f"remove {', '.join(changed)}; evaluation.generation may have it",
        )
