"""Prompts with the tools of their environment."""

import json
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_core.config.environment import ByTask
from nemo_rl_core.config.multi_turn import ToolUse
from nemo_rl_core.config.single_turn import ExactMatch
from nemo_rl_core.data.loader import save_frame
from nemo_rl_core.data.tokenizer import build_arithmetic_tokenizer
from nemo_rl_core.environments.tools.sources import schemas_of
from nemo_rl_core.errors import DataError
from nemo_rl_core.rollouts.prompts import load_sampled_prompts
from tests.chat_models import qwen3_tokenizer
from tests.unit.environments import tools_of_a_user

TOOLS = ToolUse.model_validate(
    {"tools": [{"kind": "calculator"}, f"{tools_of_a_user.__name__}:echo"]}
)
SCHEMAS = schemas_of(TOOLS.tools)


def load(folder: Path, rows: list[dict[str, Any]], scored_by: Any, **options: Any) -> Any:
    import pandas as pd

    plain = {"answer": "4", "completion": "4", "task": "t", "metadata": "{}"}
    save_frame(pd.DataFrame([{"id": str(k), **plain, **row} for k, row in enumerate(rows)]), folder)
    options = {"max_prompt_tokens": 2000, **options}
    tokenizer = options.pop("tokenizer", None) or qwen3_tokenizer()
    return load_sampled_prompts(folder, tokenizer, scored_by, **options)


def test_a_template_shows_the_tools_of_the_environment(tmp_path: Path) -> None:
    (prompt,) = load(tmp_path, [{"prompt": "2+2?"}], TOOLS)
    tokenizer = qwen3_tokenizer()
    expected = tokenizer.apply_chat_template(
        [{"role": "user", "content": "2+2?"}],
        tools=SCHEMAS,
        add_generation_prompt=True,
        tokenize=False,
    )
    assert tokenizer.decode(prompt.token_ids) == expected
    assert json.loads(prompt.tools) == SCHEMAS


def test_a_row_gets_only_the_tools_that_it_names(tmp_path: Path) -> None:
    rows = [{"prompt": "2+2?", "tools": json.dumps([SCHEMAS[1]])}]
    (prompt,) = load(tmp_path, rows, TOOLS)
    assert json.loads(prompt.tools) == SCHEMAS[1:]
    other = [{"prompt": "?", "tools": '[{"type": "function", "function": {"name": "clock"}}]'}]
    with pytest.raises(DataError, match="names the tool 'clock'"):
        load(tmp_path, other, TOOLS)


def test_a_task_shows_the_tools_of_its_environment(tmp_path: Path) -> None:
    tasks = [
        {"task": "t", "environment": TOOLS},
        {"task": "u", "environment": ExactMatch()},
    ]
    rows = [{"prompt": "2+2?"}, {"prompt": "3+3?", "task": "u"}]
    first, second = load(tmp_path, rows, ByTask.model_validate({"tasks": tasks}))
    assert json.loads(first.tools) == SCHEMAS
    assert second.tools == "[]"


def test_a_template_without_tools_shows_none(tmp_path: Path) -> None:
    (prompt,) = load(tmp_path, [{"prompt": "2+2="}], TOOLS, tokenizer=build_arithmetic_tokenizer())
    assert prompt.tools == "[]"


def test_a_prompt_that_tools_make_too_long_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"too long with the tools(.|\n)*max_prompt_tokens"):
        load(tmp_path, [{"prompt": "2+2?"}], TOOLS, max_prompt_tokens=500)
