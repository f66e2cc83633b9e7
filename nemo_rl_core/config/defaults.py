"""Defaults that depend on the model and the machine.

The config classes have defaults for the small models that this project creates itself. Learning
rates of pretrained models are two to four orders of magnitude lower, completions are longer.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from pydantic import BaseModel, TypeAdapter, ValidationError

from nemo_rl_core.config.algorithm import Algorithm
from nemo_rl_core.config.cluster import ClusterConfig
from nemo_rl_core.config.environment import EnvironmentConfig, dedicated_bundles_of_scorers
from nemo_rl_core.config.places import PlacedList, copied
from nemo_rl_core.config.single_turn import ExactMatch
from nemo_rl_core.config.training import TrainingConfig
from nemo_rl_core.config.warm_up import default_warm_up
from nemo_rl_core.errors import ConfigError

CRITIC_LEARNING_RATE: Final = 1e-5
LORA_FACTOR: Final = 10.0
"""Adapters need a higher learning rate than full weights."""
MAX_NEW_TOKENS: Final = 512
_MAX_PROMPT_TOKENS: Final = 512
LARGEST_LEARNING_RATE: Final = 1e-4
"""A higher rate of full weights usually destroys a pretrained model within a few steps."""
_SMALL_MODEL: Final = 50_000_000
_GPUS_OF_A_NODE: Final = 8
_ENGINES: Final = ("vllm", "hf", "megatron")
_TRAINERS: Final = ("dtensor", "megatron")
OWN_GPU_SHARE: Final = 0.9
"""Fraction of a dedicated GPU's memory that an engine uses."""


@dataclass(frozen=True)
class DefaultsContext:
    """Facts that defaults depend on, in addition to the settings.

    Attributes:
        num_gpus: Number of GPUs of this machine.
        context_length: Maximum sequence length of the model; None if unknown.
    """

    num_gpus: int = 0
    context_length: int | None = None


def defaults_of_pretrained(
    values: Mapping[str, Any],
    *,
    algorithm: Algorithm | None,
    samples: bool,
    context: DefaultsContext,
) -> dict[str, Any]:
    """Returns defaults of missing settings for a pretrained model, by path.

    A default learning rate comes with a warm-up. If the shape of the cluster has GPUs, `dtype` is
    bfloat16, an explicit float32 is computed in TF32, and there are as many engines as fit. On a
    machine with GPUs the cluster has all of them except dedicated ones of engines and scorers.
    """
    defaults: dict[str, Any] = {}
    training = values.get("training") or {}
    defaults |= _rates(values, algorithm, uses_lora=_get(training, "lora") is not None)
    generation = _section(values, "generation")
    num_own = _num_own(generation) + _num_own_of_scorers(values) if samples else 0
    if "cluster" not in values and context.num_gpus > num_own:
        defaults["cluster"] = _all_gpus(training, context.num_gpus, num_own)
    if values.get("dtype", "auto") == "auto":
        cluster = _cluster({**values, **defaults})
        defaults["dtype"] = "bfloat16" if cluster.num_gpus else "float32"
    if samples:
        lengths = (values.get("max_prompt_tokens"), generation.get("max_new_tokens"))
        defaults |= _lengths(*lengths, context.context_length)
    cluster = _cluster({**values, **defaults})
    if samples:
        defaults |= engines_of_gpus(cluster, generation)
    engines = {"generation": generation} if samples else {}
    dtype = defaults.get("dtype", values.get("dtype"))
    return defaults | float32_of_gpus(cluster, training, engines, dtype=dtype)


def _lengths(prompt: Any, completion: Any, context_length: int | None) -> dict[str, int]:
    if not isinstance(prompt, int | None) or not isinstance(completion, int | None):
        return {}  # the validation refuses them
    if context_length is None:
        return {} if completion else {"generation.max_new_tokens": MAX_NEW_TOKENS}
    chosen = {}
    if prompt is None:
        fitting = context_length - completion if completion else context_length // 2
        prompt = _MAX_PROMPT_TOKENS
        if 0 < fitting < prompt:
            prompt = chosen["max_prompt_tokens"] = fitting
    if completion is None:
        room = context_length - prompt
        if room < 1:
            raise ConfigError(
                "the prompts leave no room for completions in the model's context",
                expected=f"max_prompt_tokens below {context_length}, the context",
                got=str(prompt),
                fix=f"set max_prompt_tokens to {context_length // 2}, or use a model with a "
                "longer context",
            )
        chosen["generation.max_new_tokens"] = min(MAX_NEW_TOKENS, room)
    return chosen


def engines_of_gpus(cluster: Any, generation: Any, *, path: str = "generation") -> dict[str, float]:
    """Returns defaults for the number of engines or their GPU memory, by path.

    On the trainer's GPUs there are as many engines as fit. On dedicated GPUs vLLM uses 0.9 of the
    memory.

    Example:
        >>> engines_of_gpus({"shape": "node_8gpu"}, {"tensor_parallel_size": 2})
        {'generation.num_engines': 4}
        >>> engines_of_gpus({"shape": "one_gpu"}, {"placement": {"own": 1}})
        {'generation.gpu_memory_utilization': 0.9}
    """
    section = _section({"": generation}, "")
    num_gpus = _cluster({"cluster": cluster}).num_gpus
    if _num_own(section):
        is_open = _is_vllm(section) and "gpu_memory_utilization" not in section
        return {f"{path}.gpu_memory_utilization": OWN_GPU_SHARE} if num_gpus and is_open else {}
    is_known = section.get("backend", "vllm") in _ENGINES
    if "num_engines" in section or not is_known:
        return {}
    ranks = int(section.get("tensor_parallel_size", 1))
    ranks *= int(section.get("pipeline_parallel_size", 1))
    engines = num_gpus // ranks
    return {f"{path}.num_engines": engines} if engines > 1 else {}


def float32_of_gpus(
    cluster: Any, training: Any, engines: Mapping[str, Any], *, dtype: Any
) -> dict[str, str]:
    """Chooses TF32 for float32 models on clusters with GPUs, in trainer and engines.

    Args:
        training: The section of the trainer. With `deterministic: true` nothing is chosen.

    Example:
        >>> float32_of_gpus({"shape": "one_gpu"}, {}, {}, dtype="float32")
        {'training.float32_matmul_precision': 'high'}
    """
    trainer = _section({"": training}, "")
    if dtype != "float32" or trainer.get("deterministic") is True:
        return {}
    if not _cluster({"cluster": cluster}).num_gpus:
        return {}
    defaults, name = {}, "float32_matmul_precision"
    if trainer.get("backend", "dtensor") in _TRAINERS and name not in trainer:
        defaults[f"training.{name}"] = "high"
    for path, engine in engines.items():
        section = _section({"": engine}, "")
        if _is_vllm(section) and name not in section:
            defaults[f"{path}.{name}"] = "high"
    return defaults


def _is_vllm(generation: Mapping[str, Any]) -> bool:
    return bool(generation.get("backend", "vllm") == "vllm")


def _rates(
    values: Mapping[str, Any], algorithm: Algorithm | None, *, uses_lora: bool
) -> dict[str, Any]:
    if algorithm is None:
        return {}
    section, factor = algorithm.name, LORA_FACTOR if uses_lora else 1.0
    settings = _section(values, section)
    defaults: dict[str, Any] = {}
    if "learning_rate" not in settings:
        defaults[f"{section}.learning_rate"] = _rounded(algorithm.learning_rate * factor)
        if "num_warmup_steps" not in settings:
            defaults[f"{section}.num_warmup_steps"] = default_warm_up(settings)
    if algorithm.has_critic and "learning_rate" not in _section(settings, "critic"):
        defaults[f"{section}.critic.learning_rate"] = _rounded(CRITIC_LEARNING_RATE * factor)
    return defaults


def _rounded(rate: float) -> float:
    return float(f"{rate:.6g}")


def _section(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Returns a section as a mapping; {} for other values, which the validation refuses."""
    section = values.get(name)
    if isinstance(section, BaseModel):
        return section.model_dump()
    return section if isinstance(section, Mapping) else {}


def _num_own(section: Mapping[str, Any]) -> int:
    number = _get(section.get("placement"), "own")
    return number if isinstance(number, int) else 0


def _num_own_of_scorers(values: Mapping[str, Any]) -> int:
    with suppress(ConfigError, ValidationError):
        section = values.get("environment") or ExactMatch()
        environment: EnvironmentConfig = TypeAdapter(EnvironmentConfig).validate_python(section)
        return sum(own.number for own in dedicated_bundles_of_scorers(environment))
    return 0


def _all_gpus(training: Any, num_gpus: int, num_own: int) -> dict[str, Any]:
    ranks = TypeAdapter(TrainingConfig).validate_python(training).ranks_per_replica
    num_workers = max((num_gpus - num_own) // ranks, 1) * ranks
    if num_workers + num_own == 1:
        return {"shape": "one_gpu", "num_workers": 1}
    return {
        "shape": "node_8gpu" if num_workers + num_own == _GPUS_OF_A_NODE else "cluster",
        "num_workers": num_workers,
    }


def _cluster(values: Mapping[str, Any]) -> ClusterConfig:
    section = values.get("cluster") or {}
    return section if isinstance(section, ClusterConfig) else ClusterConfig.model_validate(section)


def _get(section: Any, name: str) -> Any:
    return section.get(name) if isinstance(section, Mapping) else getattr(section, name, None)


def filled(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings with defaults filled in.

    Example:
        >>> filled({"grpo": {"seed": 1}}, {"grpo.learning_rate": 1e-6})
        {'grpo': {'seed': 1, 'learning_rate': 1e-06}}
    """
    result = copied(values)
    for path, value in defaults.items():
        *outer, name = path.split(".")
        if outer and not isinstance(result.get(outer[0], {}), Mapping | BaseModel | None):
            continue  # not a section, which the validation refuses
        section = result
        for key in outer:
            inner = section.get(key, {})
            is_model = isinstance(inner, BaseModel)
            section[key] = inner.model_dump() if is_model else copied(inner or {})
            section = section[key]
        section[name] = value
    return result


def with_judges_of_gpus(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fills in bfloat16 for judges on GPUs, and 0.9 of the memory for judges on dedicated GPUs.

    Example:
        >>> judge = {"kind": "model", "model": "folder", "placement": {"own": 1}}
        >>> judge = with_judges_of_gpus({"judge": judge})["judge"]
        >>> judge["dtype"], judge["gpu_memory_utilization"]
        ('bfloat16', 0.9)
    """
    result = copied(values)
    result.update({key: _with_judges_of_gpus(value) for key, value in values.items()})
    judge = result.get("judge")
    if isinstance(judge, dict) and judge.get("kind") == "model":
        judge.setdefault("dtype", "bfloat16")
        if _num_own(judge):
            judge.setdefault("gpu_memory_utilization", OWN_GPU_SHARE)
    return result


def _with_judges_of_gpus(value: Any) -> Any:
    if isinstance(value, Mapping):
        return with_judges_of_gpus(value)
    if isinstance(value, list):
        locations = getattr(value, "places", ())
        return PlacedList([_with_judges_of_gpus(each) for each in value], locations)
    return value


def as_sentence(defaults: Mapping[str, Any]) -> str:
    """Formats defaults by path as text."""
    return ", ".join(f"{path} {value}" for path, value in sorted(defaults.items()))


def rate_warning(
    section: str,
    learning_rate: float,
    *,
    algorithm: Algorithm | None,
    num_parameters: float,
    uses_lora: bool,
) -> str | None:
    """Returns a warning if a learning rate would destroy a pretrained model, else None."""
    too_high = learning_rate > LARGEST_LEARNING_RATE and not uses_lora
    if not too_high or num_parameters <= _SMALL_MODEL:
        return None
    usual = 1e-5 if algorithm is None else algorithm.learning_rate
    return (
        f"{section}.learning_rate {learning_rate:g} usually destroys a pretrained model of "
        f"{num_parameters / 1e6:.0f} M parameters: {usual / 2:g} to {usual * 5:g} is the usual "
        "range"
    )
