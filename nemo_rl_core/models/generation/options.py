"""An engine's set-up from a mapping of options, by the names of NeMo RL's `VllmConfig`."""

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
from nemo_rl_core.config.model import DType
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
    """What `VllmConfig.vllm_cfg` says of an engine."""

    tensor_parallel_size: int
    pipeline_parallel_size: int
    gpu_memory_utilization: float
    max_model_len: int
    skip_tokenizer_init: bool
    async_engine: bool
    precision: str
    load_format: str


class VllmConfig(TypedDict, total=False):
    """A set-up by the names of NeMo RL's `VllmConfig`; `read_setup` maps them."""

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
    """The options of the model and its tokens; those of sampling are in the engine's config.

    Attributes:
        stop_token_ids: End a completion besides the model's own.
        max_model_len: The most tokens of a prompt and its completion; by default what the model
            was made for.
    """

    model_name: str
    dtype: DType = "float32"
    seed: NonNegativeInt = 0
    pad_token_id: NonNegativeInt = 0
    stop_token_ids: list[int] | None = None
    max_model_len: PositiveInt | None = None


def read_setup(options: Mapping[str, Any], config_class: type[EngineConfig]) -> GenerationSetup:
    """All that an engine needs.

    Args:
        options: `model_name`; `dtype` (or `precision`), `max_model_len`, `stop_token_ids`,
            `pad_token_id`, `seed`; and the fields of the config. Those in `vllm_cfg` may stand
            beside it as well. `eos_token_id`, one or a list, adds to `stop_token_ids`;
            `do_sample: false` is `temperature: 0`.
        config_class: Of the engine.

    Raises:
        ConfigError: For an unknown option, or a value that does not fit.
        ModelError: If there is no such model.
    """
    flat = {**options, **options.get("vllm_cfg", {})}
    flat.pop("vllm_cfg", None)
    if flat.pop("async_engine", False):
        raise ConfigError(
            "this engine completes whole batches",
            expected="async_engine: false",
            got="true",
            fix="leave async_engine out, or start VllmGeneration(cluster, config), which has an "
            "asynchronous engine",
        )
    named = {_ALIASES.get(name, name): value for name, value in flat.items()}
    if not named.pop("do_sample", True):  # transformers' word for the likeliest token always
        named["temperature"] = 0.0
    if "eos_token_id" in named:
        ends = named.pop("eos_token_id")
        ends = list(ends) if isinstance(ends, list | tuple) else [ends]
        named["stop_token_ids"] = [*ends, *(named.get("stop_token_ids") or ())]
    if "dtype" in named:  # a name, or the type itself
        named["dtype"] = str(named["dtype"]).removeprefix("torch.")
    of_model = {key: named.pop(key) for key in list(named) if key in _ModelOptions.model_fields}
    try:
        model = _ModelOptions.model_validate(of_model)
        config = config_class.model_validate(named)
    except ValidationError as error:
        raise describe(error, {**named, **of_model}) from error
    folder = local_folder(model.model_name)
    own = stop_token_ids(folder, load_tokenizer(folder))
    longest = model.max_model_len or sampling_length(folder)
    if longest is None:
        raise ConfigError(
            f"the model {model.model_name!r} does not say how long its sequences may be",
            expected="max_model_len",
            fix="give max_model_len",
        )
    return GenerationSetup(
        model_folder=folder,
        config=config,
        max_model_len=longest,
        stop_token_ids=tuple(sorted({*own, *(model.stop_token_ids or ())})),
        dtype=model.dtype,
        seed=model.seed,
        pad_token_id=model.pad_token_id,
    )


def read_vllm_setup(
    cluster: ClusterSession | RayVirtualCluster,
    config: GenerationSetup | VllmConfig | Mapping[str, Any],
) -> GenerationSetup:
    """A set-up as it is, or one for as many engines as the cluster has room for.

    Raises:
        ConfigError: For an unknown option, or a value that does not fit.
        ModelError: If there is no such model.
    """
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
