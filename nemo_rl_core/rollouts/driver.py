"""Plays the episodes of a step together, each at its own pace.

An episode is a coroutine of the event loop. Blocking calls of the engine and of an environment in
this process run in the thread of the caller, one at a time, with all requests, or conversations,
that are ready.
"""

import asyncio
from collections.abc import Callable, Sequence

from nemo_rl_core.distributed.event_loop import CallQueue, Gathered, event_loop
from nemo_rl_core.environments.interfaces import shorten, user_location
from nemo_rl_core.errors import NemoRLError, WorkerError
from nemo_rl_core.rollouts.engine import (
    Complete,
    CompletionRequest,
    CompletionResult,
    Episode,
)
from nemo_rl_core.rollouts.episode import PlayedEpisode
from nemo_rl_core.types import Prompt

CompleteAll = Callable[[list[CompletionRequest]], list[CompletionResult]]
"""Completes a batch of requests, and returns when all are complete."""


async def play(prompt: Prompt, episode: Episode, complete: Complete) -> Sequence[PlayedEpisode]:
    """Returns the samples of an episode; an exception becomes its error.

    Raises:
        WorkerError: If the actors of the environment fail again and again.
    """
    try:
        return await episode.play(complete)
    except WorkerError:
        raise
    # SystemExit too, and a CancelledError that only the code of the episode has raised.
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        name = f"{type(error).__name__}: {shorten(str(error))}{user_location(error)}"
        text = error.in_one_line if isinstance(error, NemoRLError) else name
        return [PlayedEpisode.failed(prompt, text)]


def play_all(
    episodes: Sequence[tuple[Prompt, Episode]], complete: CompleteAll, calls: CallQueue
) -> list[Sequence[PlayedEpisode]]:
    """Plays episodes with an engine that completes one batch at a time, and waits for all.

    Args:
        complete: Called in this thread with the requests that are ready.
        calls: Further blocking calls of the episodes, which also run in this thread.

    Raises:
        Exception: If the engine raises it.
    """
    running = asyncio.run_coroutine_threadsafe(_played(episodes, complete, calls), event_loop())
    running.add_done_callback(lambda _: calls.stop())
    try:
        calls.serve()
    finally:
        running.cancel()  # after an interrupt
    return running.result()


async def _played(
    episodes: Sequence[tuple[Prompt, Episode]], complete: CompleteAll, calls: CallQueue
) -> list[Sequence[PlayedEpisode]]:
    stopped = asyncio.get_running_loop().create_future()

    def complete_or_stop(requests: list[CompletionRequest]) -> list[CompletionResult]:
        try:
            return complete(requests)
        except Exception as error:
            # Ends the run, also if the code of an episode catches the error.
            stopped.get_loop().call_soon_threadsafe(stopped.set_exception, error)
            raise

    engine = Gathered(complete_or_stop, calls)
    tasks = [asyncio.create_task(play(*each, engine.ask)) for each in episodes]
    playing = asyncio.gather(*tasks)
    playing.add_done_callback(lambda done: done.cancelled() or done.exception())  # not logged
    try:
        await asyncio.wait([playing, stopped], return_when=asyncio.FIRST_COMPLETED)
        return stopped.result() if stopped.done() else playing.result()
    finally:
        for task in tasks:
            task.cancel()
