import json
from typing import Any

import pytest

from nemo_rl_core.data.turns import as_turns, fault, stored, turns_of

CALL = [{"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}]


def turns(text: str) -> list[dict[str, Any]]:
    """`s`ystem, `u`ser, `a`ssistant, `c`alling assistant, `t`ool, each with a word of text."""
    roles = {"s": "system", "u": "user", "a": "assistant", "c": "assistant", "t": "tool"}
    return [
        {
            "role": roles[letter],
            "content": letter,
            **({"tool_calls": CALL} if letter == "c" else {}),
        }
        for letter in text
    ]


@pytest.mark.parametrize("good", ["ua", "sua", "uaua", "ucta", "sucttaua", "uctcta"])
def test_conversations_that_are_in_order(good: str) -> None:
    assert fault(turns(good)) is None


@pytest.mark.parametrize(
    ("bad", "fragment"),
    [
        ("", "is not a list of messages"),
        ("u", "does not end with an assistant turn"),
        ("uau", "does not end with an assistant turn"),
        ("uc", None),
        ("a", "begins with role 'assistant'"),
        ("usa", "has role 'system' after 'user'"),
        ("ssua", "has role 'system' after 'system'"),
        ("uua", "has role 'user' after 'user'"),
        ("uaa", "has role 'assistant' after 'assistant'"),
        ("uata", "has role 'tool' after 'assistant'"),
        ("uta", "has role 'tool' after 'user'"),
        ("uca", "has role 'assistant' after 'calling assistant'"),
    ],
)
def test_turns_out_of_order_are_refused(bad: str, fragment: str | None) -> None:
    assert fault(turns(bad)) == fragment


def test_empty_turns_and_unknown_roles_are_refused() -> None:
    assert fault([{"role": "user", "content": " "}, *turns("a")]) == "has an empty turn"
    assert fault([{"role": "user", "content": [1]}, *turns("a")]) == (
        "has a turn whose content is not text"
    )
    assert fault([{"role": "bot", "content": "x"}]) == (
        "has the role 'bot', not one of system, user, assistant, tool"
    )
    # A turn with a tool call may have no text.
    silent = {"role": "assistant", "tool_calls": CALL}
    assert fault(turns_of([*turns("u"), silent, *turns("ta")])) is None


def test_json_and_lists_are_the_same_turns_and_nulls_are_left_out() -> None:
    given = [{"role": "user", "content": "é", "name": None, "tool_calls": []}]
    kept = [{"role": "user", "content": "é"}]
    assert turns_of(given) == turns_of(json.dumps(given)) == kept
    assert stored(given) == stored(json.dumps(given)) == '[{"role": "user", "content": "é"}]'
    assert as_turns("[1]", role="user") == [{"role": "user", "content": "[1]"}]
    assert as_turns(given, role="assistant") == kept


@pytest.mark.parametrize("value", ["text", "[", "[1, 2]", "[" * 100_000, [], [{}], None, 7])
def test_what_is_no_conversation_is_left_as_it_is(value: Any) -> None:
    assert turns_of(value) is None
    assert stored(value) == value
