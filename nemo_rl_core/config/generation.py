"""How completions are sampled, and which engine makes them."""

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
from nemo_rl_core.config.model import MatmulPrecision
from nemo_rl_core.config.placement import OwnBundles, OwnPlacement, Placement, own_bundles
from nemo_rl_core.config.registered import REGISTERED, RegisteredBackend, SectionTable
from nemo_rl_core.errors import ConfigError

_SMALLEST_TEMPERATURE = 0.01
_RESHAPING = ("top_p", "top_k", "repetition_penalty")
"""Settings that sample from another distribution than the policy's."""


class SamplingConfig(FrozenConfig):
    """What every engine reads: how tokens are drawn, and how many engines draw them.

    `temperature` is that of training rollouts; the trainer computes its logprobs under the same
    temperature. Evaluation is greedy, and samples at this temperature for pass@k.

    Attributes:
        max_new_tokens: The longest completion of one turn.
        temperature: What logits are divided by; 0 takes the likeliest token always.
        top_p: Draws from the likeliest tokens that together have this probability.
        top_k: Draws from so many likeliest tokens; None draws from all.
        repetition_penalty: Divides (or, where negative, multiplies) the logits of tokens that came
            before: Keskar et al. (2019), "CTRL".
        stop_strings: End a completion where its text contains one; its tokens stay. Special tokens,
            such as `<|im_end|>`, are part of this text.
        num_engines: Copies of the model that share the rows of a batch. A recipe that does not say
            how many has as many as the GPUs of its cluster hold, and one without GPUs.
        placement: Where the engines run. `colocated`: on the trainer's GPUs, asleep while it
            trains. `{own: 4}`: on four GPUs of their own besides those of `cluster.num_workers`,
            always awake; without GPUs, in processes with cores of their own.
        generate_timeout_seconds: After which a call of `generate` counts as stuck: its workers are
            ended and started again. None waits for ever.
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
        """Whether tokens are drawn from the policy's own distribution under the temperature."""
        return not self.reshaping

    @property
    def reshaping(self) -> dict[str, float | int | None]:
        """Settings by which tokens are sampled from another distribution than the policy's."""
        values = {name: getattr(self, name) for name in _RESHAPING}
        defaults = {name: type(self).model_fields[name].default for name in _RESHAPING}
        return {name: value for name, value in values.items() if value != defaults[name]}

    @property
    def ranks_per_engine(self) -> int:
        """Workers that together hold one copy of the model."""
        return 1

    @property
    def num_own_bundles(self) -> int:
        """Bundles besides the trainer's; 0 for engines that share those."""
        return sum(each.number for each in self.own_bundles)

    @property
    def own_bundles(self) -> tuple[OwnBundles, ...]:
        """The engines' bundles besides the trainer's; none for engines that share those."""
        ranks = self.ranks_per_engine
        return own_bundles(self.placement, "generation", "generation", ranks_per_engine=ranks)

    @model_validator(mode="before")
    @classmethod
    def _engines_fill_their_bundles(cls, values: Any) -> Any:
        if not isinstance(values, dict) or "num_engines" in values:
            return values
        placement = values.get("placement")
        own = placement.get("own") if isinstance(placement, dict) else placement
        own = own.own if isinstance(own, OwnPlacement) else own
        sizes = [values.get(f"{axis}_parallel_size", 1) for axis in ("tensor", "pipeline")]
        if not all(isinstance(each, int) and each > 0 for each in (own, *sizes)):
            return values  # refused below, or colocated
        return {**values, "num_engines": max(own // (sizes[0] * sizes[1]), 1)}

    @model_validator(mode="after")
    def _own_bundles_are_all_used(self) -> "SamplingConfig":
        needed = self.num_engines * self.ranks_per_engine
        if self.num_own_bundles in (0, needed):
            return self
        raise ConfigError(
            "the engines do not fill the bundles of their own",
            expected=f"placement: {{own: {needed}}} for {self.num_engines} engines of "
            f"{self.ranks_per_engine} workers",
            got=f"placement: {{own: {self.num_own_bundles}}}",
            fix=f"set placement.own to {needed}, or change num_engines or the parallel sizes",
        )

    @model_validator(mode="after")
    def _temperature_is_one_that_engines_keep(self) -> "SamplingConfig":
        # vLLM raises a temperature between to 0.01, and the trainer would compute with another.
        if 0 < self.temperature < _SMALLEST_TEMPERATURE:
            raise ValueError(
                f"temperature is {self.temperature}: take 0, the likeliest token always, or at "
                f"least {_SMALLEST_TEMPERATURE}"
            )
        return self


class SplitEngine(SamplingConfig):
    """An engine whose copy of the model may be spread over several workers.

    Attributes:
        tensor_parallel_size: Workers of one engine that share each weight matrix.
        pipeline_parallel_size: Workers of one engine that share the layers.
    """

    tensor_parallel_size: PositiveInt = 1
    pipeline_parallel_size: PositiveInt = 1

    @property
    def ranks_per_engine(self) -> int:
        """Workers that together hold one copy of the model."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


class VllmGenerationConfig(SplitEngine):
    """vLLM's engine.

    Attributes:
        kv_cache_gib: Memory for keys and values, on a CPU.
        max_num_seqs: The most sequences that are computed at once.
        block_size: Tokens of a block of the cache of keys and values. Sequences share the whole
            blocks that they begin with, such as those of a system prompt, so that short prompts
            share more of smaller blocks. None takes vLLM's own (128 on a CPU, 16 on a GPU); a CPU
            takes multiples of 32.
        gpu_memory_utilization: The share of a GPU's memory for weights, keys and values. A recipe
            that does not say it has 0.9 for engines on GPUs of their own.
        enforce_eager: Does without CUDA graphs. A CPU always does.
        load_format: With what vLLM starts; the model's own weights follow in any case. `auto` reads
            them first on a CPU and with `quantization`, and starts with zeros on a GPU, so that
            they are read once. `dummy` starts with random numbers.
        float32_matmul_precision: Of matrix products where `dtype` is `float32`; `high` is TF32 on
            GPUs. A recipe that does not say it has the trainer's default.
        quantization: Rounds weights and activations of projections to FP8 while they are loaded, on
            GPUs that compute in it (Ada, Hopper and later): with one scale a matrix, an output
            channel, or a block of 128. Embedding, head and norms stay in 16 bits. The trainer
            computes in 16 bits, and the gate compares the two.
        skip_tokenizer_init: Starts without a tokenizer, and so without stop strings.
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

    @model_validator(mode="after")
    def _stop_strings_need_text(self) -> "VllmGenerationConfig":
        if self.skip_tokenizer_init and self.stop_strings:
            raise ValueError(
                "stop_strings are looked for in text, which skip_tokenizer_init does without: "
                "leave one of them out"
            )
        return self


class HuggingFaceGenerationConfig(SamplingConfig):
    """Transformers' own loop: for models that no engine knows, and for comparison."""

    backend: Literal["hf"] = "hf"


class MegatronGenerationConfig(SplitEngine):
    """Megatron-core's model with a KV cache: the very layers that Megatron trains."""

    backend: Literal["megatron"] = "megatron"


class RegisteredGeneration(RegisteredBackend, SamplingConfig):
    """An engine of your own, under the name that it is registered with.

    A subclass that is named at registration adds settings.
    """

    @classmethod
    def sections(cls) -> "SectionTable[RegisteredGeneration]":
        """The registered engines."""
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
    cluster: ClusterConfig, generation: SamplingConfig, scorers: Sequence[OwnBundles] = ()
) -> None:
    """Refuses engines, and models that score, that the cluster of a recipe has no place for.

    Args:
        cluster: The section.
        generation: The section of the engines.
        scorers: What models that score have for themselves.

    Raises:
        ConfigError: Says how many there are, and how many it takes.
    """
    cluster.refuse_unplaced((*generation.own_bundles, *scorers))
    if not generation.own_bundles:
        refuse_more_than(cluster.num_workers, generation)


def refuse_more_than(num_workers: int, generation: SamplingConfig) -> None:
    """Refuses engines that need more workers than there are.

    Raises:
        ConfigError: Says how many there are, and how many it takes.
    """
    engines, ranks = generation.num_engines, generation.ranks_per_engine
    if engines * ranks > num_workers:
        raise ConfigError(
            f"{engines} engines of {ranks} workers do not fit the cluster",
            expected=f"at most {num_workers} workers (cluster.num_workers)",
            got=f"{engines * ranks}",
            fix="raise cluster.num_workers, lower generation.num_engines or the sizes over which "
            "an engine is spread, or give the engines bundles of their own: "
            f"generation.placement: {{own: {engines * ranks}}}",
        )


def refuse_for_training(generation: SamplingConfig) -> None:
    """Refuses rollouts that are not drawn from the policy's full distribution.

    The trainer computes logprobs over the full vocabulary at the sampling temperature. `top_p`,
    `top_k` and `repetition_penalty` sample from another distribution, which biases the gradient,
    and neither the gate nor an importance weight shows it: at temperature 1 engines report the
    logprobs of the full distribution, too.

    Raises:
        ConfigError: For greedy rollouts, and for `top_p`, `top_k` or `repetition_penalty`.
    """
    if generation.temperature == 0:
        raise ConfigError(
            "rollouts that are trained on must be drawn, not taken greedily",
            expected="a generation.temperature greater than 0",
            got="0",
            fix="set it to 1; evaluation is greedy whatever it is",
        )
    if changed := generation.reshaping:
        raise ConfigError(
            "rollouts that are trained on must be sampled from all tokens, as their logprobs are "
            "computed",
            expected="no top_p, top_k or repetition_penalty in the section generation",
            got=", ".join(f"{name}: {value}" for name, value in changed.items()),
            fix=f"remove {', '.join(changed)}; a recipe may have it in evaluation.generation",
        )
