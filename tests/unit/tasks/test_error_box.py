"""The box of an error in a pipe: no path is broken."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.conftest import Finished


def test_a_path_in_an_error_stays_on_its_line(
    run_grpo: Callable[[dict[str, Any] | str], Finished], tmp_path: Path
) -> None:
    rows = tmp_path / ("long" * 30) / "rows.jsonl"
    data = {"kind": "file", "train": str(rows), "max_prompt_tokens": 16}
    finished = run_grpo({"recipe": "grpo_ci", "data": data})
    assert finished.exit_code == 2
    lines = finished.output.splitlines()
    assert any(f"{rows} " in line for line in lines)
    assert len({len(line) for line in lines if line.startswith(("╭", "│", "╰"))}) == 1
