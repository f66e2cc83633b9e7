"""Runs the notebooks of the documentation, cell by cell, like a reader."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from generate import notebooks

FOLDER = Path(__file__).resolve().parents[2] / "docs" / notebooks.FOLDER


def shown(cells: list[dict[str, Any]]) -> list[list[str]]:
    """Returns the forms of each cell's outputs, without stderr of libraries."""
    forms = []
    for cell in cells:
        outputs = [each for each in cell.get("outputs", []) if each.get("name") != "stderr"]
        forms.append([form for each in outputs for form in sorted(each.get("data", ["text"]))])
    return forms


@pytest.mark.thorough
def test_the_notebooks_run_and_show_what_is_stored(tmp_path: Path) -> None:
    executed = notebooks.execute(tmp_path)
    for name, notebook in executed.items():
        stored = json.loads((FOLDER / f"{name}.ipynb").read_text())
        assert shown(notebook.cells) == shown(stored["cells"]), name
    text = json.dumps(executed["train"])
    # One output per training, which has become the final table.
    assert len(re.findall(r"<th>stage</th>", text)) == 2
    assert "<td>grpo</td><td>ran</td>" in text
    assert "VllmBackend" not in text
    lineage = json.dumps(executed["record"])
    assert lineage.count("notebook-") >= 2
    for stage in ("grpo", "sft", "prepare_model"):
        assert f"<td>{stage}</td>" in lineage, stage


def test_stored_outputs_are_short_and_do_not_name_a_machine() -> None:
    for name in notebooks.NAMES:
        file = FOLDER / f"{name}.ipynb"
        text = file.read_text()
        assert len(text) < 32_000, name
        assert not re.search(r"/(tmp|home|root)/", text), name
        cells = json.loads(text)["cells"]
        assert any(cell.get("outputs") for cell in cells), name


def test_a_notebook_is_a_page_with_its_outputs() -> None:
    page = notebooks.pages()[f"{notebooks.FOLDER}/train.md"]
    assert page.startswith("# Train with a reward of your own")
    assert "def near(completion, answer):" in page
    assert "<th>stage</th>" in page
    assert "(train.md)" in notebooks.pages()["notebooks/record.md"]
