"""Blocking calls of coroutines: which questions are asked together, and in which thread."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from nemo_rl_core.distributed.event_loop import CallQueue, Gathered, event_loop, run_on_loop


@pytest.fixture
def served() -> Callable[[Coroutine[Any, Any, Any], CallQueue], Any]:
    """Function that runs a coroutine while this thread serves its calls."""

    def run(coroutine: Coroutine[Any, Any, Any], calls: CallQueue) -> Any:
        running = asyncio.run_coroutine_threadsafe(coroutine, event_loop())
        running.add_done_callback(lambda _: calls.stop())
        calls.serve()
        return running.result()

    return run


def test_questions_that_are_ready_are_asked_together_in_the_serving_thread(served: Any) -> None:
    asked: list[tuple[list[int], threading.Thread]] = []

    def doubled(questions: list[int]) -> list[int]:
        asked.append((questions, threading.current_thread()))
        return [2 * each for each in questions]

    async def chain(gathered: Gathered[int, int], start: int) -> int:
        first = await gathered.ask(start)
        return await gathered.ask(first)

    async def all_chains() -> list[int]:
        gathered = Gathered(doubled, calls)
        return await asyncio.gather(*(chain(gathered, start) for start in (1, 5, 3)))

    calls = CallQueue()
    assert served(all_chains(), calls) == [4, 20, 12]
    assert [questions for questions, _ in asked] == [[1, 5, 3], [2, 10, 6]]
    assert {thread for _, thread in asked} == {threading.current_thread()}


def test_an_exception_is_raised_for_each_question_of_its_call(served: Any) -> None:
    def divided(questions: list[int]) -> list[float]:
        return [1 / each for each in questions]

    async def outcomes() -> list[Any]:
        gathered = Gathered(divided, calls)
        first = await asyncio.gather(gathered.ask(1), gathered.ask(0), return_exceptions=True)
        return [*first, await gathered.ask(4)]

    calls = CallQueue()
    one, other, later = served(outcomes(), calls)
    assert isinstance(one, ZeroDivisionError)
    assert other is one
    assert later == 0.25


def test_a_cancelled_question_is_not_asked(served: Any) -> None:
    asked: list[list[str]] = []

    async def two() -> str:
        gathered = Gathered(lambda questions: asked.append(questions) or questions, calls)
        tasks = [asyncio.create_task(gathered.ask(each)) for each in ("a", "b")]
        await asyncio.sleep(0)
        tasks[0].cancel()
        return await tasks[1]

    calls = CallQueue()
    assert served(two(), calls) == "b"
    assert asked == [["b"]]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_what_a_coroutine_raises_does_not_end_the_loop(error: type[BaseException]) -> None:
    async def fail() -> None:
        raise error

    with pytest.raises(error):
        run_on_loop(fail())
    assert run_on_loop(asyncio.sleep(0, "alive")) == "alive"


def test_an_interrupt_leaves_the_serving_thread() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    calls = CallQueue()
    waiting = asyncio.run_coroutine_threadsafe(calls.run(interrupted), event_loop())
    with pytest.raises(KeyboardInterrupt):
        calls.serve()
    waiting.cancel()
    assert run_on_loop(asyncio.sleep(0, "alive")) == "alive"
