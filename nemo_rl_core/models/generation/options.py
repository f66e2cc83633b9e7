"""Set-up of an engine from options with the names of NeMo RL's `VllmConfig`."""

from collections.abc import Mapping
from typing import Any, Final, TypedDict

from pydantic import NonNegativeInt, PositiveInt, ValidationError

from nemo_rl_core.backends.generation.base import GenerationSetup
from nemo_rl_core.config.base import FrozenConfig
from nemo_rl_core.config.generation import (
    HuggingFaceGenerationConfig,
    MegatronGenerationConfig,
    VllmGenerationConfig,
)
from nemo_rl_core.config.mistakes import describe
from nemo_rl_core.config.model import DType, PretrainedModel
from nemo_rl_core.data.pretrained import load_tokenizer, sampling_length, stop_token_ids
from nemo_rl_core.distributed.session import ClusterSession
from nemo_rl_core.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl_core.errors import ConfigError
from nemo_rl_core.models.policy.pretrained import local_folder

EngineConfig = VllmGenerationConfig | HuggingFaceGenerationConfig | MegatronGenerationConfig

_ALIASES: Final = {
    "precision": "dtype",
    "torch_dtype": "dtype",
    "tensor_model_parallel_size": "tensor_parallel_size",
    "pipeline_model_parallel_size": "pipeline_parallel_size",
}


class VllmEngineConfig(TypedDict, total=False):
    """Options of an engine in `VllmConfig.vllm_cfg`."""

    tensor_parallel_size: int
    pipeline_parallel_size: int
    gpu_memory_utilization: float
    max_model_len: int
    skip_tokenizer_init: bool
    async_engine: bool
    precision: str
    load_format: str


class VllmConfig(TypedDict, total=False):
    """Options with the names of NeMo RL's `VllmConfig`, which `read_setup` maps."""

    backend: str
    model_name: str
    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int | None
    repetition_penalty: float
    do_sample: bool
    eos_token_id: int | list[int]
    pad_token_id: int
    stop_token_ids: list[int] | None
    stop_strings: list[str]
    vllm_cfg: VllmEngineConfig


class _ModelOptions(FrozenConfig):
    """Options of the model and its tokens; those of sampling are in the engine's config.

    Attributes:
        revision: The same as in `PretrainedModel`.
        trust_remote_code: The same as in `PretrainedModel`.
        stop_token_ids: Tokens that end a completion, in addition to the model's.
        max_model_len: Maximum number of tokens of a prompt and its completion; by default the
            model's context length.
    """

    model_name: str
    revision: str | None = None
    trust_remote_code: bool = False
    dtype: DType = "float32"
    seed: NonNegativeInt = 0
    pad_token_id: NonNegativeInt = 0
    stop_token_ids: list[int] | None = None
    max_model_len: PositiveInt | None = None


def read_setup(options: Mapping[str, Any], config_class: type[EngineConfig]) -> GenerationSetup:
    """Reads the set-up of an engine.

    Args:
        options: `model_name`; `dtype` (or `precision`), `max_model_len`, `stop_token_ids`,
            `pad_token_id`, `seed`; and the fields of the config. Options of `vllm_cfg` may also be
            at the top level. `eos_token_id`, one or a list, adds to `stop_token_ids`;
            `do_sample: false` is `temperature: 0`.
    """
    flat = {**options, **options.get("vllm_cfg", {})}
    flat.pop("vllm_cfg", None)
    if flat.pop("async_engine", False):
        raise ConfigError(
            "this engine completes one batch at a time",
            expected="async_engine: false",
            got="true",
            fix="leave async_engine out, or start VllmGeneration(cluster, config), which has an "
            "asynchronous engine",
        )
    named = {_ALIASES.get(name, name): value for name, value in flat.items()}
    if not named.pop("do_sample", True):  # transformers' option for greedy decoding
        named["temperature"] = 0.0
    if "eos_token_id" in named:
        ends = named.pop("eos_token_id")
        ends = list(ends) if isinstance(ends, list | tuple) else [ends]
        named["stop_token_ids"] = [*ends, *(named.get("stop_token_ids") or ())]
    if "dtype" in named:  # a name, or the type itself
        named["dtype"] = str(named["dtype"]).removeprefix("torch.")
    model_options = {
        key: named.pop(key) for key in list(named) if key in _ModelOptions.model_fields
    }
    try:
        model = _ModelOptions.model_validate(model_options)
        source = PretrainedModel(
            name=model.model_name,
            revision=model.revision,
            trust_remote_code=model.trust_remote_code,
        )
        config = config_class.model_validate(named)
    except ValidationError as error:
        raise describe(error, {**named, **model_options}) from error
    folder = local_folder(source)
    model_stops = stop_token_ids(folder, load_tokenizer(folder))
    longest = model.max_model_len or sampling_length(folder)
    if longest is None:
        raise ConfigError(
            f"the model {model.model_name!r} does not declare a maximum sequence length",
            expected="max_model_len",
            fix="give max_model_len",
        )
    return GenerationSetup(
        model_folder=folder,
        config=config,
        max_model_len=longest,
        stop_token_ids=tuple(sorted({*model_stops, *(model.stop_token_ids or ())})),
        dtype=model.dtype,
        seed=model.seed,
        pad_token_id=model.pad_token_id,
    )


def read_vllm_setup(
    cluster: ClusterSession | RayVirtualCluster,
    config: GenerationSetup | VllmConfig | Mapping[str, Any],
) -> GenerationSetup:
    """Returns a set-up unchanged, or reads options for as many engines as fit in the cluster."""
    if isinstance(config, GenerationSetup):
        return config
    options: dict[str, Any] = {**config, **config.get("vllm_cfg", {})}
    options.pop("vllm_cfg", None)
    if options.pop("async_engine", False):
        options.setdefault("num_engines", 1)
    if "num_engines" not in options:
        owner = cluster if isinstance(cluster, RayVirtualCluster) else cluster.cluster
        ranks = options.get("tensor_parallel_size", 1) * options.get("pipeline_parallel_size", 1)
        options["num_engines"] = max(1, owner.world_size // ranks)
    return read_setup(options, VllmGenerationConfig)
