"""Frees the volume of a cluster; the launch plan `nightly_collection` starts it by the clock."""

from flytekit import workflow

from tasks.collect_garbage import collect_garbage as collect


@workflow
def collect_garbage(keep_days: float = 7.0) -> str:
    """Removes work that no stage goes on with, and what killed stages left.

    Args:
        keep_days: Everything younger stays.
    """
    return collect(keep_days=keep_days)
