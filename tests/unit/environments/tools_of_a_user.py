"""Tools as a user writes them, some of them wrong."""

import asyncio
import time
from typing import Any

closed: list[int] = []


def echo(text: str, times: int = 1) -> str:
    """Repeats a text.

    Args:
        text: The text.
        times: How often.
    """
    return text * times


def sleep(seconds: float) -> float:
    """Waits.

    Args:
        seconds: How long.
    """
    time.sleep(seconds)
    return seconds


async def fetch(seconds: float) -> dict[str, float]:
    """Waits without a thread.

    Args:
        seconds: How long.
    """
    await asyncio.sleep(seconds)
    return {"waited": seconds}


def fail(kind: str) -> str:
    """Fails.

    Args:
        kind: How.
    """
    raise {"key": KeyError("x"), "value": ValueError("no"), "exit": SystemExit(3)}[kind]


class Account:
    """An account of an episode."""

    def __init__(self, balance: int = 0) -> None:
        self.balance = balance

    def reset(self, row: dict[str, Any]) -> None:
        self.balance += int(row.get("bonus", 0))

    def pay(self, amount: int) -> int:
        """Pays some amount.

        Args:
            amount: How much.

        Returns:
            The balance.
        """
        before = self.balance
        time.sleep(0.02 if amount == 1 else 0.0)
        self.balance = before - amount
        return self.balance

    def close(self) -> None:
        closed.append(self.balance)


class Session:
    """Takes long to open, to answer or to close."""

    def __init__(self, opening: float = 0.0, closing: float = 0.0) -> None:
        self.closing = closing
        time.sleep(opening)

    async def hold(self) -> None:
        """Waits."""
        await asyncio.sleep(99)

    async def close(self) -> None:
        closed.append(-1)
        await asyncio.sleep(self.closing)


class Greeting:
    """Speaks before the policy."""

    def reset(self, **row: Any) -> str:
        return "welcome"

    def greet(self) -> str:
        """Greets."""
        return "hi"


class Empty:
    """No tools."""


def without_hint(query) -> str:  # type: ignore[no-untyped-def]
    """Searches.

    Args:
        query: Words.
    """
    return str(query)


def without_description(query: str) -> str:
    """Searches."""
    return query


def without_docstring(query: str) -> str:
    return query


def few_calls(completion: str, answer: str, messages: list[dict[str, Any]]) -> float:
    return (completion == answer) / len(messages)


class Names:
    """Names without an object."""

    @staticmethod
    def of_nobody() -> str:
        """Returns nobody's name."""
        return "nobody"

    @classmethod
    def of_the_class(cls) -> str:
        """Returns the name of the class."""
        return cls.__name__
