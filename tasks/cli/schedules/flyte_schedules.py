"""Schedules as launch plans of a Flyte cluster."""

import itertools
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

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
from flytekit.models.core.execution import WorkflowExecutionPhase as Phase
from flytekit.models.core.identifier import Identifier, ResourceType
from flytekit.models.launch_plan import LaunchPlanSpec, LaunchPlanState
from flytekit.tools.translator import get_serializable_launch_plan

from nemo_rl_core.config.data import DataConfig, FileData, MixtureData
from nemo_rl_core.config.model import PretrainedModel
from nemo_rl_core.errors import ConfigError, ResourceError
from nemo_rl_core.telemetry.budget import LIMIT
from nemo_rl_core.telemetry.notices import mail_addresses
from tasks.cli.pipelines import Pipelines
from tasks.cli.recipe.recipe_pipeline import pipeline_of
from tasks.cli.recipe.run_settings import chosen_pipeline
from tasks.flyte.flyte_answers import explained_answers
from tasks.flyte.schedules import BAD_ENDS, OWN_LABELS, described, on_schedule
from tasks.pods.registry import refuse_images_without_registry
from tasks.recipes.common import Recipe

_LATEST = Sort("created_at", Sort.Direction.DESCENDING)
_PAGE = 100


@dataclass(frozen=True)
class ScheduledRecipe:
    """A schedule on the cluster.

    Attributes:
        version: Version of the launch plan, which differs from that of the workflow's code.
        cron: When runs start, in UTC.
        labels: Labels of its runs, without those that every schedule has.
    """

    name: str
    version: str
    workflow: str
    workflow_version: str
    cron: str
    active: bool
    labels: dict[str, str] = field(default_factory=dict)


class _SpecWithLimit:
    """A launch plan's spec that sets a variable for its runs: flytekit's spec lacks that field."""

    def __init__(self, spec: LaunchPlanSpec, max_gpu_hours: float) -> None:
        self._spec, self._max_gpu_hours = spec, max_gpu_hours

    def to_flyte_idl(self) -> Any:
        message = self._spec.to_flyte_idl()
        message.envs.values.add(key=LIMIT, value=f"{self._max_gpu_hours:g}")
        return message


class Schedules:
    """The schedules of a project and domain.

    Attributes:
        where: Project, domain and address, for messages.
    """

    def __init__(
        self, client: SynchronousFlyteClient, *, project: str, domain: str, platform: PlatformConfig
    ) -> None:
        self._client, self._project, self._domain = client, project, domain
        self._platform, self._endpoint = platform, platform.endpoint
        self.where = f"{project}/{domain} of {platform.endpoint}"

    @classmethod
    def of(cls, config: Path | None, *, project: str, domain: str) -> Self:
        """Connects to the cluster in a configuration of Flyte's client."""
        platform = Config.auto(str(config) if config else None).platform
        client = SynchronousFlyteClient(platform)
        return cls(client, project=project, domain=domain, platform=platform)

    def register(self, plan: LaunchPlan, *, version: str | None) -> ScheduledRecipe:
        """Registers a launch plan for a registered workflow.

        The same schedule of the same code has the same version, so registering it again changes
        nothing. If another one was registered in between, it gets a new version and is the latest.
        """
        with self._explained():
            workflow = plan.workflow.name
            workflow_version = version or self._latest_workflow(workflow)
            self._refuse_lost_images(workflow, workflow_version)
            spec = self._spec(plan, workflow_version)
            serialized = spec.to_flyte_idl().SerializeToString(deterministic=True)
            digest = sha256(serialized).hexdigest()[:12]
            try:
                identifier = self._created(plan.name, f"{workflow_version}-{digest}", spec)
            except (FlyteInvalidInputException, FlyteEntityNotExistException) as error:
                raise ResourceError(
                    f"the cluster does not accept the schedule {plan.name}",
                    expected=f"{workflow} of version {workflow_version} in {self.where}, as in "
                    "this checkout",
                    got=" ".join(str(error).split())[:300],
                    fix="register this checkout first (make register CONFIG=flyte.yaml), or name "
                    "another --version",
                ) from error
            return self._scheduled(self._client.get_launch_plan(identifier))

    def _created(self, name: str, version: str, spec: Any) -> Any:
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

    def activate(self, schedule: ScheduledRecipe) -> ScheduledRecipe:
        """Starts runs of a schedule; earlier versions of it start no more runs."""
        with self._explained():
            self._set(schedule, LaunchPlanState.ACTIVE)
            return replace(schedule, active=True)

    def pause(self, name: str) -> ScheduledRecipe:
        """Stops a schedule from starting further runs."""
        with self._explained():
            active = {each.name: each for each in self.schedules() if each.active}
            if name not in active:
                raise self._unknown("active schedule", name, active)
            self._set(active[name], LaunchPlanState.INACTIVE)
            return replace(active[name], active=False)

    def latest(self, name: str) -> ScheduledRecipe:
        """Returns the version of a schedule that was registered last."""
        with self._explained():
            schedule = self._latest(name)
            if schedule is None:
                raise self._unknown("schedule", name, {each.name for each in self.schedules()})
            return schedule

    def schedules(self) -> list[ScheduledRecipe]:
        """Returns the active version of each schedule, or its latest if none is active."""
        with self._explained():
            active = {each.name: each for each in self._active()}
            names = _pages(
                lambda token: self._client.list_launch_plan_ids_paginated(
                    self._project, self._domain, limit=_PAGE, token=token
                )
            )
            # Every workflow has a launch plan with its own name, without a schedule.
            schedule_names = {each.name for each in names if not each.name.startswith("workflows.")}
            candidates = sorted(schedule_names - active.keys())
            paused = {name: latest for name in candidates if (latest := self._latest(name))}
            return [schedule for _, schedule in sorted({**active, **paused}.items())]

    def _explained(self) -> AbstractContextManager[None]:
        return explained_answers(
            "the schedules cannot be read or changed",
            self._endpoint,
            project=self._project,
            domain=self._domain,
            what="launch plans",
        )

    def _active(self) -> list[ScheduledRecipe]:
        plans = _pages(
            lambda token: self._client.list_active_launch_plans_paginated(
                self._project, self._domain, limit=_PAGE, token=token
            )
        )
        return [self._scheduled(plan) for plan in plans if _cron(plan)]

    def _latest(self, name: str) -> ScheduledRecipe | None:
        plan = self._latest_plan(name)
        return self._scheduled(plan) if plan and _cron(plan) else None

    def _latest_plan(self, name: str) -> Any:
        plans, _ = self._client.list_launch_plans_paginated(
            self._named(name), limit=1, sort_by=_LATEST
        )
        return plans[0] if plans else None

    def _scheduled(self, plan: Any) -> ScheduledRecipe:
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

    def _latest_workflow(self, name: str) -> str:
        versions, _ = self._client.list_workflows_paginated(
            self._named(name), limit=1, sort_by=_LATEST
        )
        if not versions:
            raise ResourceError(
                f"the workflow {name} is not registered in {self.where}",
                expected="a version of it on the cluster, with the code that a schedule runs",
                got="none",
                fix="register it in the same project and domain: make register CONFIG=flyte.yaml",
            )
        return str(versions[0].id.version)

    def _refuse_lost_images(self, name: str, version: str) -> None:
        identifier = Identifier(ResourceType.WORKFLOW, self._project, self._domain, name, version)
        try:
            workflow = self._client.get_workflow(identifier)
        except FlyteEntityNotExistException:
            return  # the registration of the launch plan reports it
        tasks = [each.template for each in workflow.closure.compiled_workflow.tasks]
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
        registered = get_serializable_launch_plan(
            OrderedDict(), settings, plan, recurse_downstream=False
        )
        spec: LaunchPlanSpec = registered.spec
        config = plan.saved_inputs["config"]
        limit = config.budget.max_gpu_hours if isinstance(config, Recipe) else None
        # No stage reads the section, so its limit comes to the containers as their variable.
        return spec if limit is None else _SpecWithLimit(spec, limit)

    def _set(self, schedule: ScheduledRecipe, state: int) -> None:
        identifier = self._identifier(schedule.name, schedule.version)
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
        items, token = page(token)
        yield from items
        if not token:
            return


def _cron(plan: Any) -> str:
    schedule = plan.spec.entity_metadata.schedule
    expression = schedule.cron_schedule if schedule is not None else None
    return str(expression.schedule) if expression is not None else ""


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
