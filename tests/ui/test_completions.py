"""Selection, grouping and display of completions, on files that the record's writers wrote."""

import json
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from starlette.testclient import TestClient

from nemo_rl_core.rollouts.records import save_rollouts
from nemo_rl_core.types import Completion, Prompt, Rollout
from nemo_rl_core.ui.completions import Filter, Source, changes, scan, select, sources
from nemo_rl_core.ui.reading import Answer, part_names, readings
from nemo_rl_core.ui.tokens import tokens
from nemo_rl_core.ui.turns import Piece, messages_of, turns
from tests.benchmarks.machine import loop_seconds
from tests.ui.conftest import RecordedStore

REWARDS = {"a": [0.0, 1.0, 1.0], "b": [None, -1.0, 0.5], "c": [0.25, 0.25, 0.25]}


def rollout(prompt: str, group: int, sample: int, reward: float | None, **fields) -> Rollout:
    completion = Completion((3, 4), (-0.05, -3.0), sample == 2, (True, False), (5, 6))
    return Rollout(
        Prompt(id=prompt, text=f"ask {prompt}", token_ids=(1,), answer="4", task=""),
        completion,
        fields.pop("text", f"{prompt}{int(bool(sample))}"),
        reward=reward,
        group=group,
        sample=sample,
        error="refused" if reward is None else None,
        **fields,
    )


@pytest.fixture
def source(tmp_path: Path) -> Source:
    rows = [
        rollout(prompt, group, sample, reward)
        for group, (prompt, rewards) in enumerate(REWARDS.items())
        for sample, reward in enumerate(rewards)
    ]
    path = tmp_path / "rollouts" / "step_000007.parquet"
    save_rollouts(rows, path, advantages=torch.arange(8.0))
    return Source("one", path, 7)


def rows_of(source: Source, **wanted) -> list[list[int]]:
    selection = select(source, Filter(**wanted))
    return [[row["index"] for row in card.rows] for card in selection.cards(0, 99)]


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ({}, [[0, 1, 2], [3, 4, 5], [6, 7, 8]]),
        ({"order": "best"}, [[1, 2, 0], [5, 4, 3], [6, 7, 8]]),
        ({"order": "worst"}, [[4, 5, 3], [0, 1, 2], [6, 7, 8]]),
        ({"low": 0.5}, [[1, 2], [5]]),
        ({"low": 0.0, "high": 0.25}, [[0], [6, 7, 8]]),
        ({"text": "A1"}, [[1, 2]]),
        ({"text": "ASK b"}, [[3, 4, 5]]),
        ({"text": "."}, []),
        ({"prompt": "c"}, [[6, 7, 8]]),
        ({"prompts": frozenset({"a", "c"}), "high": 0.0}, [[0]]),
        ({"group": 1}, [[3, 4, 5]]),
        ({"row": 4}, [[4]]),
        ({"only": "error"}, [[3]]),
        ({"only": "truncated"}, [[2], [5], [8]]),
        ({"only": "correct"}, [[1, 2], [5], [6, 7, 8]]),
        ({"only": "wrong"}, [[0], [4]]),
    ],
)
def test_rows_are_selected_by_prompt(source: Source, wanted: dict, expected: list) -> None:
    assert rows_of(source, **wanted) == expected


def test_a_card_has_the_rewards_of_all_samples_also_of_those_filtered_out(source: Source) -> None:
    (first, second) = select(source, Filter(low=0.5)).cards(0, 99)
    assert (first.rewards, second.rewards) == ([0.0, 1.0, 1.0], [None, -1.0, 0.5])


def test_rows_are_read_from_several_row_groups(source: Source) -> None:
    pq.write_table(pq.read_table(source.path), source.path, row_group_size=2)
    assert rows_of(source, order="best") == [[1, 2, 0], [5, 4, 3], [6, 7, 8]]
    (card,) = select(source, Filter(row=7)).cards(0, 1)
    assert (card.rows[0]["prompt_id"], card.rows[0]["sample"]) == ("c", 1)


def test_equal_answers_are_folded_and_bars_share_a_scale(source: Source) -> None:
    a, b, c = readings(select(source, Filter()).cards(0, 3))
    assert [answer.samples for answer in a.answers] == [[0], [1], [2]]  # the last is truncated
    assert [answer.samples for answer in c.answers] == [[0], [1], [2]]
    # Rewards from -1 to 1: zero is in the middle.
    bars = [(bar.left, bar.width) for bar in (a.strip[1], b.strip[1], b.strip[2], b.strip[0])]
    assert bars == [(50.0, 50.0), (0.0, 50.0), (50.0, 25.0), (0.0, 0.0)]
    assert (a.mean, b.mean) == (pytest.approx(2 / 3), -0.25)
    assert [one.is_equal for one in (a, b, c)] == [False, False, True]


def test_equal_completions_are_one_answer(tmp_path: Path) -> None:
    rows = [rollout("a", 0, sample, 1.0, text="four") for sample in (0, 1, 3)]
    save_rollouts(rows, tmp_path / "step.parquet")
    (one,) = readings(select(Source("x", tmp_path / "step.parquet"), Filter()).cards(0, 1))
    assert [answer.samples for answer in one.answers] == [[0, 1, 3]]


def read_rows(path: Path, rows: list[dict]) -> list[Answer]:
    """Writes rows of one prompt, and reads them as the page does."""
    filled = {"group": 0, "prompt": "2+2?", "prompt_id": "a", "sample": 0, "reward": 1.5}
    pq.write_table(pa.Table.from_pylist([filled | row for row in rows]), path)
    names = part_names({"environment": {"kind": "weighted_sum", "parts": PARTS}})
    (reading,) = readings(select(Source("x", path), Filter()).cards(0, 1), names=names)
    assert [[piece.text for piece in turn.pieces] for turn in reading.opening] == [["2+2?"]]
    return reading.answers


PARTS = [
    {"weight": 2, "environment": {"kind": "exact"}},
    {"weight": 1.0, "environment": {"kind": "function", "target": "m:tidy"}},
]


def test_turns_of_early_records_have_their_rewards_and_calls_of_tools_apart(tmp_path: Path) -> None:
    talk = [("user", "2+2?"), ("assistant", "so <tool>add 2 2</tool>"), ("tool", "4")]
    messages = [{"role": role, "content": text} for role, text in [*talk, ("assistant", "4")]]
    row = {"messages": messages, "turn_rewards": [0.5, 1.0], "components": [1.0, 0.5]}
    (answer,) = read_rows(tmp_path / "step.parquet", [row])

    assert [(turn.role, turn.pieces, turn.reward) for turn in answer.turns] == [
        ("assistant", [Piece("text", "so "), Piece("call", "<tool>add 2 2</tool>")], 0.5),
        ("tool", [Piece("text", "4")], None),
        ("assistant", [Piece("text", "4")], 1.0),
    ]
    assert answer.parts == [("exact (weight 2)", 1.0), ("tidy (weight 1)", 0.5)]
    assert [(bar.left, bar.width) for bar in answer.turn_rewards] == [(0.0, 50.0), (0.0, 100.0)]


ASKED = {"role": "user", "content": "2+2?"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "why": "so\nit is"}}}


def test_turns_have_reasoning_calls_and_results_apart(tmp_path: Path) -> None:
    text_call = {"function": {"name": "add", "arguments": '{"a": [2]}'}}
    broken = {"function": {"name": "add", "arguments": '{"a": '}}
    talk = [
        ASKED,
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [CALL]},
        {"role": "tool", "content": "4", "tool_call_id": "call_1", "name": "add"},
        {"role": "assistant", "content": "<think>so</think>4", "tool_calls": [text_call, broken]},
    ]
    (answer,) = read_rows(tmp_path / "step.parquet", [{"messages": json.dumps(talk)}])
    thinking = Piece("thinking", "hm")
    call = Piece("call", "", "add", (("a", "2"), ("why", "so\nit is")))
    assert [turn.pieces for turn in answer.turns] == [
        [thinking, call],
        [Piece("text", "4")],
        [
            Piece("thinking", "so"),
            Piece("text", "4"),
            Piece("call", "", "add", (("a", "[2]"),)),
            Piece("call", '{"a": ', "add"),
        ],
    ]
    assert [turn.about for turn in answer.turns] == ["", "add, call_1", ""]


def test_a_function_may_have_the_name_of_a_kind_of_piece(tmp_path: Path) -> None:
    named = [{"function": {"name": name, "arguments": {"a": 1}}} for name in ("text", "call")]
    talk = [ASKED, {"role": "assistant", "content": "", "tool_calls": named}]
    (answer,) = read_rows(tmp_path / "step.parquet", [{"messages": json.dumps(talk)}])
    arguments = (("a", "1"),)
    assert answer.turns[0].pieces == [
        Piece("call", "", name, arguments) for name in ("text", "call")
    ]
    assert answer.num_calls == 2


def test_marks_that_are_never_closed_are_text_in_linear_time() -> None:
    """A collapsed policy may repeat `<think>` up to its limit of tokens."""
    content = "<think>" * 100_000 + "<tool>add</tool>" + "<tool>"
    start = time.process_time()
    ((_, _, pieces, _),) = turns([{"role": "assistant", "content": content}])
    assert time.process_time() - start < 2.0
    assert [(piece.kind, len(piece.text)) for piece in pieces] == [
        ("text", 700_000),
        ("call", 16),
        ("text", 6),
    ]


def test_a_huge_conversation_is_shown_in_part(client: TestClient, made: RecordedStore) -> None:
    calls = [CALL] * 20_000
    talk = [ASKED, *[{"role": "assistant", "content": "4"}] * 20_000]
    talk[1] = {"role": "assistant", "content": "", "tool_calls": calls}
    artifact = made.artifacts["grpo_iteration 1"]
    path = made.store.artifacts / artifact / "rollouts" / "step_000008.parquet"
    pq.write_table(pa.Table.from_pylist([{"messages": json.dumps(talk)}]), path)
    try:
        text = client.get(f"/artifacts/{artifact}/completions", params={"step": 8}).text
    finally:
        path.unlink()
    assert "19900 more parts of this turn" in text.replace(",", "")
    assert "19500 more turns" in text.replace(",", "")
    assert len(text) < 300_000


def test_parts_of_an_episode_are_one_sample_and_repeat_no_turns(tmp_path: Path) -> None:
    a, b, c, d = ({"role": "assistant", "content": text} for text in "abcd")
    more = {"role": "user", "content": "more"}
    talks = [[ASKED, a, more, b], [ASKED, a, more, c], [ASKED, d]]
    rows = [
        {"messages": json.dumps(talk), "sample": sample, "part": part, "reward": float(sample)}
        for talk, (sample, part) in zip(talks, [(0, 0), (0, 1), (1, 0)], strict=True)
    ]
    path = tmp_path / "step.parquet"
    answers = read_rows(path, rows)
    texts = [[turn.pieces[0].text for turn in each.turns] for each in answers]
    assert texts == [["a", "more", "b"], ["c"], ["d"]]
    assert [len(each.repeated) for each in answers] == [0, 2, 0]
    assert [each.part for each in answers] == [1, 2, None]
    (card,) = select(Source("x", path), Filter()).cards(0, 1)
    assert card.rewards == [0.0, 1.0]
    assert readings([card])[0].num_rows == 2


@pytest.mark.parametrize("odd", ["[1, 2]", "[" * 100_000, '[{"content": 1}]', "[]", "{}", None, 5])
def test_other_values_are_no_conversation(odd: object) -> None:
    assert messages_of(odd) == []


def test_tokens_are_tinted_by_a_kind(source: Source, tmp_path: Path) -> None:
    (card,) = select(source, Filter(row=0)).cards(0, 1, tokens=True)
    row = card.rows[0] | {"generated": [True, True]}
    # exp(-0.05) = 0.951 and exp(-3) = 0.0498; without a tokenizer the ids are shown.
    shown = tokens(row, tmp_path, "logprob")
    assert [(token.text, token.tint) for token in shown] == [("[3]", "rare-0"), ("[4]", "rare-3")]
    assert shown[1].label == "token 4; probability 0.0498, logprob -3; weights of step 6"
    masked = tokens(card.rows[0], tmp_path, "mask")
    assert [token.tint for token in masked] == ["trained", "untrained"]
    assert [token.tint for token in tokens(row, tmp_path, "version")] == ["version-0", "version-1"]
    assert [token.tint for token in tokens(row, tmp_path, "difference")] == ["", ""]
    row |= {"trainer_logprobs": [-0.0505, -2.75]}  # 0.0005 less, and 0.25 more
    shown = tokens(row, tmp_path, "difference")
    assert [token.tint for token in shown] == ["rare-0", "rare-3"]
    assert "logprob -3; of the trainer -2.75, difference 0.25;" in shown[1].label


def evaluation(path: Path, correct: dict[str, bool | None]) -> Path:
    rows = [
        {"prompt_id": prompt, "mode": mode, "correct": value if mode == "greedy" else True}
        for prompt, value in correct.items()
        for mode in ("greedy", "sampled")
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def test_gained_and_lost_prompts_are_those_of_the_greedy_completions(tmp_path: Path) -> None:
    before = {"a": False, "b": True, "c": True, "d": None, "e": False}
    after = {"a": True, "b": False, "c": True, "d": True, "f": True}
    files = (evaluation(tmp_path / "b", before), evaluation(tmp_path / "a", after))
    assert changes(*files) == {"gained": frozenset("a"), "lost": frozenset("b")}


def test_a_search_goes_through_steps_and_stops_when_its_time_is_over(tmp_path: Path) -> None:
    for step in range(1, 6):
        rows = [rollout("a", 0, 0, float(step), text=f"at {step}")]
        save_rollouts(rows, tmp_path / "rollouts" / f"step_{step:06d}.parquet")
    (tmp_path / "rollouts" / "step_000004.parquet").write_text("no table")
    files = sources("x", tmp_path)
    assert [file.step for file in files] == [5, 4, 3, 2, 1]

    result = scan(files, Filter(text="at 2"), limit=10, seconds=60)
    assert [card.source.step for card in result.cards] == [2]
    assert result[1:] == (5, 4, 1, 1, 0)
    assert [card.source.step for card in scan(files, Filter(), limit=2, seconds=60).cards] == [5, 3]
    assert scan(files, Filter(text="at 2"), limit=10, seconds=0)[1:] == (1, 1, 0, 0, 0)


def test_a_step_of_ten_thousand_rollouts_is_read_quickly(tmp_path: Path) -> None:
    rows = pa.table(
        {
            "prompt_id": [f"p{index // 8}" for index in range(10_000)],
            "group": [index // 8 for index in range(10_000)],
            "completion": ["some text of a completion " * 4] * 10_000,
            "prompt": ["a prompt"] * 10_000,
            "reward": [float(index % 3) for index in range(10_000)],
        }
    )
    pq.write_table(rows, tmp_path / "step.parquet")
    source = Source("x", tmp_path / "step.parquet")
    select(source, Filter())
    began = time.process_time()
    cards = select(source, Filter(text="COMPLETION", order="best")).cards(0, 10)
    assert len(cards) == 10
    # 0.05 s on a machine that needs 0.5 s for the loop.
    assert time.process_time() - began < 0.4 * loop_seconds()


def test_a_search_of_all_steps_shows_every_prompt_once(tmp_path: Path) -> None:
    for step, count in ((1, 12), (2, 25)):
        rows = [rollout(f"{step}-{n}", n, 0, 1.0) for n in range(count)]
        save_rollouts(rows, tmp_path / "rollouts" / f"step_{step:06d}.parquet")
    files, start, skip = sources("x", tmp_path), 0, 0
    pages = []
    while start < len(files):
        part = scan(files[start:], Filter(), limit=10, skip=skip, seconds=60)
        pages.append([card.rows[0]["prompt_id"] for card in part.cards])
        start, skip = start + part.num_searched, part.num_shown
    assert [len(page) for page in pages] == [10, 10, 10, 7]
    expected = [f"2-{n}" for n in range(25)] + [f"1-{n}" for n in range(12)]
    assert [prompt for page in pages for prompt in page] == expected


def test_only_completions_of_a_mode_are_selected(tmp_path: Path) -> None:
    path = evaluation(tmp_path / "rows.parquet", {"a": True, "b": False})
    assert select(Source("x", path), Filter(mode="greedy")).passing.tolist() == [0, 2]
    assert select(Source("x", path), Filter(mode="sampled")).passing.tolist() == [1, 3]


def test_prompts_without_rewards_are_not_equal(tmp_path: Path) -> None:
    rows = [rollout(name, group, sample, reward) for group, (name, reward) in
            enumerate((("none", None), ("same", 0.5))) for sample in (0, 1)]  # fmt: skip
    save_rollouts(rows, tmp_path / "step.parquet")
    cards = select(Source("x", tmp_path / "step.parquet"), Filter()).cards(0, 9)
    assert [one.is_equal for one in readings(cards)] == [False, True]
