"""Batches of supervised training from rows of every kind."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from nemo_rl_core.algorithms.sft.data import load_examples, sft_batch
from nemo_rl_core.config.environment import EnvironmentConfig
from nemo_rl_core.config.multi_turn import ToolUse
from nemo_rl_core.config.row_policy import RowPolicy
from nemo_rl_core.data.loader import load_prompts, save_frame
from nemo_rl_core.data.module import DataModule
from nemo_rl_core.data.tokenizer import build_arithmetic_tokenizer, build_byte_tokenizer
from nemo_rl_core.errors import DataError
from nemo_rl_core.rollouts.prompts import load_sampled_prompts, tools_by_task

TOKENIZER, BYTES = build_arithmetic_tokenizer(), build_byte_tokenizer()
TURNS = [
    {"role": "user", "content": "1+1="},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2+2="},
    {"role": "assistant", "content": "4"},
]
OTHER = {"role": "user", "content": "3+3="}


def _saved(
    folder: Path, rows: list[dict[str, Any]], tokenizer: Any = TOKENIZER, **policy: Any
) -> Path:
    validation_rows = [dict(rows[0])]
    for name in ("prompt", "text"):
        if name in validation_rows[0]:
            validation_rows[0][name] = "9+9="
    if "messages" in validation_rows[0]:
        validation_rows[0]["messages"] = [OTHER, TURNS[1]]
    data = DataModule.of(
        rows, validation=validation_rows, tokenizer=tokenizer, policy=RowPolicy(**policy)
    )
    save_frame(data.train, folder)
    return folder


def test_conversations_keep_their_masks_through_the_folder(tmp_path: Path) -> None:
    rows = [{"messages": TURNS}]
    (every,) = load_examples(_saved(tmp_path / "a", rows), TOKENIZER)
    (last,) = load_examples(_saved(tmp_path / "b", rows, mask="final_turn"), TOKENIZER)
    # <bos> 1 + 1 = [2 <eos>] 2 + 2 = [4 <eos>]
    assert every.token_ids == last.token_ids == (1, 5, 14, 5, 17, 6, 2, 6, 14, 6, 17, 8, 2)
    ends = (True, True)
    assert every.loss_mask == (False,) * 5 + ends + (False,) * 4 + ends
    assert last.loss_mask == (False,) * 11 + ends


def test_rows_are_truncated_to_the_length_of_the_folder(tmp_path: Path) -> None:
    folder = _saved(tmp_path, [{"messages": TURNS}], max_sequence_tokens=8, overlong="truncate")
    (example,) = load_examples(folder, TOKENIZER)
    assert example.token_ids == (1, 5, 14, 5, 17, 6, 2, 6)


def test_text_and_completions_become_a_batch(tmp_path: Path) -> None:
    (text,) = load_examples(_saved(tmp_path / "a", [{"text": "12"}]), TOKENIZER)
    rows = [{"prompt": "1+1=", "completion": "2"}]
    (pair,) = load_examples(_saved(tmp_path / "b", rows), TOKENIZER)
    batch = sft_batch([text, pair])
    assert batch["input_ids"].tolist() == [[1, 5, 6, 2, 0, 0, 0], [1, 5, 14, 5, 17, 6, 2]]
    assert batch["token_mask"].int().tolist() == [[1, 1, 1, 0, 0, 0], [0, 0, 0, 0, 1, 1]]


def test_kinds_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    pairs = _saved(tmp_path / "a", [{"prompt": "1=", "chosen": "1", "rejected": "2"}])
    with pytest.raises(DataError, match="preference pairs"):
        load_examples(pairs, TOKENIZER)
    with pytest.raises(DataError, match="no prompts with answers"):
        load_prompts(_saved(tmp_path / "b", [{"text": "12"}]), TOKENIZER)


def test_prompts_show_the_tools_that_completions_are_sampled_with(tmp_path: Path) -> None:
    tools = ToolUse.model_validate({"tools": [{"kind": "calculator"}, {"kind": "python"}]})
    by_task = {"kind": "by_task", "tasks": [{"task": "sums", "environment": tools}]}
    rows: list[dict[str, Any]] = [
        {"prompt": "1+2=", "answer": "3", "task": "sums"},
        {"prompt": "1+3=", "answer": "4", "task": "sums", "tools": [{"name": "calculator"}]},
        {"prompt": "Hi", "answer": "Hi", "task": "talk"},
    ]
    folder = _saved(tmp_path / "rows", rows, BYTES)
    shown = []
    for environment in (tools, TypeAdapter(EnvironmentConfig).validate_python(by_task)):
        examples = load_examples(folder, BYTES, tools_by_task(environment))
        prompts = load_sampled_prompts(folder, BYTES, environment, max_prompt_tokens=100)
        for example, prompt in zip(examples, prompts, strict=True):
            assert example.token_ids[: len(prompt.token_ids)] == prompt.token_ids
            shown.append(BYTES.decode(prompt.token_ids).split("\n")[:-1])
    both, one = ["<bos>calculator(expression)", "python(program)"], ["<bos>calculator(expression)"]
    assert shown == [both, one, both, both, one, []]


def test_tools_that_leave_no_room_for_a_completion_are_refused(tmp_path: Path) -> None:
    options = {"max_sequence_tokens": 6, "overlong": "truncate"}
    folder = _saved(tmp_path, [{"prompt": "1+2=", "answer": "3"}], BYTES, **options)
    assert load_examples(folder, BYTES)[0].num_trained_tokens == 1
    tools = {"": [{"type": "function", "function": {"name": "calculator"}}]}
    with pytest.raises(DataError, match="leave no room for the completion"):
        load_examples(folder, BYTES, tools)
