"""Settings of launch plans that start on a schedule: times, one run at a time, and mail."""

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from flytekit import CronSchedule, Email
from flytekit.models.common import Annotations, Labels, Notification
from flytekit.models.concurrency import ConcurrencyLimitBehavior, ConcurrencyPolicy
from flytekit.models.core.execution import WorkflowExecutionPhase as Phase

from nemo_rl_core.errors import ConfigError

BAD_ENDS = (Phase.FAILED, Phase.TIMED_OUT, Phase.ABORTED)

ALIASES = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
}
"""Names of Flyte's scheduler for complete cron expressions."""

OWN_LABELS = ("app.kubernetes.io/part-of", "purpose")

_MOST_LABELS = 16 - len(OWN_LABELS)
_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?")
_LABEL_PREFIX = re.compile(
    r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(\.[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)*"
)
_FIELD = re.compile(r"[0-9A-Za-z*/,-]+")


def on_schedule(cron: str, addresses: Sequence[str], *phases: int) -> dict[str, Any]:
    """Returns the options of a launch plan that starts by itself, one run at a time.

    Flyte sends mail to the addresses when an execution ends in one of the phases.
    """
    return {
        "schedule": CronSchedule(schedule=cron),
        "notifications": mail(addresses, *phases),
        "max_parallelism": 4,
        "concurrency": ConcurrencyPolicy(1, behavior=ConcurrencyLimitBehavior.SKIP),
    }


def mail(addresses: Sequence[str], *phases: int) -> list[Notification]:
    """Returns Flyte's notifications by mail; empty without an address."""
    return [Email(phases=list(phases), recipients_email=list(addresses))] if addresses else []


def described(purpose: str, text: str, labels: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Returns the options of a launch plan that are shown in lists of launch plans.

    Flyte passes labels on to executions, pods and RayJobs.
    """
    project_labels = dict(zip(OWN_LABELS, ("nemo-rl-flow", purpose), strict=True))
    return {
        "labels": Labels({**project_labels, **(labels or {})}),
        "annotations": Annotations({"nemo-rl-flow/about": text}),
    }


def labels_of(given: Sequence[str]) -> dict[str, str]:
    """Parses labels and checks them by the rules of Kubernetes.

    Example:
        >>> labels_of(["kueue.x-k8s.io/queue-name=training"])
        {'kueue.x-k8s.io/queue-name': 'training'}
    """
    labels: dict[str, str] = {}
    for text in given:
        key, is_pair, value = text.partition("=")
        problem = _label_problem(key, value) if is_pair else "no `=`"
        if problem is None and key in labels:
            problem = f"{key} twice"
        if problem is not None:
            raise _no_label(text, problem)
        labels[key] = value
    if len(labels) > _MOST_LABELS:
        raise _no_label(
            given[_MOST_LABELS], f"{len(labels)} labels, where Flyte takes {_MOST_LABELS}"
        )
    return labels


def _label_problem(key: str, value: str) -> str | None:
    prefix, has_prefix, name = key.rpartition("/")
    if key in OWN_LABELS:
        return f"{key}, which each schedule has already"
    if has_prefix and (len(prefix) > 253 or not _LABEL_PREFIX.fullmatch(prefix)):
        return f"the prefix {prefix!r}, which is not a domain of at most 253 small letters"
    if len(name) > 63 or not _LABEL.fullmatch(name):
        return f"the name {name!r}"
    if value and (len(value) > 63 or not _LABEL.fullmatch(value)):
        return f"the value {value!r}"
    return None


def _no_label(text: str, got: str) -> ConfigError:
    return ConfigError(
        f"{text!r} is not a label",
        expected="key=value, where the key may have a domain and a slash before it; key and value "
        "are at most 63 letters, digits, `-`, `_` and `.`, a letter or digit at either end",
        got=got,
        fix="write --label kueue.x-k8s.io/queue-name=training, once for each label",
    )


def next_times(cron: str, *, count: int = 3, now: datetime | None = None) -> list[datetime]:
    """Returns the next start times of a schedule, in UTC, as Flyte's scheduler computes them.

    Flyte's scheduler accepts less than flytekit's own check, which would register the rest:
    seconds, `L`, `#` and Sunday as 7 are refused here.

    Example:
        >>> next_times("0 2 * * 1", count=1, now=datetime(2026, 11, 23, 5, tzinfo=UTC))
        [datetime.datetime(2026, 11, 30, 2, 0, tzinfo=datetime.timezone.utc)]
    """
    from croniter import CroniterBadDateError, CroniterError, croniter

    fields = ALIASES.get(cron, cron).split()
    problem = _problem_for_flyte(fields)
    if problem is not None:
        raise _no_schedule(cron, problem)
    try:
        times = croniter(" ".join(fields), now or datetime.now(UTC), ret_type=datetime)
        return [times.get_next() for _ in range(count)]
    except CroniterBadDateError as error:
        raise _no_schedule(cron, "a day that never comes") from error
    except (CroniterError, ValueError) as error:
        raise _no_schedule(cron, str(error)) from error


def _problem_for_flyte(fields: list[str]) -> str | None:
    """Returns why Flyte's scheduler would refuse fields that croniter accepts."""
    if len(fields) != 5:
        return f"{len(fields)} fields"
    unreadable = [field for field in fields if not _FIELD.fullmatch(field)]
    if unreadable:
        return f"the field {unreadable[0]!r}"
    days = fields[4].partition("/")[0]
    if "7" in re.split(r"[,-]", days):
        return "7 as a day of the week, where Sunday is 0"
    if any(re.fullmatch(r"[Ll]\w*|\d+[Ll]", part) for part in fields[2].split(",")):
        return f"the day of the month {fields[2]!r}"
    if re.search(r"\d[Ll]|[Ll]\d", fields[4]):
        return f"the day of the week {fields[4]!r}"
    return None


def _no_schedule(cron: str, got: str) -> ConfigError:
    return ConfigError(
        f"{cron!r} is not a schedule",
        expected="minute, hour, day of the month, month and day of the week (0 to 6), in UTC, or "
        f"one of {', '.join(ALIASES)}",
        got=got,
        fix='write "0 2 * * *" for every night at 02:00, in quotes for the shell',
    )
