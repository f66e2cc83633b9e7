import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from nemo_rl_core.data.preview import preview
from nemo_rl_core.data.tokenizer import build_arithmetic_tokenizer
from workflows.cli import group

ARITHMETIC = build_arithmetic_tokenizer()
TURNS = [
    {"role": "user", "content": "1+1="},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2+2="},
    {"role": "assistant", "content": "4"},
]


def test_a_pair_of_prompt_and_completion_by_hand() -> None:
    # <bos> and four characters, then 1, 0 and <eos>
    assert preview({"prompt": "9+1=", "completion": "10"}, ARITHMETIC) == (
        "row: 8 tokens, 3 trained on, 1 end-of-sequence\n<bos>9+1=⟦10<eos>⏹⟧"
    )


def test_every_turn_or_the_last_and_the_cut() -> None:
    row = {"messages": json.dumps(TURNS), "mask": "all_assistant_turns"}
    assert preview(row, ARITHMETIC).endswith("<bos>1+1=⟦2<eos>⏹⟧2+2=⟦4<eos>⏹⟧")
    assert preview({**row, "mask": "final_turn"}, ARITHMETIC).endswith(
        "13 tokens, 2 trained on, 2 end-of-sequence\n<bos>1+1=2<eos>⏹2+2=⟦4<eos>⏹⟧"
    )
    assert preview({**row, "max_tokens": 8}, ARITHMETIC).endswith("\n<bos>1+1=⟦2<eos>⏹⟧2")


def test_text_pairs_and_color() -> None:
    # Nothing predicts the first token.
    assert preview({"text": "12"}, ARITHMETIC).endswith("\n<bos>⟦12<eos>⏹⟧")
    pair = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
    assert preview(pair, ARITHMETIC) == (
        "chosen: 7 tokens, 2 trained on, 1 end-of-sequence\n<bos>1+1=⟦2<eos>⏹⟧\n\n"
        "rejected: 7 tokens, 2 trained on, 1 end-of-sequence\n<bos>1+1=⟦3<eos>⏹⟧"
    )
    assert preview({"text": "12"}, ARITHMETIC, color=True).endswith(
        "\n<bos>\x1b[32m⟦12<eos>⏹⟧\x1b[0m"
    )


def test_a_character_of_several_tokens_is_shown_whole(
    byte_tokenizer: Callable[[str], Any],
) -> None:
    row = {"prompt": "é", "completion": "𝄞ü"}
    assert preview(row, byte_tokenizer("none")).endswith("\né⟦𝄞ü<|endoftext|>⏹⟧")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    ARITHMETIC.save_pretrained(tmp_path / "model")
    rows = [{"messages": TURNS[:2]}, {"messages": TURNS}, {"messages": TURNS[:1]}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


@pytest.mark.slow
def test_the_command_shows_a_row(folder: Path) -> None:
    arguments = [str(folder / "rows.jsonl"), "--model", str(folder / "model"), "--row", "1"]
    finished = subprocess.run(
        [sys.executable, "-c", "from workflows.cli import main; main()", "preview", *arguments],
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    shown = finished.stdout.splitlines()
    assert shown[:2] == [
        "row: 13 tokens, 4 trained on, 2 end-of-sequence",
        "<bos>1+1=⟦2<eos>⏹⟧2+2=⟦4<eos>⏹⟧",
    ]
    # Output to a pipe has no color.
    assert "\x1b" not in finished.stdout


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (["--row", "2"], "does not end with an assistant turn"),
        (["--row", "3"], "a row from 0 to 2"),
        (["--row", "-1"], "has no row -1"),
        (["--columns", "turns=messages"], "no row has the column 'turns'"),
        (["--columns", "messages"], "'messages' is not YOURS=NAME"),
    ],
)
def test_the_command_explains_rows_that_it_cannot_show(
    folder: Path, arguments: list[str], fragment: str
) -> None:
    command = [str(folder / "rows.jsonl"), "--model", str(folder / "model"), *arguments]
    result = CliRunner().invoke(group, ["preview", *command])
    assert (result.exit_code, result.stdout) == (2, "")
    assert fragment in result.stderr


def test_the_command_maps_columns(folder: Path) -> None:
    rows = folder / "mapped.jsonl"
    rows.write_text(json.dumps({"query": "1+1=", "label": "2"}) + "\n")
    command = [str(rows), "--model", str(folder / "model")]
    columns = ["--columns", "query=prompt", "--columns", "label=answer"]
    result = CliRunner().invoke(group, ["preview", *command, *columns])
    assert result.exit_code == 0, result.output
    assert "<bos>1+1=⟦2<eos>⏹⟧" in result.stdout


def test_an_unread_column_is_mapped_by_the_commands_option(folder: Path) -> None:
    rows = folder / "unknown.jsonl"
    rows.write_text(json.dumps({"query": "1+1=", "label": "2"}) + "\n")
    result = CliRunner().invoke(group, ["preview", str(rows), "--model", str(folder / "model")])
    assert result.exit_code == 2
    assert "--columns YOUR_COLUMN=prompt" in result.output


def test_control_characters_of_a_row_reach_a_pipe_as_they_are(
    folder: Path, byte_tokenizer: Callable[[str], Any]
) -> None:
    byte_tokenizer("none").save_pretrained(folder / "bytes")
    rows = folder / "colored.jsonl"
    rows.write_text(json.dumps({"prompt": "a", "completion": "\x1b[1mb"}) + "\n")
    result = CliRunner().invoke(group, ["preview", str(rows), "--model", str(folder / "bytes")])
    assert result.exit_code == 0, result.output
    assert "a⟦\x1b[1mb<|endoftext|>⏹⟧\n" in result.stdout


def previewed(*arguments: str) -> list[str]:
    result = CliRunner().invoke(group, ["preview", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


def test_a_recipe_shows_its_prompt_template_and_columns(tmp_path: Path) -> None:
    rows = [
        {"sum": "1+1", "total": "2"},
        {"sum": "2+3", "total": "5"},
        {"sum": "4+4", "total": "8"},
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    recipe = tmp_path / "grpo_mine.yaml"
    recipe.write_text(
        f"""
data:
  kind: file
  train: {tmp_path / "rows.jsonl"}
  validation: {tmp_path / "rows.jsonl"}
  columns: {{sum: prompt, total: answer}}
  prompt_template: "0+{{prompt}}="
"""
    )
    shown = previewed(str(recipe), "--row", "1")
    assert shown[:4] == ["prompt: 7 tokens", "<bos>0+2+3=", "", "answer: 5"]
    assert not any("⟦" in line for line in shown[:-1]), "nothing is trained on without sft"
    with_sft = previewed(str(recipe), "sft.num_steps=1", "--row", "1")
    assert with_sft[5:7] == [
        "row: 9 tokens, 2 trained on, 1 end-of-sequence",
        "<bos>0+2+3=⟦5<eos>⏹⟧",
    ]
    changed = previewed(str(recipe), 'data.prompt_template="{prompt}="', "--row", "2")
    assert changed[1] == "<bos>4+4="


def test_a_recipe_of_conversations_shows_its_mask(folder: Path) -> None:
    recipe = folder / "sft_mine.yaml"
    rows = folder / "rows.jsonl"
    recipe.write_text(
        f"data: {{kind: file, train: {rows}, validation: {rows}, mask: final_turn}}\n"
    )
    assert previewed(str(recipe), "--row", "1")[:2] == [
        "row: 13 tokens, 2 trained on, 2 end-of-sequence",
        "<bos>1+1=2<eos>⏹2+2=⟦4<eos>⏹⟧",
    ]
    assert "<bos>1+1=2<eos>⏹2+2=⟦4<eos>⏹⟧" in previewed(
        str(recipe), "--row", "1", "--model", str(folder / "model")
    )


TOOLS_TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}{% for m in messages %}"
    "{{ m.role }}:{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}(quick){% endif %}"
)


def test_tools_and_template_arguments_are_shown_as_the_run_writes_them(
    tmp_path: Path, byte_tokenizer: Callable[[str], Any]
) -> None:
    tokenizer = byte_tokenizer("none")
    tokenizer.chat_template = TOOLS_TEMPLATE
    tokenizer.save_pretrained(tmp_path / "model")
    tools = [{"name": "find", "parameters": {}}, {"name": "add", "parameters": {}}]
    rows = [{"prompt": f"{n}+1", "answer": "2", "tools": tools} for n in range(3)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    recipe = tmp_path / "grpo_mine.yaml"
    data = f"{{kind: file, train: {tmp_path}/rows.jsonl, validation: {tmp_path}/rows.jsonl}}"
    recipe.write_text(
        f"data: {data}\n"
        f"model: {{kind: pretrained, name: {tmp_path}/model, "
        "chat_template_kwargs: {enable_thinking: false}}\n"
    )
    expected = [
        'template arguments: {"enable_thinking": false}',
        "",
        "tools: find, add",
        "",
        "prompt: 34 tokens",
        "find;add;user:0+1assistant:(quick)",
    ]
    assert previewed(str(recipe))[:6] == expected
    assert previewed(str(recipe), "--model", f"{tmp_path}/model")[:6] == expected
    from_file = previewed(f"{tmp_path}/rows.jsonl", "--model", f"{tmp_path}/model")
    assert from_file[0] == "tools: find, add"
    plain = "\n".join(json.dumps({**row, "tools": None}) for row in rows)
    (tmp_path / "rows.jsonl").write_text(plain)
    with recipe.open("a") as file:
        file.write("environment: {kind: tools, tools: [{kind: calculator}]}\n")
    of_environment = previewed(str(recipe))
    assert of_environment[2] == "tools: calculator"
    assert of_environment[5] == "calculator;user:0+1assistant:(quick)"


def test_a_shipped_recipe_is_shown_by_its_name() -> None:
    shown = previewed("grpo_arithmetic")
    assert shown[0].startswith("prompt: ")
    assert any("trained on" in line for line in shown)


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (["grpo_aritmetic"], "there is no recipe 'grpo_aritmetic'"),
        (["grpo_arithmetic", "--mask", "final_turn"], "data.mask"),
        (["grpo_arithmetic", "--row", "999999"], "the data of kind arithmetic has no row 999999"),
        (["grpo_arithmetic", "seeed=1"], "did you mean 'seed'?"),
        (["rows.jsonl", "seed=1", "--model", "m"], "only a recipe takes settings"),
        (["rows.jsonl"], "Missing option '--model'"),
    ],
)
def test_a_preview_that_cannot_be_made_is_refused(arguments: list[str], fragment: str) -> None:
    result = CliRunner().invoke(group, ["preview", *arguments])
    assert result.exit_code == 2
    assert fragment in result.output
