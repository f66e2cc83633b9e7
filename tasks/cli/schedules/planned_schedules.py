"""Converts the arguments of `nemo-rl schedule` into launch plans."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from flytekit import LaunchPlan
from flytekit.models.core.execution import WorkflowExecutionPhase as Phase

from nemo_rl_core.config.data import DataConfig, FileData, MixtureData
from nemo_rl_core.config.model import PretrainedModel
from nemo_rl_core.errors import ConfigError
from nemo_rl_core.telemetry.notices import mail_addresses
from tasks.cli.pipelines import Pipelines
from tasks.cli.recipe.recipe_pipeline import pipeline_of
from tasks.cli.recipe.run_settings import chosen_pipeline
from tasks.flyte.schedules import BAD_ENDS, described, on_schedule
from tasks.recipes.common import Recipe


def planned_schedule(
    recipe: str,
    settings: Sequence[str],
    *,
    pipelines: Pipelines,
    cron: str,
    pipeline: str | None,
    name: str | None,
    notify: str,
    labels: Mapping[str, str] | None = None,
) -> LaunchPlan:
    """Returns a launch plan that runs a recipe on a schedule."""
    chosen = chosen_pipeline(
        pipeline or pipeline_of(recipe, pipelines), [recipe, *settings], pipelines=pipelines
    )
    _refuse_own_files(chosen.recipe)
    addresses = mail_addresses({"NEMO_RL_NOTIFY": notify})
    schedule_name = name or Path(recipe).stem
    LaunchPlan.CACHE.pop(schedule_name, None)  # flytekit refuses a name twice in a process
    return LaunchPlan.create(
        schedule_name,
        chosen.workflow,
        default_inputs={"config": chosen.recipe},
        **on_schedule(cron, addresses, Phase.SUCCEEDED, *BAD_ENDS),
        **described("schedule", f"The recipe {Path(recipe).stem}, at {cron} UTC", labels),
    )


def _refuse_own_files(recipe: Recipe) -> None:
    """Refuses files and folders of this machine that are not uploaded with the code."""
    for experiment in recipe.experiments:
        named_files = list(_files(experiment.data, "data"))
        if experiment.evaluation_data is not None:
            named_files += _files(experiment.evaluation_data, "evaluation.data")
        for model in experiment.models:
            if isinstance(model, PretrainedModel) and Path(model.name).expanduser().is_dir():
                named_files.append(("model.name", model.name))
        for path, name in named_files:
            if _stays_here(name):
                raise ConfigError(
                    f"{path}: the cluster cannot read {name}",
                    expected="an address such as s3://BUCKET/rows/*.jsonl, a name on the hub, or a "
                    "relative path in this checkout, which is uploaded with the code",
                    got=name,
                    fix="upload it, and put its address into the recipe",
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
