"""The recipe of `nemo-rl run`, and the report of a dry run."""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import yaml
from flytekit.core.workflow import WorkflowBase
from transformers.utils.logging import disable_progress_bar

from nemo_rl_core.algorithms.declarations import ALGORITHMS
from nemo_rl_core.config.places import PlacedDict, overlaid
from nemo_rl_core.data.datasets import formats
from nemo_rl_core.errors import ConfigError
from nemo_rl_core.history.database import path_of
from nemo_rl_core.history.queries import History
from nemo_rl_core.produce import StageInputs
from nemo_rl_core.store.store import Store
from nemo_rl_core.telemetry.model_flops import num_parameters
from tasks.cli.pipelines import Pipelines
from tasks.cli.recipe.recipe_pipeline import is_shipped, keys_of, refuse_other_pipeline
from tasks.local_run.dry_run import call_dry
from tasks.local_run.preflight import preflight
from tasks.recipes.common import Recipe, RecipeError, default_name
from tasks.recipes.yaml_document import RecipeLoader

_NOT_SET = "not set"
_BYTES_OF_WEIGHTS = 4
"""Bytes of a parameter in float32."""
_BYTES_OF_TRAINING = 16
"""Bytes of a parameter with its gradient and Adam's two moments in float32."""

TRAINING = ("sweep_point", *(each.stage for each in ALGORITHMS.values()))
"""Stages that train; the others read a model."""

_Lasted = tuple[str, float]
"""A stage and its seconds."""


@dataclass(frozen=True)
class ChosenPipeline:
    """A pipeline with its recipe.

    Attributes:
        base: The recipe without the changes of the command line.
        values: Equivalent value of `--config` of `pyflyte run`.
        default: Name of the recipe that the pipeline runs without one.
    """

    workflow: WorkflowBase
    base: Recipe
    recipe: Recipe
    values: dict[str, Any]
    default: str | None


def chosen_pipeline(
    pipeline: str, settings: Sequence[str], *, pipelines: Pipelines
) -> ChosenPipeline:
    """Reads the arguments of the command."""
    pipelines.refuse_unknown(pipeline)
    workflow = pipelines.workflow(pipeline)
    kind, default = workflow.python_interface.inputs_with_defaults["config"]
    has_recipe = bool(settings) and "=" not in settings[0]
    named = {"recipe": settings[0] if has_recipe else default_name(default)}
    values = overlaid(named, changes_of(settings[has_recipe:]))
    if has_recipe and is_shipped(settings[0]):
        refuse_other_pipeline(pipeline, settings[0], pipelines)
    try:
        recipe = kind.model_validate(values)  # validated first, for mistakes in the file
    except RecipeError:
        # A user's file may be meant for several pipelines, with the sections of all of them.
        if has_recipe and not keys_of(settings[0]) <= {"recipe", *kind.model_fields}:
            refuse_other_pipeline(pipeline, settings[0], pipelines)
        raise
    base = kind.model_validate(named)
    return ChosenPipeline(workflow, base, recipe, values, default_name(default))


def changes_of(settings: Sequence[str]) -> dict[str, Any]:
    """Returns nested mappings from settings as `key.key=value`, with values in YAML.

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
                f"{setting!r} is not a setting",
                expected="key=value after the recipe, such as grpo.learning_rate=1e-5",
                got=setting,
            )
        try:
            value = yaml.load(text, Loader=RecipeLoader)
        except yaml.YAMLError as error:
            raise ConfigError(
                f"the value of {key} is not YAML",
                expected="a number, a word, true, null, [a list] or {a: map}",
                got=text[:80],
                fix="put it into quotes for the shell and for YAML, as in 'key=\"a: b\"'",
            ) from error
        section = changes
        for part in parts[:-1]:
            section.places.setdefault(part, f"the argument {setting[:80]}")
            section = section.setdefault(part, PlacedDict())
            if not isinstance(section, PlacedDict):
                raise _set_twice(key)
        if parts[-1] in section:
            raise _set_twice(key)
        section[parts[-1]] = value
        section.places[parts[-1]] = f"the argument {setting[:80]}"
    return changes


def _set_twice(key: str) -> ConfigError:
    return ConfigError(
        f"{key} is set twice", expected="each setting once", got=key, fix="leave one of them out"
    )


def yaml_of(recipe: Recipe) -> str:
    """Returns the complete recipe as YAML, defaults included."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


class _Once(logging.Filter):
    """Lets each message through once."""

    def __init__(self) -> None:
        super().__init__()
        self._shown: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        """Returns whether the message is new."""
        is_new = record.getMessage() not in self._shown
        self._shown.add(record.getMessage())
        return is_new


def show_dry_run(chosen: ChosenPipeline) -> None:
    """Checks the recipe, makes a dry call of the pipeline, and prints what would run."""
    Store.default().check_writable()
    _echo_differences(chosen)
    formats.logger.addFilter(_Once())  # several checks read the same rows
    preflight({"config": chosen.recipe})
    disable_progress_bar()  # hides the bars of saving, not those of downloads
    dry_run = call_dry(chosen.workflow, config=chosen.recipe)
    click.echo("\nstages")
    rest, run = _last_durations(chosen)
    took = None
    for stage in dry_run.stages:
        took = _taken(rest, stage.name)
        shown = f"{took:.0f} s the last time" if stage.state == "runs" and took is not None else ""
        click.echo(f"  {stage.name:<24}{stage.state:<10}{shown}".rstrip())
    if dry_run.stopped_at is None:
        click.echo("  everything is cached: the run would only report")
        return
    _echo_rest(rest, took, run)
    _echo_memory(dry_run.stages[-1].name, dry_run.stopped_at)


def _echo_differences(chosen: ChosenPipeline) -> None:
    before, after = (
        dict(_flat(recipe.model_dump(mode="json"))) for recipe in (chosen.base, chosen.recipe)
    )
    click.echo(f"recipe: {chosen.values['recipe']}")
    for key in dict.fromkeys([*before, *after]):
        if before.get(key, _NOT_SET) != after.get(key, _NOT_SET):
            click.echo(f"  {key}: {_as_yaml(before, key)} -> {_as_yaml(after, key)}")


def _as_yaml(values: Mapping[str, Any], key: str) -> str:
    """Formats a value as a recipe has it: `null`, `true`, `[1, 2]`."""
    if key not in values:
        return _NOT_SET
    text = yaml.safe_dump(values[key], default_flow_style=True, width=math.inf, allow_unicode=True)
    return text.removesuffix("...\n").strip()


def _flat(values: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(values, dict) and values:
        for key, value in values.items():
            yield from _flat(value, f"{path}.{key}" if path else str(key))
    else:
        yield path, values


def _last_durations(chosen: ChosenPipeline) -> tuple[list[_Lasted], str]:
    """Returns the stages of the last run of this recipe in order, and the run's id.

    Two may have one name: `evaluate` runs before and after training. A cache hit has the seconds of
    the run that made it.
    """
    store = Store.default()
    if not path_of(store).is_file():
        return [], ""
    recipe = Path(str(chosen.values["recipe"])).stem
    with History(store) as history:
        runs = history.executions(workflow=chosen.workflow.name, state="succeeded").items
        run = next((run for run in runs if (run.recipe or chosen.default) == recipe), None)
        nodes = history.nodes(run.id) if run else []
        makers = [
            history.node(node.cached_from).node if node.cached_from is not None else node
            for node in nodes
        ]
    tasks = {node.id for node in nodes if node.kind == "task"}
    took = [
        (node.name, maker.ended_at - maker.started_at)
        for node, maker in zip(nodes, makers, strict=True)
        # Nodes inside a task, such as the points of a sweep, are part of its time.
        if node.id in tasks and node.parent not in tasks
        if "plan_" not in node.name and maker.ended_at is not None
    ]
    return took, run.id if run else ""


def _taken(rest: list[_Lasted], name: str) -> float | None:
    for index, (each, seconds) in enumerate(rest):
        if each == name:
            del rest[index]
            return seconds
    return None


def _echo_rest(rest: list[_Lasted], took: float | None, run: str) -> None:
    names = ", ".join(name for name, _ in rest)
    click.echo("  and everything after it" + (f": {names}" if names else ""))
    if took is None:
        click.echo("\ntime: unknown, since the store has no earlier run of this recipe")
        return
    seconds = took + sum(seconds for _, seconds in rest)
    click.echo(f"\ntime: about {seconds:.0f} s, as the stages of run {run} took when they ran")


def _echo_memory(stage: str, inputs: StageInputs) -> None:
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
