import json
import re
from typing import Any

import pytest

from nemo_rl_core.data.turns import as_turns, fault, is_trained, stored, turns_of

FLAGS = (
    *("train", "training", "trainable", "weight", "loss", "loss_mask", "step_loss_mask"),
    *("train_on_turn", "is_trainable"),
)
CALL = [{"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}]


def turns(text: str) -> list[dict[str, Any]]:
    """`s`ystem, `d`eveloper, `u`ser, `a`ssistant, `c`alling assistant, `t`ool, each with a text."""
    roles = {"s": "system", "u": "user", "a": "assistant", "c": "assistant", "t": "tool"}
    roles["d"] = "developer"
    return [
        {
            "role": roles[letter],
            "content": letter,
            **({"tool_calls": CALL} if letter == "c" else {}),
        }
        for letter in text
    ]


@pytest.mark.parametrize(
    "good", ["ua", "sua", "dua", "uaua", "uua", "uaa", "ucta", "uata", "sucttaua", "uctcta"]
)
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
        ("sdua", "has role 'developer' after 'system'"),
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
        "has the role 'bot', not one of system, developer, user, assistant, tool"
    )
    # A tool result, and a turn with a tool call, may have no text.
    assert fault([*turns("uc"), {"role": "tool", "content": ""}, *turns("a")]) is None
    silent = {"role": "assistant", "tool_calls": CALL}
    assert fault(turns_of([*turns("u"), silent, *turns("ta")])) is None


def test_json_and_lists_are_the_same_turns_and_nulls_are_left_out() -> None:
    value = [{"role": "user", "content": "é", "name": None, "tool_calls": []}]
    kept = [{"role": "user", "content": "é"}]
    assert turns_of(value) == turns_of(json.dumps(value)) == kept
    assert stored(value) == stored(json.dumps(value)) == '[{"role": "user", "content": "é"}]'
    assert as_turns("[1]", role="user") == [{"role": "user", "content": "[1]"}]
    assert as_turns(value, role="assistant") == kept


@pytest.mark.parametrize("value", ["text", "[", "[1, 2]", "[" * 100_000, [], [{}], None, 7])
def test_values_that_are_not_conversations_are_unchanged(value: Any) -> None:
    assert turns_of(value) is None
    assert stored(value) == value


PARTS = [{"type": "text", "text": "2+"}, {"type": "text", "text": "2", "image": None}]
FUNCTION = {"name": "add", "arguments": {"a": 2}}


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"role": "user", "content": PARTS}, {"role": "user", "content": "2+2"}),
        ({"role": "user", "content": []}, {"role": "user", "content": []}),
        (
            {"role": "user", "content": [{"type": "image"}]},
            {"role": "user", "content": [{"type": "image"}]},
        ),
        *(
            (
                {"role": "assistant", "content": None, **calls},
                {"role": "assistant", "content": "", "tool_calls": CALL},
            )
            for calls in (
                {"tool_calls": CALL},
                {"tool_calls": json.dumps(CALL)},
                {"tool_calls": [{"type": "function", "function": FUNCTION}], "function_call": {}},
                {"tool_calls": [FUNCTION]},
                {"tool_calls": [{"name": "add", "arguments": '{"a": 2}'}]},
                {"function_call": {"name": "add", "arguments": '{"a": 2}'}},
                {"function_call": FUNCTION, "tool_calls": []},
                {"tool_calls": [{"type": "function", "name": "add", "parameters": {"a": 2}}]},
                {"tool_calls": [{"type": "tool_use", "name": "add", "input": {"a": 2}}]},
                {"tool_calls": [{"name": "add", "args": {"a": 2}, "type": "tool_call"}]},
                {"tool_calls": [{"name": "add", "arguments": None, "args": {"a": 2}}]},
                {
                    "tool_calls": [
                        {"type": "function", "function": {"name": "add", "parameters": {"a": 2}}}
                    ]
                },
                {"function_call": {"name": "add", "parameters": '{"a": 2}'}},
            )
        ),
        (
            {"role": "function", "name": "add", "content": "4"},
            {"role": "tool", "name": "add", "content": "4"},
        ),
        ({"role": "environment", "content": "4"}, {"role": "tool", "content": "4"}),
        (
            {"role": "assistant", "content": None, "function_calls": "add(a=2)"},
            {"role": "assistant", "content": "", "function_calls": "add(a=2)"},
        ),
    ],
)
def test_turns_of_other_spellings_have_one_form(given: Any, kept: Any) -> None:
    assert turns_of([given]) == [kept]
    assert turns_of(stored([given])) == [kept]  # what is stored is read again


@pytest.mark.parametrize("content", ["", " \n", None])
def test_an_empty_system_turn_is_dropped(content: Any) -> None:
    first = {"role": "system", "content": content}
    assert turns_of([first, *turns("ua")]) == turns("ua")


@pytest.mark.parametrize(
    ("flags", "is_kept"),
    [
        *(({name: value}, bool(value)) for value in (0, 1, 0.0, True, False) for name in FLAGS),
        ({"masked": True}, False),
        ({"masked": 0}, True),
        ({"ignore": True}, False),
        ({"weight": None, "train": None}, True),
        ({"weight": 0, "train": False, "masked": True}, False),
    ],
)
def test_flags_say_whether_a_turn_is_trained_on(flags: dict[str, Any], is_kept: bool) -> None:
    merged = turns_of([*turns("u"), {**turns("a")[0], **flags}])
    assert merged is not None
    assert fault(merged) is None
    assert is_trained(merged[1]) is is_kept
    assert not is_trained(merged[0])


@pytest.mark.parametrize(
    ("role", "others", "fragment"),
    [
        ("assistant", {"weight": 0.5}, "weight 0.5"),
        ("assistant", {"loss": "last"}, "loss 'last'"),
        ("assistant", {"mask": 1}, "mask 1, which is ambiguous between trainers"),
        ("assistant", {"weight": 1, "train": False}, "weight 1, train False|train False, weight 1"),
        ("assistant", {"train_detail": [{"begin_offset": 0, "train": False}]}, "has train_detail"),
        ("user", {"weight": 1}, "marks a user turn"),
        ("assistant", {"tool_calls": [{"function": {}}]}, "without function.name"),
        ("assistant", {"tool_calls": "add"}, "not a list"),
        (
            "assistant",
            {"tool_calls": [{"function": {"name": "f", "arguments": "a=2"}}]},
            "arguments are not a JSON object",
        ),
        (
            "assistant",
            {"tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]},
            "arguments are not a JSON object",
        ),
    ],
)
def test_flags_and_calls_that_cannot_be_read_are_refused(
    role: str, others: dict[str, Any], fragment: str
) -> None:
    by_role = {"user": turns("u"), "assistant": turns("a")}
    by_role[role][0].update(others)
    assert re.search(fragment, fault(turns_of([*by_role["user"], *by_role["assistant"]])) or "")
