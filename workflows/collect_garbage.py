"""Frees the volume of a cluster; the launch plan `nightly_collection` runs it every night."""

from flytekit import workflow

from tasks.collect_garbage import collect_garbage as collect


@workflow
def collect_garbage(keep_days: float = 7.0) -> str:
    """Removes work that no stage will resume, and files of killed stages.

    Args:
        keep_days: Minimum age of removed files.
    """
    return collect(keep_days=keep_days)
