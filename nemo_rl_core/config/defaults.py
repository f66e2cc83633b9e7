"""Defaults that follow the model and the machine.

The defaults of the config classes are those of the small models that this project makes itself. A
pretrained model needs others: its learning rates are two to four orders of magnitude lower, and its
completions are longer. They are filled in where a user says nothing, before a config is validated,
so that the config of a run records all of them.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from pydantic import BaseModel, TypeAdapter, ValidationError

from nemo_rl_core.config.cluster import ClusterConfig
from nemo_rl_core.config.environment import EnvironmentConfig, own_bundles_of_scorers
from nemo_rl_core.config.places import PlacedList, copied
from nemo_rl_core.config.single_turn import ExactMatch
from nemo_rl_core.config.training import TrainingConfig
from nemo_rl_core.config.warm_up import default_warm_up
from nemo_rl_core.errors import ConfigError

LEARNING_RATES: Final[Mapping[str, float]] = {
    "sft": 2e-5,
    "dpo": 5e-7,
    "reward_model": 1e-5,
    "grpo": 1e-6,
    "ppo": 1e-6,
    "distillation": 2e-6,
}
"""By the section of an algorithm: what TRL, NeMo RL and verl train models of 1 to 8 B with."""

CRITIC_LEARNING_RATE: Final = 1e-5
LORA_FACTOR: Final = 10.0
"""Adapters learn at higher rates than whole weights."""
MAX_NEW_TOKENS: Final = 512
_MAX_PROMPT_TOKENS: Final = 512
LARGEST_LEARNING_RATE: Final = 1e-4
"""Of whole weights: a higher one usually destroys a pretrained model within a few steps."""
_SMALL_MODEL: Final = 50_000_000
_GPUS_OF_A_NODE: Final = 8
_ENGINES: Final = ("vllm", "hf", "megatron")
_TRAINERS: Final = ("dtensor", "megatron")
OWN_GPU_SHARE: Final = 0.9
"""Of the memory of a GPU that an engine has for itself, which no trainer needs a part of."""


@dataclass(frozen=True)
class DefaultsContext:
    """What defaults depend on besides the model.

    Attributes:
        num_gpus: GPUs of this machine.
        context_length: The longest sequence of the model; None where it is not known.
    """

    num_gpus: int = 0
    context_length: int | None = None


def defaults_of_pretrained(
    values: Mapping[str, Any], *, section: str, samples: bool, context: DefaultsContext
) -> dict[str, Any]:
    """What is filled in for a pretrained model, by its path in the settings.

    A learning rate comes with a warm-up. `dtype` is bfloat16 where the shape of the cluster has
    GPUs, float32 that is asked for there is computed in TF32, and there are as many engines as fit.
    On a machine with GPUs the cluster has all of them but those that engines and models that score
    have for themselves.

    Args:
        values: The settings that are given, as nested mappings.
        section: Of the algorithm.
        samples: Whether the algorithm samples completions.
        context: This machine, and the longest sequence of the model.

    Returns:
        For example `{"grpo.learning_rate": 1e-6}`; nothing that is given is in it.
    """
    found: dict[str, Any] = {}
    training = values.get("training") or {}
    found |= _rates(values, section, uses_lora=_get(training, "lora") is not None)
    generation = _section(values, "generation")
    num_own = _num_own(generation) + _num_own_of_scorers(values) if samples else 0
    if "cluster" not in values and context.num_gpus > num_own:
        found["cluster"] = _whole_machine(training, context.num_gpus, num_own)
    if values.get("dtype", "auto") == "auto":
        cluster = _cluster({**values, **found})
        found["dtype"] = "bfloat16" if cluster.num_gpus else "float32"
    if samples:
        lengths = (values.get("max_prompt_tokens"), generation.get("max_new_tokens"))
        found |= _lengths(*lengths, context.context_length)
    cluster = _cluster({**values, **found})
    if samples:
        found |= engines_of_gpus(cluster, generation)
    engines = {"generation": generation} if samples else {}
    dtype = found.get("dtype", values.get("dtype"))
    return found | float32_of_gpus(cluster, training, engines, dtype=dtype)


def _lengths(prompt: Any, completion: Any, context_length: int | None) -> dict[str, int]:
    """Limits of prompts and completions that are not given, so that both fit the context."""
    if not isinstance(prompt, int | None) or not isinstance(completion, int | None):
        return {}  # the validation refuses them
    if context_length is None:
        return {} if completion else {"generation.max_new_tokens": MAX_NEW_TOKENS}
    found = {}
    if prompt is None:
        fitting = context_length - completion if completion else context_length // 2
        prompt = _MAX_PROMPT_TOKENS
        if 0 < fitting < prompt:
            prompt = found["max_prompt_tokens"] = fitting
    if completion is None:
        room = context_length - prompt
        if room < 1:
            raise ConfigError(
                "the prompts leave no room for completions in the model's context",
                expected=f"max_prompt_tokens below {context_length}, the context",
                got=str(prompt),
                fix=f"set max_prompt_tokens to {context_length // 2}, or take a model with a "
                "longer context",
            )
        found["generation.max_new_tokens"] = min(MAX_NEW_TOKENS, room)
    return found


def engines_of_gpus(cluster: Any, generation: Any, *, path: str = "generation") -> dict[str, float]:
    """Engines for the GPUs of a cluster, where a section does not say how many or how large.

    On the trainer's GPUs there are as many as these have room for. On GPUs of their own, which they
    share with nothing, vLLM takes 0.9 of the memory.

    Args:
        cluster: The section of the recipe, or what it validates to.
        generation: A section of engines.
        path: Of that section.

    Returns:
        Nothing where that is the default: one engine, or no GPU.

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
    """TF32 where a cluster with GPUs computes in float32, in trainer and engines.

    Args:
        cluster: The section of the recipe, or what it validates to.
        training: The section of the trainer. With `deterministic: true` nothing is chosen.
        engines: By path, the sections of engines.
        dtype: Of the model.

    Returns:
        Nothing of a section that says `float32_matmul_precision`.

    Example:
        >>> float32_of_gpus({"shape": "one_gpu"}, {}, {}, dtype="float32")
        {'training.float32_matmul_precision': 'high'}
    """
    trainer = _section({"": training}, "")
    if dtype != "float32" or trainer.get("deterministic") is True:
        return {}
    if not _cluster({"cluster": cluster}).num_gpus:
        return {}
    found, name = {}, "float32_matmul_precision"
    if trainer.get("backend", "dtensor") in _TRAINERS and name not in trainer:
        found[f"training.{name}"] = "high"
    for path, given in engines.items():
        section = _section({"": given}, "")
        if _is_vllm(section) and name not in section:
            found[f"{path}.{name}"] = "high"
    return found


def _is_vllm(generation: Mapping[str, Any]) -> bool:
    return bool(generation.get("backend", "vllm") == "vllm")


def _rates(values: Mapping[str, Any], section: str, *, uses_lora: bool) -> dict[str, Any]:
    if section not in LEARNING_RATES:
        return {}  # an algorithm of a user's has defaults of its own
    given, factor = _section(values, section), LORA_FACTOR if uses_lora else 1.0
    found: dict[str, Any] = {}
    if "learning_rate" not in given:
        found[f"{section}.learning_rate"] = _rounded(LEARNING_RATES[section] * factor)
        if "num_warmup_steps" not in given:
            found[f"{section}.num_warmup_steps"] = default_warm_up(given)
    if section == "ppo" and "learning_rate" not in _section(given, "critic"):
        found["ppo.critic.learning_rate"] = _rounded(CRITIC_LEARNING_RATE * factor)
    return found


def _rounded(rate: float) -> float:
    return float(f"{rate:.6g}")


def _section(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A section as a mapping; what is none is refused when the settings are validated."""
    given = values.get(name)
    if isinstance(given, BaseModel):
        return given.model_dump()
    return given if isinstance(given, Mapping) else {}


def _num_own(section: Mapping[str, Any]) -> int:
    """GPUs that its workers have for themselves; 0 where the section does not say so."""
    own = _get(section.get("placement"), "own")
    return own if isinstance(own, int) else 0


def _num_own_of_scorers(values: Mapping[str, Any]) -> int:
    """GPUs that models that score have for themselves; 0 where the section is none that is read."""
    with suppress(ConfigError, ValidationError):
        section = values.get("environment") or ExactMatch()
        environment: EnvironmentConfig = TypeAdapter(EnvironmentConfig).validate_python(section)
        return sum(own.number for own in own_bundles_of_scorers(environment))
    return 0


def _whole_machine(training: Any, num_gpus: int, num_own: int) -> dict[str, Any]:
    ranks = TypeAdapter(TrainingConfig).validate_python(training).ranks_per_replica
    num_workers = max((num_gpus - num_own) // ranks, 1) * ranks
    if num_workers + num_own == 1:
        return {"shape": "one_gpu", "num_workers": 1}
    return {
        "shape": "node_8gpu" if num_workers + num_own == _GPUS_OF_A_NODE else "cluster",
        "num_workers": num_workers,
    }


def _cluster(values: Mapping[str, Any]) -> ClusterConfig:
    given = values.get("cluster") or {}
    return given if isinstance(given, ClusterConfig) else ClusterConfig.model_validate(given)


def _get(section: Any, name: str) -> Any:
    return section.get(name) if isinstance(section, Mapping) else getattr(section, name, None)


def filled(values: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with what was chosen.

    Args:
        values: Nested mappings.
        found: Of `defaults_of_pretrained`.

    Example:
        >>> filled({"grpo": {"seed": 1}}, {"grpo.learning_rate": 1e-6})
        {'grpo': {'seed': 1, 'learning_rate': 1e-06}}
    """
    result = copied(values)
    for path, value in found.items():
        *outer, name = path.split(".")
        if outer and not isinstance(result.get(outer[0], {}), Mapping | BaseModel | None):
            continue  # no section, which the validation refuses
        place = result
        for key in outer:
            inner = place.get(key, {})
            place[key] = inner.model_dump() if isinstance(inner, BaseModel) else copied(inner or {})
            place = place[key]
        place[name] = value
    return result


def with_judges_of_gpus(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a cluster with GPUs, in which judges of the run compute in bfloat16.

    A judge on GPUs of its own, which it shares with nothing, takes 0.9 of their memory.

    Args:
        values: Nested mappings. What a judge says stays.

    Example:
        >>> judge = {"kind": "model", "model": "folder", "placement": {"own": 1}}
        >>> found = with_judges_of_gpus({"judge": judge})["judge"]
        >>> found["dtype"], found["gpu_memory_utilization"]
        ('bfloat16', 0.9)
    """
    found = copied(values)
    found.update({key: _with_judges_of_gpus(value) for key, value in values.items()})
    judge = found.get("judge")
    if isinstance(judge, dict) and judge.get("kind") == "model":
        judge.setdefault("dtype", "bfloat16")
        if _num_own(judge):
            judge.setdefault("gpu_memory_utilization", OWN_GPU_SHARE)
    return found


def _with_judges_of_gpus(value: Any) -> Any:
    if isinstance(value, Mapping):
        return with_judges_of_gpus(value)
    if isinstance(value, list):
        places = getattr(value, "places", ())
        return PlacedList([_with_judges_of_gpus(each) for each in value], places)
    return value


def as_sentence(found: Mapping[str, Any]) -> str:
    """What was chosen, for a reader."""
    return ", ".join(f"{path} {value}" for path, value in sorted(found.items()))


def rate_warning(
    section: str, learning_rate: float, *, num_parameters: float, uses_lora: bool
) -> str | None:
    """What to tell of a rate that would wreck a pretrained model; None of any other.

    Args:
        section: Of the algorithm.
        learning_rate: The highest that is reached.
        num_parameters: Of the model.
        uses_lora: Whether adapters are trained in place of the weights.
    """
    too_high = learning_rate > LARGEST_LEARNING_RATE and not uses_lora
    if not too_high or num_parameters <= _SMALL_MODEL:
        return None
    usual = LEARNING_RATES.get(section, 1e-5)
    return (
        f"{section}.learning_rate {learning_rate:g} usually destroys a pretrained model of "
        f"{num_parameters / 1e6:.0f} M parameters: {usual / 2:g} to {usual * 5:g} is the usual "
        "range"
    )
