"""Checks of flyteadmin 1.16 on a launch plan before it is registered.

Based on `flyteadmin/pkg/manager/impl/validation` (launch_plan_validator.go, validation.go,
notifications_validator.go): identifiers, labels, inputs against the workflow's interface, the
schedule and e-mail.
"""

import re
from collections.abc import Iterator
from typing import Any

from flyteidl.core import execution_pb2, identifier_pb2

_Phase = execution_pb2.WorkflowExecution
_TERMINAL = {_Phase.SUCCEEDED, _Phase.FAILED, _Phase.TIMED_OUT, _Phase.ABORTED}
_LABEL_VALUE = re.compile(r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?")
_LABEL_KEY = re.compile(
    r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?"
)
_CRON_FIELD = re.compile(r"[0-9A-Za-z*/,?-]+")
_CRON_NAMES = {"@yearly", "@annually", "@monthly", "@weekly", "@daily", "@midnight", "@hourly"}
_RANGES = ((0, 59), (0, 23), (1, 31), (1, 12), (0, 6))
_WORDS = {
    3: ["JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC"],
    4: ["SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT"],
}


def refusals(request: Any, interface: Any, *, projects: set[tuple[str, str]]) -> Iterator[str]:
    """Yields the reasons to refuse a launch plan.

    Args:
        request: Request to create the launch plan.
        interface: Interface of its workflow; None if the workflow does not exist.
        projects: Projects of the cluster with their domains.
    """
    for name, identifier, kind in (
        ("launch plan", request.id, identifier_pb2.LAUNCH_PLAN),
        ("workflow", request.spec.workflow_id, identifier_pb2.WORKFLOW),
    ):
        yield from identifier_refusals(name, identifier, kind, projects)
    if interface is None:
        yield f"missing entity of type WORKFLOW with {request.spec.workflow_id.name}"
        return
    yield from _labels(request.spec.labels.values)
    yield from _inputs(request.spec, interface)
    yield from _schedule(request.spec, interface)
    for each in request.spec.entity_metadata.notifications:
        yield from _notification(each)


def identifier_refusals(
    name: str, identifier: Any, kind: int, projects: set[tuple[str, str]]
) -> Iterator[str]:
    """Yields the reasons to refuse an identifier."""
    if identifier.resource_type != kind:
        yield f"unexpected resource type {identifier.resource_type} for the {name}"
    missing = [
        field
        for field in ("project", "domain", "name", "version")
        if not getattr(identifier, field)
    ]
    yield from (f"missing {field} of the {name}" for field in missing)
    if not missing and (identifier.project, identifier.domain) not in projects:
        yield f"failed to validate that project {identifier.project} and domain are registered"
    yield from (
        f"{field} of the {name} cannot exceed 255 characters"
        for field in ("name", "version")
        if len(getattr(identifier, field)) > 255
    )


def _labels(labels: Any) -> Iterator[str]:
    if len(labels) > 16:
        yield "labels map cannot exceed 16 entries"
    for key, value in labels.items():
        if not _LABEL_KEY.fullmatch(key):
            yield f"invalid label key [{key}]"
        if not _LABEL_VALUE.fullmatch(value) or len(value) > 63:
            yield f"invalid label value [{value}]"


def _inputs(spec: Any, interface: Any) -> Iterator[str]:
    variables = interface.inputs.variables
    for name in spec.fixed_inputs.literals:
        if name not in variables:
            yield f"unexpected fixed_input {name}"
        if name in spec.default_inputs.parameters:
            yield f"{name} is a fixed input and a default one"
    for name, parameter in spec.default_inputs.parameters.items():
        if name not in variables:
            yield f"unexpected default_input {name}"
        elif _kind(parameter.var.type) != _kind(variables[name].type):
            yield f"invalid default_input wf {name}: its type is not the workflow's"


def _kind(literal_type: Any) -> tuple[str, Any]:
    """Returns what flyteadmin compares of two types: structs are cast whatever their metadata."""
    kind = literal_type.WhichOneof("type")
    return kind, literal_type.simple if kind == "simple" else None


def _schedule(spec: Any, interface: Any) -> Iterator[str]:
    schedule = spec.entity_metadata.schedule
    kind = schedule.WhichOneof("ScheduleExpression")
    if kind is None:
        return
    kickoff = schedule.kickoff_time_input_arg
    bound = {*spec.fixed_inputs.literals}
    bound |= {
        name for name, each in spec.default_inputs.parameters.items() if each.HasField("default")
    }
    for name in sorted({*interface.inputs.variables} - bound - {kickoff}):
        yield f"Cannot create a launch plan with a schedule if there is an unbound input [{name}]"
    if kickoff and kickoff not in interface.inputs.variables:
        yield f"a KickoffTimeInputArg that does not point to a free input [{kickoff}]"
    if kind == "cron_expression":
        yield "cron_expression is deprecated: the native scheduler takes cron_schedule"
    if kind == "cron_schedule":
        yield from _cron(schedule.cron_schedule.schedule)


def _cron(text: str) -> Iterator[str]:
    """Yields errors of robfig/cron's ParseStandard, which Flyte uses for schedules."""
    if text in _CRON_NAMES:
        return
    fields = text.split()
    if len(fields) != 5:
        yield f"expected exactly 5 fields, found {len(fields)}: [{text}]"
        return
    for index, field in enumerate(fields):
        low, high = _RANGES[index]
        for part in field.split(","):
            span, _, step = part.partition("/")
            values = [] if span in ("*", "?") else span.split("-")
            for value in values:
                number = _number(value, index)
                if number is None or not low <= number <= high:
                    yield f"failed to parse {field!r} of the schedule {text!r}"
            if not _CRON_FIELD.fullmatch(part) or (step and not step.isdigit()):
                yield f"failed to parse {field!r} of the schedule {text!r}"


def _number(value: str, index: int) -> int | None:
    words = _WORDS.get(index, [])
    if value.upper() in words:
        return words.index(value.upper()) + (index == 3)
    return int(value) if value.isdigit() else None


def _notification(each: Any) -> Iterator[str]:
    if not each.phases:
        yield "invalid phases: a notification needs one"
    if not {*each.phases} <= _TERMINAL:
        yield "invalid phase: a notification can only be sent for a terminal phase"
    kind = each.WhichOneof("type")
    if kind is None or not getattr(each, kind).recipients_email:
        yield "invalid recipients: missing a value"
