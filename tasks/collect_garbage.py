"""`nemo-rl gc` on the volume of a cluster, where nobody has a shell."""

import logging
from dataclasses import replace
from datetime import timedelta

from flytekit import task

from nemo_rl_core.errors import ConfigError
from nemo_rl_core.maintenance.collect import make_plan, remove
from nemo_rl_core.maintenance.retention import RetentionPolicy
from nemo_rl_core.store.store import Store
from tasks.platform import literal_types, local, pods
from tasks.platform.resources import PLAIN, TRAIN

literal_types.register()
local.use_store()

logger = logging.getLogger(__name__)

_DAY = timedelta(days=1)
# A volume of terabytes on NFS takes long to walk through. A lost attempt costs nothing: what
# it has renamed is deleted by the next one.
_KIND = replace(PLAIN, timeout=timedelta(hours=4))


@task(**_KIND.options, pod_template=pods.pod_with_store())
def collect_garbage(keep_days: float) -> str:
    """Removes from the volume what no stage will use again, beside stages that run.

    That is work of stages that have failed for good or were aborted, inputs of killed attempts, and
    artifacts that were not removed after their upload. What a process has locked stays at any age.

    Args:
        keep_days: Everything younger stays, counted from its last change. It must be longer than an
            attempt of a stage may take, so that nothing in use goes even where the volume shares
            no locks between machines.

    Returns:
        What was removed, and how much is left.

    Raises:
        ConfigError: If the days are too few, or if this is no cluster.
    """
    attempt = TRAIN.timeout / _DAY
    if keep_days <= attempt:
        raise ConfigError(
            "keep_days is shorter than a stage may run",
            expected=f"more than the {attempt:g} days of an attempt of a training stage",
            got=f"{keep_days:g}",
            fix="take 7, the default",
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
