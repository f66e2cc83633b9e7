"""Schedules as launch plans of a Flyte cluster."""

import functools
import itertools
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from flytekit import LaunchPlan
from flytekit.clients.friendly import SynchronousFlyteClient
from flytekit.configuration import Config, ImageConfig, PlatformConfig, SerializationSettings
from flytekit.exceptions.user import (
    FlyteEntityAlreadyExistsException,
    FlyteEntityNotExistException,
    FlyteInvalidInputException,
)
from flytekit.models.admin.common import Sort
from flytekit.models.common import NamedEntityIdentifier
from flytekit.models.core.identifier import Identifier, ResourceType
from flytekit.models.launch_plan import LaunchPlanSpec, LaunchPlanState
from flytekit.tools.translator import get_serializable_launch_plan

from nemo_rl_core.errors import ConfigError, ResourceError
from nemo_rl_core.telemetry.budget import LIMIT
from tasks.cli.planned_schedules import Looks, planned_looks
from tasks.platform.flyte_answers import explained_answers
from tasks.platform.registry import refuse_images_without_registry
from tasks.platform.schedules import ARRIVALS, OWN_LABELS, RUNS
from tasks.recipes.arrivals import WatchedRows
from tasks.recipes.common import Recipe

_LATEST = Sort("created_at", Sort.Direction.DESCENDING)
_PAGE = 100
_Given = ParamSpec("_Given")
_Found = TypeVar("_Found")


@dataclass(frozen=True)
class ScheduledRecipe:
    """A schedule as the cluster has it.

    Attributes:
        name: Of the launch plan that runs the recipe.
        version: Of the launch plan with the times.
        workflow: Name of the workflow that it runs.
        workflow_version: The version of the code.
        cron: When runs start, in UTC.
        active: Whether runs start.
        labels: That its runs get, without those that every schedule has.
        on_arrival: Whether `cron` says when it looks for new rows, which start a run.
    """

    name: str
    version: str
    workflow: str
    workflow_version: str
    cron: str
    active: bool
    labels: dict[str, str] = field(default_factory=dict)
    on_arrival: bool = False

    @property
    def launch_plan(self) -> str:
        """Name of the launch plan with the times."""
        return self.name + ARRIVALS * self.on_arrival


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
        platform: How the cluster is reached.

    Attributes:
        where: Project, domain and address, for messages.
    """

    def __init__(
        self,
        client: SynchronousFlyteClient,
        *,
        project: str,
        domain: str,
        platform: PlatformConfig,
    ) -> None:
        self._client, self._project, self._domain = client, project, domain
        self._platform, self._endpoint = platform, platform.endpoint
        self.where = f"{project}/{domain} of {platform.endpoint}"

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
        return cls(client, project=project, domain=domain, platform=platform)

    @_from_the_cluster
    def register(self, plan: LaunchPlan, *, version: str | None) -> ScheduledRecipe:
        """Registers a launch plan for a workflow that is registered already.

        The same schedule of the same code has the same version, so that a second time changes
        nothing. One that has been another in between has a new version, and is the latest again.

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
        try:
            identifier = self._created(plan.name, f"{code}-{digest}", spec)
        except (FlyteInvalidInputException, FlyteEntityNotExistException) as error:
            raise ResourceError(
                f"the cluster does not take the schedule {plan.name}",
                expected=f"{workflow} of version {code} in {self.where}, as in this checkout",
                got=" ".join(str(error).split())[:300],
                fix="register this checkout first (make register CONFIG=flyte.yaml), or name "
                "another --version",
            ) from error
        return self._scheduled(self._client.get_launch_plan(identifier))

    def _created(self, name: str, version: str, spec: Any) -> Any:
        """The identifier of the launch plan, which is then the latest of its name."""
        for number in itertools.count():
            identifier = self._identifier(name, version + (f"-{number}" if number else ""))
            try:
                self._client.create_launch_plan(identifier, spec)
            except FlyteEntityAlreadyExistsException:
                latest = self._latest_plan(name)
                if latest is not None and latest.id.version != identifier.version:
                    continue
            return identifier
        raise AssertionError

    def register_looks(self, plan: LaunchPlan, looks: Looks) -> ScheduledRecipe:
        """Registers a recipe's launch plan, and another that looks for its rows and starts it.

        Args:
            plan: Without times.
            looks: What is looked at, and when.

        Raises:
            NemoRLError: As `register` does.
        """
        started = self.register(plan, version=looks.version)
        watched = WatchedRows(
            schedule=plan.name,
            version=started.version,
            data=looks.data,
            settled_minutes=looks.settled_minutes,
            num_tries=looks.num_tries,
            endpoint=self._endpoint,
            insecure=self._platform.insecure,
        )
        return self.register(planned_looks(plan, watched, looks), version=started.workflow_version)

    @_from_the_cluster
    def activate(self, schedule: ScheduledRecipe) -> ScheduledRecipe:
        """Starts runs of a schedule; former versions of it start none from then on."""
        for other in self._active():
            if other.name == schedule.name and other.on_arrival != schedule.on_arrival:
                self._set(other, LaunchPlanState.INACTIVE)
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
        active = {each.name: each for each in self._active()}
        names = _pages(
            lambda token: self._client.list_launch_plan_ids_paginated(
                self._project, self._domain, limit=_PAGE, token=token
            )
        )
        # Every workflow has a launch plan of its own name, without a schedule.
        own = {each.name for each in names if not each.name.startswith("workflows.")}
        own = {each.removesuffix(ARRIVALS) for each in own}
        candidates = sorted(own - active.keys())
        paused = {name: found for name in candidates if (found := self._latest(name))}
        return [found for _, found in sorted({**active, **paused}.items())]

    def _active(self) -> list[ScheduledRecipe]:
        plans = _pages(
            lambda token: self._client.list_active_launch_plans_paginated(
                self._project, self._domain, limit=_PAGE, token=token
            )
        )
        return [self._scheduled(plan) for plan in plans if _cron(plan)]

    def _latest(self, name: str) -> ScheduledRecipe | None:
        found = [self._latest_plan(called) for called in (name, name + ARRIVALS)]
        return next((self._scheduled(plan) for plan in found if plan and _cron(plan)), None)

    def _latest_plan(self, name: str) -> Any:
        plans, _ = self._client.list_launch_plans_paginated(
            self._named(name), limit=1, sort_by=_LATEST
        )
        return plans[0] if plans else None

    def _scheduled(self, plan: Any) -> ScheduledRecipe:
        runs = plan.spec.annotations.values.get(RUNS)
        name = plan.id.name.removesuffix(ARRIVALS) if runs else plan.id.name
        # Those of a schedule are of its runs, not of its looks.
        labelled = (self._latest_plan(name) if runs else None) or plan
        return ScheduledRecipe(
            name=name,
            version=plan.id.version,
            workflow=runs or plan.spec.workflow_id.name,
            workflow_version=plan.spec.workflow_id.version,
            cron=_cron(plan),
            active=plan.closure.state == LaunchPlanState.ACTIVE,
            labels={
                key: value
                for key, value in sorted(labelled.spec.labels.values.items())
                if key not in OWN_LABELS
            },
            on_arrival=runs is not None,
        )

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
        config = plan.saved_inputs["config"]
        limit = config.budget.max_gpu_hours if isinstance(config, Recipe) else None
        # No stage reads the section, so its limit comes to the containers as their variable.
        return spec if limit is None else _SpecWithLimit(spec, limit)

    def _set(self, schedule: ScheduledRecipe, state: int) -> None:
        identifier = self._identifier(schedule.launch_plan, schedule.version)
        self._client.update_launch_plan(identifier, state)

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
