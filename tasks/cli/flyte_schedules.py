"""Schedules as launch plans of a Flyte cluster."""

import functools
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from flytekit import LaunchPlan
from flytekit.clients.friendly import SynchronousFlyteClient
from flytekit.configuration import Config, ImageConfig, SerializationSettings
from flytekit.exceptions.user import (
    FlyteEntityAlreadyExistsException,
    FlyteEntityNotExistException,
    FlyteInvalidInputException,
)
from flytekit.models.admin.common import Sort
from flytekit.models.common import NamedEntityIdentifier
from flytekit.models.core.execution import WorkflowExecutionPhase as Phase
from flytekit.models.core.identifier import Identifier, ResourceType
from flytekit.models.launch_plan import LaunchPlanSpec, LaunchPlanState
from flytekit.tools.translator import get_serializable_launch_plan

from nemo_rl_core.config.data import DataConfig, FileData, MixtureData
from nemo_rl_core.config.model import PretrainedModel
from nemo_rl_core.errors import ConfigError, ResourceError
from nemo_rl_core.telemetry.budget import LIMIT
from nemo_rl_core.telemetry.notices import mail_addresses
from tasks.cli.flyte_answers import explained_answers
from tasks.cli.recipe_plan import pipeline_of
from tasks.cli.run import PIPELINES
from tasks.cli.run_settings import chosen_pipeline
from tasks.platform.registry import refuse_images_without_registry
from tasks.platform.schedules import BAD_ENDS, OWN_LABELS, described, on_schedule
from tasks.recipes.common import PipelineRecipe, Recipe

_LATEST = Sort("created_at", Sort.Direction.DESCENDING)
_PAGE = 100
_Given = ParamSpec("_Given")
_Found = TypeVar("_Found")


@dataclass(frozen=True)
class ScheduledRecipe:
    """A schedule as the cluster has it.

    Attributes:
        name: Of the launch plan.
        version: Of the launch plan.
        workflow: Name of the workflow that it runs.
        workflow_version: The version of the code.
        cron: When runs start, in UTC.
        active: Whether runs start.
        labels: That its runs get, without those that every schedule has.
    """

    name: str
    version: str
    workflow: str
    workflow_version: str
    cron: str
    active: bool
    labels: dict[str, str] = field(default_factory=dict)


def planned_schedule(
    recipe: str,
    settings: Sequence[str],
    *,
    cron: str,
    pipeline: str | None,
    name: str | None,
    notify: str,
    labels: Mapping[str, str] | None = None,
) -> LaunchPlan:
    """A launch plan that runs a recipe by itself.

    Args:
        recipe: A YAML file, or the name of one of `workflows/recipes`.
        settings: `key=value` each, laid over it.
        cron: When runs start.
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
    LaunchPlan.CACHE.pop(called, None)  # flytekit refuses a name twice in a process
    return LaunchPlan.create(
        called,
        chosen.workflow,
        default_inputs={"config": chosen.recipe},
        **on_schedule(cron, addresses, Phase.SUCCEEDED, *BAD_ENDS),
        **described("schedule", f"The recipe {Path(recipe).stem}, at {cron} UTC", labels),
    )


def _from_the_cluster(
    method: Callable[Concatenate["Schedules", _Given], _Found],
) -> Callable[Concatenate["Schedules", _Given], _Found]:
    """Explains that a cluster does not answer, or does not know who asks."""

    @functools.wraps(method)
    def explained(self: "Schedules", /, *args: _Given.args, **kwargs: _Given.kwargs) -> _Found:
        with explained_answers(
            "the schedules cannot be read or changed",
            self._endpoint,
            project=self._project,
            domain=self._domain,
            what="launch plans",
        ):
            return method(self, *args, **kwargs)

    return explained


class _SpecWithLimit:
    """A launch plan's spec that gives its runs a variable: flytekit's own lacks that field."""

    def __init__(self, spec: LaunchPlanSpec, max_gpu_hours: float) -> None:
        self._spec, self._max_gpu_hours = spec, max_gpu_hours

    def to_flyte_idl(self) -> Any:
        made = self._spec.to_flyte_idl()
        made.envs.values.add(key=LIMIT, value=f"{self._max_gpu_hours:g}")
        return made


class Schedules:
    """The schedules of a project and domain.

    Args:
        client: Of Flyte's admin service.
        project: The project on the cluster.
        domain: Its domain, such as `production`.
        where: The address of the cluster, for messages.
    """

    def __init__(
        self, client: SynchronousFlyteClient, *, project: str, domain: str, where: str
    ) -> None:
        self._client, self._project, self._domain = client, project, domain
        self._endpoint = where
        self.where = f"{project}/{domain} of {where}"

    @classmethod
    def of(cls, config: Path | None, *, project: str, domain: str) -> Self:
        """The schedules of the cluster in a configuration of Flyte's client.

        Args:
            config: The file; None takes what `pyflyte` would take.
            project: The project on the cluster.
            domain: Its domain.
        """
        platform = Config.auto(str(config) if config else None).platform
        client = SynchronousFlyteClient(platform)
        return cls(client, project=project, domain=domain, where=platform.endpoint)

    @_from_the_cluster
    def register(self, plan: LaunchPlan, *, version: str | None) -> ScheduledRecipe:
        """Registers a launch plan for a workflow that is registered already.

        The same schedule of the same code has the same version, so that a second time changes
        nothing.

        Args:
            plan: What to register.
            version: Of the workflow; None takes the latest.

        Raises:
            ResourceError: If the workflow is not registered, or in another form than here.
            ConfigError: If it was registered with images that the cluster cannot pull.
        """
        workflow = plan.workflow.name
        code = version or self._latest_workflow(workflow)
        self._refuse_lost_images(workflow, code)
        spec = self._spec(plan, code)
        digest = sha256(spec.to_flyte_idl().SerializeToString(deterministic=True)).hexdigest()[:12]
        identifier = self._identifier(plan.name, f"{code}-{digest}")
        try:
            self._client.create_launch_plan(identifier, spec)
        except FlyteEntityAlreadyExistsException:
            pass
        except (FlyteInvalidInputException, FlyteEntityNotExistException) as error:
            raise ResourceError(
                f"the cluster does not take the schedule {plan.name}",
                expected=f"{workflow} of version {code} in {self.where}, as in this checkout",
                got=" ".join(str(error).split())[:300],
                fix="register this checkout first (make register CONFIG=flyte.yaml), or name "
                "another --version",
            ) from error
        return _scheduled(self._client.get_launch_plan(identifier))

    @_from_the_cluster
    def activate(self, schedule: ScheduledRecipe) -> ScheduledRecipe:
        """Starts runs of a schedule; former versions of it start none from then on."""
        self._set(schedule, LaunchPlanState.ACTIVE)
        return replace(schedule, active=True)

    @_from_the_cluster
    def pause(self, name: str) -> ScheduledRecipe:
        """Starts no further run of a schedule.

        Raises:
            ConfigError: If no version of it is active.
        """
        active = {each.name: each for each in self.found() if each.active}
        if name not in active:
            raise self._unknown("active schedule", name, active)
        self._set(active[name], LaunchPlanState.INACTIVE)
        return replace(active[name], active=False)

    @_from_the_cluster
    def latest(self, name: str) -> ScheduledRecipe:
        """The version of a schedule that was registered last.

        Raises:
            ConfigError: If there is no such schedule.
        """
        found = self._latest(name)
        if found is None:
            raise self._unknown("schedule", name, {each.name for each in self.found()})
        return found

    @_from_the_cluster
    def found(self) -> list[ScheduledRecipe]:
        """The active version of each schedule, or its latest if none is active."""
        active = {}
        for plan in _pages(
            lambda token: self._client.list_active_launch_plans_paginated(
                self._project, self._domain, limit=_PAGE, token=token
            )
        ):
            if _cron(plan):
                active[plan.id.name] = _scheduled(plan)
        names = _pages(
            lambda token: self._client.list_launch_plan_ids_paginated(
                self._project, self._domain, limit=_PAGE, token=token
            )
        )
        # Every workflow has a launch plan of its own name, without a schedule.
        own = {each.name for each in names if not each.name.startswith("workflows.")}
        candidates = sorted(own - active.keys())
        paused = {name: found for name in candidates if (found := self._latest(name))}
        return [found for _, found in sorted({**active, **paused}.items())]

    def _latest(self, name: str) -> ScheduledRecipe | None:
        plans, _ = self._client.list_launch_plans_paginated(
            self._named(name), limit=1, sort_by=_LATEST
        )
        return _scheduled(plans[0]) if plans and _cron(plans[0]) else None

    def _latest_workflow(self, name: str) -> str:
        found, _ = self._client.list_workflows_paginated(
            self._named(name), limit=1, sort_by=_LATEST
        )
        if not found:
            raise ResourceError(
                f"the workflow {name} is not registered in {self.where}",
                expected="a version of it on the cluster, with the code that a schedule runs",
                got="none",
                fix="register it in the same project and domain: make register CONFIG=flyte.yaml",
            )
        return str(found[0].id.version)

    def _refuse_lost_images(self, name: str, version: str) -> None:
        identifier = Identifier(ResourceType.WORKFLOW, self._project, self._domain, name, version)
        try:
            found = self._client.get_workflow(identifier)
        except FlyteEntityNotExistException:
            return  # what registers the launch plan says so
        tasks = [each.template for each in found.closure.compiled_workflow.tasks]
        images = [task.container.image for task in tasks if task.container is not None]
        called = f"{name} of version {version}"
        refuse_images_without_registry(images, workflow=called, endpoint=self._endpoint)

    def _spec(self, plan: LaunchPlan, version: str) -> LaunchPlanSpec | _SpecWithLimit:
        settings = SerializationSettings(
            image_config=ImageConfig.auto_default_image(),
            project=self._project,
            domain=self._domain,
            version=version,
        )
        # The workflow is on the cluster: its tasks are not serialized again.
        found = get_serializable_launch_plan(
            OrderedDict(), settings, plan, recurse_downstream=False
        )
        spec: LaunchPlanSpec = found.spec
        limit = plan.saved_inputs["config"].budget.max_gpu_hours
        # No stage reads the section, so its limit comes to the containers as their variable.
        return spec if limit is None else _SpecWithLimit(spec, limit)

    def _set(self, schedule: ScheduledRecipe, state: int) -> None:
        self._client.update_launch_plan(self._identifier(schedule.name, schedule.version), state)

    def _identifier(self, name: str, version: str) -> Identifier:
        return Identifier(ResourceType.LAUNCH_PLAN, self._project, self._domain, name, version)

    def _named(self, name: str) -> NamedEntityIdentifier:
        return NamedEntityIdentifier(self._project, self._domain, name)

    def _unknown(self, what: str, name: str, known: Collection[str]) -> ConfigError:
        return ConfigError(
            f"there is no {what} {name!r} in {self.where}",
            expected=f"one of {', '.join(sorted(known))}" if known else "a schedule",
            got=name,
            fix="list them with: nemo-rl schedule list",
        )


def _scheduled(plan: Any) -> ScheduledRecipe:
    return ScheduledRecipe(
        name=plan.id.name,
        version=plan.id.version,
        workflow=plan.spec.workflow_id.name,
        workflow_version=plan.spec.workflow_id.version,
        cron=_cron(plan),
        active=plan.closure.state == LaunchPlanState.ACTIVE,
        labels={
            key: value
            for key, value in sorted(plan.spec.labels.values.items())
            if key not in OWN_LABELS
        },
    )


def _pages(page: Callable[[str | None], tuple[list[Any], str]]) -> Iterator[Any]:
    token: str | None = None
    while True:
        found, token = page(token)
        yield from found
        if not token:
            return


def _cron(plan: Any) -> str:
    schedule = plan.spec.entity_metadata.schedule
    expression = schedule.cron_schedule if schedule is not None else None
    return str(expression.schedule) if expression is not None else ""


def _refuse_own_files(recipe: Recipe) -> None:
    """Refuses files and folders of this machine that do not travel with the code.

    Raises:
        ConfigError: For the first one.
    """
    for experiment in recipe.experiments:
        if not isinstance(experiment, PipelineRecipe):
            continue
        named = list(_files(experiment.data, "data"))
        if experiment.evaluation.data is not None:
            named += _files(experiment.evaluation.data, "evaluation.data")
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
