"""The event loop of this process, and blocking calls of its coroutines."""

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache, partial
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

T = TypeVar("T")
Question = TypeVar("Question")
Answer = TypeVar("Answer")
_STARTING, _THREAD = threading.Lock(), "events"


def event_loop() -> asyncio.AbstractEventLoop:
    """Returns the event loop of this process, which runs in a daemon thread."""
    with _STARTING:
        return _started_loop()


@cache
def _started_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=_run, args=(loop,), name=_THREAD, daemon=True).start()
    return loop


def _run(loop: asyncio.AbstractEventLoop) -> None:
    while True:
        # A coroutine that raises these also stops the loop, which others still wait for.
        with suppress(KeyboardInterrupt, SystemExit):
            loop.run_forever()


os.register_at_fork(after_in_child=_started_loop.cache_clear)


def run_on_loop(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine on the event loop and waits for it, in any other thread."""
    assert threading.current_thread().name != _THREAD, "the event loop cannot wait for itself"
    running = asyncio.run_coroutine_threadsafe(coroutine, event_loop())
    try:
        return running.result()
    finally:
        running.cancel()  # if the wait was interrupted


class CallQueue:
    """Runs blocking calls of coroutines, one at a time, in the thread that serves them.

    Args:
        context: Context of each call, such as a lock.
    """

    def __init__(self, context: AbstractContextManager[Any] | None = None) -> None:
        self._context = context or nullcontext()
        self._calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()

    async def run(self, call: Callable[[], T]) -> T:
        """Returns the result of a call, or raises its exception."""
        result: Future[T] = Future()
        self._calls.put((call, result))
        return await asyncio.wrap_future(result)

    def serve(self) -> None:
        """Runs calls until `stop`; raises what does not end only a call, such as an interrupt."""
        while (item := self._calls.get()) is not None:
            call, result = item
            if not result.set_running_or_notify_cancel():
                continue
            try:
                with self._context:
                    returned = call()
            # Broad on purpose: the coroutine raises it.
            except Exception as error:  # noqa: BLE001 (raised by run)
                result.set_exception(error)
            else:
                result.set_result(returned)

    def stop(self) -> None:
        """Ends `serve` after the calls that are waiting."""
        self._calls.put(None)


class Gathered(Generic[Question, Answer]):
    """Answers all questions that coroutines ask at a time with one blocking call.

    A call begins when no coroutine can advance. Coroutines that wait for nothing else therefore
    ask the same questions together in each run.

    Args:
        answer: Function that returns one answer per question.
        calls: Queue that runs the function.
    """

    def __init__(
        self, answer: Callable[[list[Question]], Sequence[Answer]], calls: CallQueue
    ) -> None:
        self._answer, self._calls = answer, calls
        self._waiting: list[tuple[Question, asyncio.Future[Answer]]] = []
        self._task: asyncio.Task[None] | None = None

    async def ask(self, question: Question) -> Answer:
        """Returns the answer to a question, or raises the exception of the call."""
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append((question, answer))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._answer_all())
        return await answer

    async def _answer_all(self) -> None:
        while await asyncio.sleep(0, self._waiting):
            batch = [each for each in self._waiting if not each[1].done()]  # not cancelled
            self._waiting = []
            if not batch:
                continue
            questions = [question for question, _ in batch]
            try:
                answers = await self._calls.run(partial(self._answer, questions))
                for (_, answer), value in zip(batch, answers, strict=True):
                    with suppress(asyncio.InvalidStateError):  # cancelled during the call
                        answer.set_result(value)
            # Broad on purpose: the coroutines raise it.
            except Exception as error:  # noqa: BLE001 (raised by ask)
                for _, answer in batch:
                    if not answer.done():
                        answer.set_exception(error)
