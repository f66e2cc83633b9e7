"""`nemo-rl gc` for the volume of a cluster, on which nobody has a shell."""

import logging
from dataclasses import replace
from datetime import timedelta

from flytekit import task

from nemo_rl_core.errors import ConfigError
from nemo_rl_core.maintenance.collect import make_plan, remove
from nemo_rl_core.maintenance.retention import RetentionPolicy
from nemo_rl_core.store.store import Store
from tasks.flyte import local
from tasks.pods import pods
from tasks.pods.resources import PLAIN, TRAIN
from tasks.stage import literal_types

literal_types.register()
local.use_store()

logger = logging.getLogger(__name__)

_DAY = timedelta(days=1)
# Walking through a volume of terabytes on NFS takes long. A lost attempt costs nothing: the next
# one deletes what it has renamed.
_KIND = replace(PLAIN, timeout=timedelta(hours=4))


@task(**_KIND.options, pod_template=pods.pod_with_store())
def collect_garbage(keep_days: float) -> str:
    """Removes files from the volume that no stage will use again, while stages run.

    These are work folders of stages that have failed for good or were aborted, inputs of killed
    attempts, and artifacts that were not removed after their upload. Locked files are kept at any
    age.

    Args:
        keep_days: Minimum age in days, counted from the last change. It must be longer than an
            attempt of a stage may take, so that nothing in use is removed even if the volume
            does not share locks between machines.
    """
    attempt = TRAIN.timeout / _DAY
    if keep_days <= attempt:
        raise ConfigError(
            "keep_days is shorter than a stage may run",
            expected=f"more than the {attempt:g} days of an attempt of a training stage",
            got=f"{keep_days:g}",
            fix="use 7, the default",
        )
    if not local.on_cluster():
        raise ConfigError(
            "this workflow is for the volume of a cluster",
            expected="a container of Flyte",
            got="a local run",
            fix="run `nemo-rl gc`, which shows what it removes and asks",
        )
    store, seconds = Store.default(), keep_days * _DAY.total_seconds()
    policy = RetentionPolicy(older_than_seconds=seconds, work_older_than_seconds=seconds)
    done = remove(
        store,
        policy,
        make_plan(store, policy),
        on_removed=lambda name: logger.info("gone: %s", name),
    )
    plan = done.plan
    removed = len(plan.work) + len(plan.artifacts) + len(plan.leftovers)
    left = plan.num_bytes - plan.freed_bytes
    return (
        f"removed {removed} folders and files, {plan.freed_bytes / 2**30:.1f} GiB; "
        f"{left / 2**30:.1f} GiB are left"
    )
