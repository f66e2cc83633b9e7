"""Bounds the files of this project that a stage enters whose artifact is in the store."""

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from pydantic import BaseModel

import nemo_rl_core
import tasks.prepare_data
from nemo_rl_core.produce import StageResult
from tasks.artifacts import Artifact
from tasks.stage.stage import make

ROOTS = tuple(f"{Path(package.__file__ or '').parent}/" for package in (nemo_rl_core, tasks))
MAX_FILES, MAX_FUNCTIONS = 15, 86
"""Lower these bounds with the code; a stage that needs more is too hard to follow."""


class RowsConfig(BaseModel):
    name: str


def rows(name: str, **parents: Artifact) -> Artifact:
    def work(folder: Path) -> StageResult:
        (folder / "rows.txt").write_text(name)
        return StageResult("dataset", "text")

    config = RowsConfig(name=name)
    return Artifact(
        **make(
            tasks.prepare_data.__name__, "prepare_data", config=config, parents=parents, work=work
        )
    )


@pytest.mark.usefixtures("own_store")
def test_a_stored_stage_enters_few_files_and_functions() -> None:
    parent = rows("parent")
    made = rows("child", parent=parent)
    entered: set[tuple[str, str]] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(ROOTS):
            entered.add((code.co_filename, code.co_qualname))

    sys.setprofile(note)
    try:
        stored = rows("child", parent=parent)
    finally:
        sys.setprofile(None)
    assert stored.content_hash == made.content_hash
    # Comprehensions and lambdas belong to the function around them.
    functions = {each for each in entered if not each[1].rpartition(".")[2].startswith("<")}
    files = {file for file, _ in functions}
    assert len(files) <= MAX_FILES, sorted(files)
    assert len(functions) <= MAX_FUNCTIONS, sorted(functions)
