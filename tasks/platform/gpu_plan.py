"""Plans of whole recipes: memory and speed of each stage, and the refusal of what does not fit."""

import json
import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from nemo_rl_core.config.environment import EnvironmentConfig
from nemo_rl_core.config.model import (
    ModelConfig,
    ModelFromWheel,
    PretrainedModel,
    TextModelFromConfig,
)
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
from tasks.recipes.common import PipelineRecipe
from tasks.recipes.loads import loads_of, steps_of

_LOG = logging.getLogger(__name__)
ASSUMED = ACCELERATORS["nvidia-h100"]
"""Planned for where neither the recipe nor this machine says which GPU there is."""


@dataclass(frozen=True)
class StagePlan:
    """One stage on one kind of GPU.

    Attributes:
        load: What it asks for.
        memory: What it takes.
        speed: What is expected of it; None if the peak of the GPU is not known.
        choices: What settings are that the recipe leaves to the plan, by their paths.
        num_steps: Of a stage that trains, all iterations together.
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
        gpu: The kind.
        stages: In the order in which they run.
        problems: Why it does not fit, one sentence each; empty if it does.
        change: The smallest change with which it fits; None if it fits, or no known one does.
        unplanned: What takes memory of a GPU besides, and is not counted.
        refused: Those of the problems that the kind of GPU has, and not its memory.
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
        """What of its layouts has never run on GPUs."""
        return list(dict.fromkeys(text for stage in self.stages for text in untried(stage.load)))

    @property
    def gpu_hours(self) -> dict[str, float]:
        """Expected of each stage that trains; evaluations, starts and what is cached left out."""
        return {
            stage.load.name: stage.num_steps * stage.speed.step_seconds * stage.load.num_gpus / 3600
            for stage in self.stages
            if stage.num_steps is not None and stage.speed is not None
        }

    @property
    def has_mean(self) -> bool:
        """Whether completions have a stated mean; else all are expected at their longest."""
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
        """What has activations that are an estimate."""
        loads = [stage.load for stage in self.stages]
        found = [f"the model type {each.sizes.model_type}" for each in loads
                 if not each.sizes.is_exact]  # fmt: skip
        backends = [each.training.config for each in loads if each.training]
        found += [f"the backend {each.backend}" for each in backends
                  if not isinstance(each, DTensorTraining)]  # fmt: skip
        return list(dict.fromkeys(found))


def plan_recipe(
    recipe: PipelineRecipe,
    gpu: Accelerator,
    *,
    model_config: Mapping[str, Any] | None = None,
    mean_completion_tokens: float | None = None,
) -> RecipePlan:
    """Plans every stage of a recipe that computes on GPUs.

    Args:
        recipe: Whose `cluster` has GPUs.
        gpu: Their kind.
        model_config: The config.json of `model`; by default that which its section names.
        mean_completion_tokens: Of a completion on average; by default what `budget` says.

    Raises:
        ModelError: If a model's config cannot be read.
        ConfigError: If the layout does not divide the ranks.
    """
    mean = mean_completion_tokens or recipe.budget.mean_completion_tokens
    read, unread = _reader(recipe.model, model_config), dict[str, None]()
    scorers = partial(_scorers, of_run=recipe.model, read=read, unread=unread)
    loads = [_with_mean(load, mean) for load in loads_of(recipe, read, scorers)]
    steps = steps_of(recipe)
    stages = tuple(_planned(load, gpu, steps.get(load.name)) for load in loads)
    problems = tuple(text for stage in stages for text in _problems(stage, gpu))
    change = smallest_change(loads, gpu.memory_gib) if problems else None
    refused = tuple(dict.fromkeys(text for load in loads if (text := problem_of(load, gpu))))
    if refused:
        without = (Setting("training.float8", "none"),)
        change = without if not problems else change and (*without, *change)
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
    of_run: ModelConfig,
    read: Callable[[ModelConfig], ModelSizes],
    unread: dict[str, None],
) -> tuple[ScorerLoad, ...]:
    """The models that score; those whose config.json cannot be read are noted in `unread`."""
    if not (names := names_of_scorers(environment)):
        return ()
    try:
        return tuple(
            scorers_of(
                environment,
                lambda name: _pretrained_config(located(name)),
                of_run=read(of_run),
                path=path,
            )
        )
    except NemoRLError as error:
        _LOG.warning("what scores was not planned: %s", error.in_one_line)
        unread.update(dict.fromkeys(names))
        return ()


def _reader(
    own: ModelConfig, model_config: Mapping[str, Any] | None
) -> Callable[[ModelConfig], ModelSizes]:
    def read(model: ModelConfig) -> ModelSizes:
        if model == own and model_config is not None:
            return sizes_of(model_config)
        return _sizes_of_section(model)

    return read


@cache
def _sizes_of_section(model: ModelConfig) -> ModelSizes:
    return sizes_of(config_of(model))


def _planned(load: StageLoad, gpu: Accelerator, num_steps: int | None) -> StagePlan:
    asked, load = load, chosen(load, gpu.memory_gib)
    memory = plan_memory(load, gpu.memory_gib)
    choices = {}
    if asked.training is not None and load.training is not None:
        choices = resolved(asked.training.config, load.training.config)
    return StagePlan(load, memory, plan_speed(load, memory, gpu), choices, num_steps)


def _problems(stage: StagePlan, gpu: Accelerator) -> list[str]:
    load, memory = stage.load, stage.memory
    found = []
    if problem := layout_problem(load):
        found.append(f"{load.name}: {problem}")
    if problem := scorer_problem(load, gpu.memory_gib):
        found.append(f"{load.name}: {problem}")
    needs = {"training": memory.training, "sampling": memory.sampling, "scoring": memory.scoring}
    for doing, needed in needs.items():
        if needed > HEADROOM * gpu.memory_gib:
            found.append(
                f"{load.name}: {doing} takes {needed:.1f} GiB a GPU, of {gpu.memory_gib:.1f} GiB, "
                f"of which {HEADROOM:.0%} can be filled"
            )
    if missing_cache(load, memory):
        found.append(
            f"{load.name}: the KV cache holds {max(memory.kv_tokens, 0):,.0f} tokens, fewer than "
            f"the {load.longest:,} of one sequence"
        )
    if memory.host > HOST_GIB:
        found.append(
            f"{load.name}: what training offloads takes {memory.host:.0f} GiB of a machine for "
            f"each GPU, of which plans fill {HOST_GIB:.0f}"
        )
    assert bool(found) is not fits(load, gpu.memory_gib)
    return found


def accelerator_of(recipe: PipelineRecipe) -> Accelerator | None:
    """The kind of GPU that a recipe asks for, else that of this machine; None if unknown."""
    named = recipe.cluster.accelerator
    return ACCELERATORS[named] if named else own_accelerator()


def config_of(model: ModelConfig) -> dict[str, Any]:
    """The config.json of a section `model`: of its folder, of the hub, or what would be made.

    Raises:
        ModelError: If it cannot be read.
    """
    match model:
        case PretrainedModel():
            return _pretrained_config(located(model.name))
        case ModelFromWheel():
            raise ModelError(
                "the config.json of a model from a wheel is not known before it is installed",
                got=f"model.kind: wheel, {model.name}",
                fix="plan with a config.json of your own: --model-config FILE",
            )
    return {
        "model_type": "qwen2",
        "vocab_size": _vocabulary(text=isinstance(model, TextModelFromConfig)),
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "tie_word_embeddings": True,
    }


def _vocabulary(*, text: bool) -> int:
    from nemo_rl_core.data.tokenizer import build_arithmetic_tokenizer, build_byte_tokenizer

    return len(build_byte_tokenizer() if text else build_arithmetic_tokenizer())


def _pretrained_config(name: str) -> dict[str, Any]:
    folder = Path(name).expanduser()
    if remote.is_remote(name):
        return _of_object(f"{name.rstrip('/')}/config.json")
    path = folder / "config.json" if folder.is_dir() else _of_hub(name)
    return read_model_config(path)


def _of_object(address: str) -> dict[str, Any]:
    text = remote.read(address)
    with tempfile.TemporaryDirectory() as aside:
        path = Path(aside) / "config.json"
        path.write_bytes(text)
        return read_model_config(path)


def read_model_config(path: Path) -> dict[str, Any]:
    """Reads a config.json.

    Raises:
        ModelError: If there is none, or it is no JSON object.
    """
    try:
        read = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(
            "the config.json of the model cannot be read", got=f"{path}: {error}"
        ) from error
    if not isinstance(read, dict):
        raise ModelError(
            "the config.json of the model is no JSON object", got=f"{path}: {str(read)[:80]}"
        )
    return read


def _of_hub(name: str) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    from nemo_rl_core.checkpoints.hub import hub_access

    with hub_access(name) as problem:
        try:
            return Path(hf_hub_download(name, "config.json"))
        except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
            raise ModelError(
                f"the config.json of {name!r} cannot be had",
                expected="the hub, a copy in its cache, or a folder of this machine",
                got=problem or str(error).splitlines()[0],
                fix="name a folder in model.name, or plan with --model-config FILE",
            ) from error


def refuse_what_does_not_fit(recipe: PipelineRecipe) -> RecipePlan | None:
    """Refuses a recipe whose stages do not fit the GPUs that it runs on.

    The log warns, and nothing is refused, where the model's config is not known, where activations
    are an estimate, and where all would fit if every byte could be filled.

    Returns:
        The plan; None where there is no GPU, or the model's config is not known.

    Raises:
        ResourceError: Names the stages and the smallest change.
        ConfigError: If the kind of GPU lacks what a stage computes with.
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
    refusal = ResourceError(
        f"the recipe does not fit {recipe.cluster.num_gpus_with(recipe.own_bundles)} x {gpu.name}",
        expected=f"at most {gpu.memory_gib:.1f} GiB a GPU",
        got="; ".join(plan.problems),
        fix=fix_of(plan.change),
    )
    if plan.is_exact and plan.is_impossible:
        raise refusal
    _LOG.warning("by an estimate, %s", refusal)
    return plan


def fix_of(change: Sequence[Setting] | None) -> str:
    """What to do about a recipe that does not fit."""
    if change is None:
        return "no change that plans know makes it fit: take a smaller model, or larger GPUs"
    splits_engine = any(setting.path.endswith("tensor_parallel_size") for setting in change)
    caveat = " (engines over several GPUs have never run)" if splits_engine else ""
    return "the smallest change that fits: " + " ".join(map(str, change)) + caveat
