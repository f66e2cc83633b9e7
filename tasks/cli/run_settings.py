"""The recipe of `nemo-rl run`, and what a dry run says of it."""

import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import yaml
from flytekit.core.workflow import WorkflowBase
from transformers.utils import logging

from nemo_rl_core.config.names import unknown_names
from nemo_rl_core.config.places import PlacedDict, overlaid
from nemo_rl_core.errors import ConfigError
from nemo_rl_core.history.database import path_of
from nemo_rl_core.history.queries import History
from nemo_rl_core.produce import StageInputs
from nemo_rl_core.store.store import Store
from nemo_rl_core.telemetry.model_flops import num_parameters
from tasks.cli.recipe_pipeline import is_shipped, keys_of, refuse_of_another_pipeline
from tasks.platform.dry_run import call_dry
from tasks.platform.preflight import preflight
from tasks.recipes.common import Recipe, RecipeError, default_name
from tasks.recipes.yaml_document import RecipeLoader

_BYTES_OF_WEIGHTS = 4
"""A parameter in float32."""
_BYTES_OF_TRAINING = 16
"""A parameter with its gradient and Adam's two moments in float32."""

TRAINING = (
    "dpo_iteration",
    "grpo_iteration",
    "ppo_iteration",
    "sweep_point",
    "train_reward_model",
    "train_sft",
    "train_student",
)
"""Stages that train; the others read a model."""

_Lasted = tuple[str, float]
"""A stage and its seconds."""


@dataclass(frozen=True)
class ChosenPipeline:
    """A pipeline with its recipe.

    Attributes:
        workflow: What runs.
        base: The recipe without the changes of the command line.
        recipe: The recipe with them.
        values: What `--config` of `pyflyte run` would say.
        default: Name of the recipe that the pipeline runs without one.
    """

    workflow: WorkflowBase
    base: Recipe
    recipe: Recipe
    values: dict[str, Any]
    default: str | None


def chosen_pipeline(
    pipeline: str, settings: Sequence[str], *, pipelines: Mapping[str, str]
) -> ChosenPipeline:
    """Reads the arguments of the command.

    Args:
        pipeline: Its name.
        settings: Perhaps a recipe, then `key=value` each.
        pipelines: The workflow of each pipeline.

    Raises:
        NemoRLError: If there is no such pipeline or recipe, if the recipe is for another pipeline,
            or if a setting is not valid.
        RecipeError: If the recipe is not valid.
    """
    if pipeline not in pipelines:
        raise unknown_names(
            "there is no pipeline", [pipeline], list(pipelines), otherwise="choose one of them"
        )
    module = importlib.import_module(f"workflows.{pipeline}")
    workflow = getattr(module, pipelines[pipeline])
    kind, default = workflow.python_interface.inputs_with_defaults["config"]
    has_recipe = bool(settings) and "=" not in settings[0]
    named = {"recipe": settings[0] if has_recipe else default_name(default)}
    values = overlaid(named, changes_of(settings[has_recipe:]))
    if has_recipe and is_shipped(settings[0]):
        refuse_of_another_pipeline(pipeline, settings[0])
    try:
        recipe = kind.model_validate(values)  # first: it has the mistakes of the file, too
    except RecipeError:
        # A file of the user's may be meant for several pipelines, with the sections of them all.
        if has_recipe and not keys_of(settings[0]) <= {"recipe", *kind.model_fields}:
            refuse_of_another_pipeline(pipeline, settings[0])
        raise
    base = kind.model_validate(named)
    return ChosenPipeline(workflow, base, recipe, values, default_name(default))


def changes_of(settings: Sequence[str]) -> dict[str, Any]:
    """Nested mappings of `key.key=value` each, with values in YAML.

    Raises:
        ConfigError: For a setting without `=`, with a value that is no YAML, or said twice.

    Example:
        >>> changes_of(["grpo.num_steps=3", "grpo.loss.kl=null"])
        {'grpo': {'num_steps': 3, 'loss': {'kl': None}}}
    """
    changes = PlacedDict()
    for setting in settings:
        key, equals, text = setting.partition("=")
        parts = key.split(".")
        if not equals or not all(parts):
            raise ConfigError(
                f"{setting!r} is no setting",
                expected="key=value after the recipe, such as grpo.learning_rate=1e-5",
                got=setting,
            )
        try:
            value = yaml.load(text, Loader=RecipeLoader)
        except yaml.YAMLError as error:
            raise ConfigError(
                f"the value of {key} is no YAML",
                expected="a number, a word, true, null, [a list] or {a: map}",
                got=text[:80],
                fix="put it into quotes for the shell and for YAML, as in 'key=\"a: b\"'",
            ) from error
        section = changes
        for part in parts[:-1]:
            section.places.setdefault(part, f"the argument {setting[:80]}")
            section = section.setdefault(part, PlacedDict())
            if not isinstance(section, PlacedDict):
                raise _said_twice(key)
        if parts[-1] in section:
            raise _said_twice(key)
        section[parts[-1]] = value
        section.places[parts[-1]] = f"the argument {setting[:80]}"
    return changes


def _said_twice(key: str) -> ConfigError:
    return ConfigError(
        f"{key} is set twice", expected="each setting once", got=key, fix="leave one of them out"
    )


def yaml_of(recipe: Recipe) -> str:
    """The whole recipe, defaults included."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def show_dry_run(chosen: ChosenPipeline) -> None:
    """Checks the recipe, calls the pipeline dry, and prints what it would do.

    Raises:
        NemoRLError: For the first failed check.
    """
    Store.default().check_writable()
    _echo_differences(chosen)
    preflight({"config": chosen.recipe})
    logging.disable_progress_bar()  # of saving; those of downloads stay
    found = call_dry(chosen.workflow, config=chosen.recipe)
    click.echo("\nstages")
    rest, run = _last_durations(chosen)
    took = None
    for stage in found.stages:
        took = _taken(rest, stage.name)
        shown = f"{took:.0f} s the last time" if stage.state == "runs" and took is not None else ""
        click.echo(f"  {stage.name:<24}{stage.state:<10}{shown}".rstrip())
    if found.stopped_at is None:
        click.echo("  everything is cached: the run would only report")
        return
    _echo_rest(rest, took, run)
    _echo_memory(found.stages[-1].name, found.stopped_at)


def _echo_differences(chosen: ChosenPipeline) -> None:
    before, after = (
        dict(_flat(recipe.model_dump(mode="json"))) for recipe in (chosen.base, chosen.recipe)
    )
    click.echo(f"recipe: {chosen.values['recipe']}")
    for key in dict.fromkeys([*before, *after]):
        old, new = before.get(key, "not set"), after.get(key, "not set")
        if old != new:
            click.echo(f"  {key}: {old} -> {new}")


def _flat(values: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(values, dict) and values:
        for key, value in values.items():
            yield from _flat(value, f"{path}.{key}" if path else str(key))
    else:
        yield path, values


def _last_durations(chosen: ChosenPipeline) -> tuple[list[_Lasted], str]:
    """The stages of the last run of this recipe in their order, and the run's id.

    Two may have one name: `evaluate` runs before and after training. Of a cache hit they are the
    seconds of the run that made it.
    """
    store = Store.default()
    if not path_of(store).is_file():
        return [], ""
    recipe = Path(str(chosen.values["recipe"])).stem
    with History(store) as history:
        runs = history.executions(workflow=chosen.workflow.name, state="succeeded").items
        run = next((run for run in runs if (run.recipe or chosen.default) == recipe), None)
        nodes = history.nodes(run.id) if run else []
        made = [
            history.node(node.cached_from).node if node.cached_from is not None else node
            for node in nodes
        ]
    tasks = {node.id for node in nodes if node.kind == "task"}
    took = [
        (node.name, maker.ended_at - maker.started_at)
        for node, maker in zip(nodes, made, strict=True)
        # Nodes inside a task, such as the points of a sweep, are a part of its time.
        if node.id in tasks and node.parent not in tasks
        if "plan_" not in node.name and maker.ended_at is not None
    ]
    return took, run.id if run else ""


def _taken(rest: list[_Lasted], name: str) -> float | None:
    """Removes the first stage of a name, and returns its seconds; None if there is none."""
    for index, (each, seconds) in enumerate(rest):
        if each == name:
            del rest[index]
            return seconds
    return None


def _echo_rest(rest: list[_Lasted], took: float | None, run: str) -> None:
    """What follows the first stage that runs, and how long that and the rest have taken."""
    names = ", ".join(name for name, _ in rest)
    click.echo("  and everything after it" + (f": {names}" if names else ""))
    if took is None:
        click.echo("\ntime: no earlier run of this recipe in the store to judge by")
        return
    seconds = took + sum(seconds for _, seconds in rest)
    click.echo(f"\ntime: about {seconds:.0f} s, as the stages of run {run} took when they ran")


def _echo_memory(stage: str, inputs: StageInputs) -> None:
    """The memory of the first model that the stage reads; with all that training adds."""
    for role, folder in inputs.parents.items():
        if not (number := num_parameters(folder / "model")):
            continue
        trains = stage.partition(" ")[0] in TRAINING
        size = number * (_BYTES_OF_TRAINING if trains else _BYTES_OF_WEIGHTS) / 2**30
        what = (
            "weights, gradients and moments in float32 over all ranks, and activations"
            if trains
            else "weights in float32 in each process that holds the model"
        )
        click.echo(
            f"memory of {stage}: {number / 1e6:,.2f} M parameters of {role!r}, {size:.2f} GiB of "
            f"{what}"
        )
        return
