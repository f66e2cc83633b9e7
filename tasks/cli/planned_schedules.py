"""From the arguments of `nemo-rl schedule` to the launch plans that it registers."""

import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flytekit import LaunchPlan
from flytekit.models.core.execution import WorkflowExecutionPhase as Phase

from nemo_rl_core.config.data import DataConfig, FileData, MixtureData
from nemo_rl_core.config.model import PretrainedModel
from nemo_rl_core.errors import ConfigError
from nemo_rl_core.telemetry.notices import mail_addresses
from tasks.cli.pipelines import PIPELINES
from tasks.cli.recipe_pipeline import pipeline_of
from tasks.cli.run_settings import chosen_pipeline
from tasks.platform.arrivals import can_arrive
from tasks.platform.schedules import ARRIVALS, BAD_ENDS, described, on_schedule, one_at_a_time
from tasks.recipes.arrivals import WatchedRows
from tasks.recipes.common import PipelineRecipe, Recipe


def planned_schedule(
    recipe: str,
    settings: Sequence[str],
    *,
    cron: str | None,
    pipeline: str | None,
    name: str | None,
    notify: str,
    labels: Mapping[str, str] | None = None,
) -> LaunchPlan:
    """A launch plan that runs a recipe by itself.

    Args:
        recipe: A YAML file, or the name of one of `workflows/recipes`.
        settings: `key=value` each, laid over it.
        cron: When runs start; None leaves that to a launch plan that looks for rows.
        pipeline: What the recipe is for; None finds it out.
        name: Of the launch plan; None takes that of the recipe.
        notify: Addresses with commas between them, for mail by Flyte.
        labels: Of its runs.

    Raises:
        NemoRLError: If the recipe is not valid, or names files that the cluster cannot have.
        RecipeError: If a section of the recipe is not valid.
    """
    chosen = chosen_pipeline(
        pipeline or pipeline_of(recipe), [recipe, *settings], pipelines=PIPELINES
    )
    _refuse_own_files(chosen.recipe)
    addresses = mail_addresses({"NEMO_RL_NOTIFY": notify})
    called = name or Path(recipe).stem
    if called.endswith(ARRIVALS):
        raise ConfigError(
            f"a schedule cannot be called {called}",
            expected=f"a name that does not end in {ARRIVALS}, as launch plans that look for rows",
            got=called,
            fix=f"give it another one: --name {called.removesuffix(ARRIVALS) or 'mine'}",
        )
    ends = (Phase.SUCCEEDED, *BAD_ENDS)
    when = f"at {cron} UTC" if cron else "when rows arrive"
    LaunchPlan.CACHE.pop(called, None)  # flytekit refuses a name twice in a process
    return LaunchPlan.create(
        called,
        chosen.workflow,
        default_inputs={"config": chosen.recipe},
        **(on_schedule(cron, addresses, *ends) if cron else one_at_a_time(addresses, *ends)),
        **described("schedule", f"The recipe {Path(recipe).stem}, {when}", labels),
    )


@dataclass(frozen=True)
class Looks:
    """When a schedule looks for rows, at what, and what it makes of them.

    Attributes:
        cron: When it looks.
        data: Where the rows come from.
        settled_minutes: No object may be younger when a run starts.
        num_tries: How often runs may fail on the same rows.
        notify: Addresses with commas between them, for mail by Flyte of looks that fail.
        version: Of the workflow; None takes the latest.
    """

    cron: str
    data: tuple[DataConfig, ...]
    settled_minutes: float
    num_tries: int
    notify: str
    version: str | None


def planned_looks(plan: LaunchPlan, watched: WatchedRows, looks: Looks) -> LaunchPlan:
    """A launch plan that looks for new rows of a recipe, and starts the recipe's own.

    Args:
        plan: That of the recipe.
        watched: The rows, as the pod that looks is told of them.
        looks: When it looks, and who is sent mail.
    """
    called = plan.name + ARRIVALS
    LaunchPlan.CACHE.pop(called, None)
    return LaunchPlan.create(
        called,
        importlib.import_module("workflows.arrivals").look_for_rows,
        default_inputs={"config": watched},
        **on_schedule(looks.cron, mail_addresses({"NEMO_RL_NOTIFY": looks.notify}), *BAD_ENDS),
        **described("arrivals", f"Starts {plan.name} when rows arrive", runs=plan.workflow.name),
    )


def rows_of(plan: LaunchPlan) -> tuple[DataConfig, ...]:
    """Where the rows of a planned recipe come from, which others may join.

    Raises:
        ConfigError: If all of its rows are generated, or came with the code.
    """
    recipe: Recipe = plan.saved_inputs["config"]
    found = [
        data
        for each in recipe.experiments
        if isinstance(each, PipelineRecipe)
        for data in (each.data, each.evaluation_data)
        if data is not None and can_arrive(data)
    ]
    if not found:
        raise ConfigError(
            f"no rows of the recipe of {plan.name} can arrive",
            expected="data.kind: file with addresses such as s3://BUCKET/rows/*.jsonl, or hub",
            got="rows that are generated, or files of the checkout, the same at each look",
            fix="name where rows come to lie in data.train, or leave out --on-arrival",
        )
    return tuple(each for place, each in enumerate(found) if each not in found[:place])


def _refuse_own_files(recipe: Recipe) -> None:
    """Refuses files and folders of this machine that do not travel with the code.

    Raises:
        ConfigError: For the first one.
    """
    for experiment in recipe.experiments:
        if not isinstance(experiment, PipelineRecipe):
            continue
        named = list(_files(experiment.data, "data"))
        if experiment.evaluation_data is not None:
            named += _files(experiment.evaluation_data, "evaluation.data")
        for model in experiment.models:
            if isinstance(model, PretrainedModel) and Path(model.name).expanduser().is_dir():
                named.append(("model.name", model.name))
        for path, name in named:
            if _stays_here(name):
                raise ConfigError(
                    f"{path}: the cluster cannot read {name}",
                    expected="an address such as s3://BUCKET/rows/*.jsonl, a name on the hub, or a "
                    "relative path in this checkout, which travels with the code",
                    got=name,
                    fix="upload it, and name where it lies in the recipe",
                )


def _files(data: DataConfig, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(data, MixtureData):
        for index, source in enumerate(data.sources):
            yield from _files(source.data, f"{path}.sources.{index}.data")
    if isinstance(data, FileData):
        yield f"{path}.train", data.train
        if data.validation is not None:
            yield f"{path}.validation", data.validation


def _stays_here(name: str) -> bool:
    path = Path(name).expanduser()
    return "://" not in name and (path.is_absolute() or not path.exists() or ".." in path.parts)
