"""How completions are sampled, and which engine makes them."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

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
from nemo_rl_core.config.registered import REGISTERED, RegisteredBackend, SectionTable
from nemo_rl_core.errors import ConfigError

_SMALLEST_TEMPERATURE = 0.01


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
        stop_strings: End a completion where its text contains one; its tokens stay.
        num_engines: Copies of the model that share the rows of a batch.
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
    generate_timeout_seconds: PositiveFloat | None = 3600.0

    @property
    def draws_from_all(self) -> bool:
        """Whether tokens are drawn from the policy's own distribution under the temperature."""
        return self.top_p == 1 and self.top_k is None and self.repetition_penalty == 1

    @property
    def ranks_per_engine(self) -> int:
        """Workers that together hold one copy of the model."""
        return 1

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
        gpu_memory_utilization: The share of a GPU's memory for weights, keys and values.
        enforce_eager: Does without CUDA graphs. A CPU always does.
        load_format: `dummy` starts with random weights; the model's own follow in any case.
        skip_tokenizer_init: Starts without a tokenizer, and so without stop strings.
    """

    backend: Literal["vllm"] = "vllm"
    kv_cache_gib: PositiveInt = 1
    max_num_seqs: PositiveInt = 512
    block_size: PositiveInt | None = None
    gpu_memory_utilization: float = Field(default=0.5, gt=0, lt=1)
    enforce_eager: bool = False
    load_format: Literal["auto", "dummy"] = "auto"
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
            fix="raise cluster.num_workers, or lower generation.num_engines or the sizes over "
            "which an engine is spread",
        )


def refuse_for_training(generation: SamplingConfig) -> None:
    """Refuses sampling whose logprobs the trainer cannot compute as well.

    At temperature 1 engines report logprobs of the whole distribution, at others of the part of it
    that `top_p`, `top_k` and `repetition_penalty` leave.

    Raises:
        ConfigError: For greedy rollouts, and for draws from a part at another temperature than 1.
    """
    if generation.temperature == 0:
        raise ConfigError(
            "rollouts that are trained on must be drawn, not taken greedily",
            expected="a generation.temperature greater than 0",
            got="0",
            fix="set it to 1; evaluation is greedy whatever it is",
        )
    if not generation.draws_from_all and generation.temperature != 1:
        raise ConfigError(
            "the engine does not report the policy's own logprobs of draws from a part of the "
            "tokens, which training needs",
            expected="generation.temperature: 1 with top_p, top_k or repetition_penalty",
            got=str(generation.temperature),
            fix="set it to 1, or leave the others out",
        )
