"""Closes the connections to object stores that flytekit leaves open at the end of a container."""

import asyncio
import atexit
import contextlib
import sys

from flytekit.utils.asyn import run_sync

_SECONDS = 5.0


def close_sessions_at_exit() -> None:
    """Has the sessions of file systems for S3 closed when this process ends.

    s3fs closes those that it opens for itself. Those of flytekit live in a loop that ends before
    them, and aiohttp then logs each as an error, with a traceback, as if the stage had failed.
    """
    # What is registered last is called first, and flytekit's loop registers its own end.
    run_sync(asyncio.sleep, 0)
    atexit.register(run_sync, _close_sessions)


async def _close_sessions() -> None:
    s3fs = sys.modules.get("s3fs")
    if s3fs is None:
        return
    for system in list(s3fs.S3FileSystem._cache.values()):
        if system.asynchronous and system._s3 is not None:
            # Nothing depends on it: the stage has ended.
            with contextlib.suppress(Exception):
                await asyncio.wait_for(system._s3creator.__aexit__(None, None, None), _SECONDS)
