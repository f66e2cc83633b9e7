"""The notebooks as pages, and their execution.

`python docs/generate/notebooks.py` executes them in order, in a store of its own, and keeps their
outputs: what differs between machines (paths, progress of libraries) is left out of them.
"""

import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER = "notebooks"
NAMES = ("train", "record")
"""In the order in which they are executed: the second reads the runs of the first."""

_SECONDS = 900


def pages() -> dict[str, str]:
    """Markdown by path below `docs`, made from the stored notebooks."""
    return {f"{FOLDER}/{name}.md": _page(name) for name in NAMES}


def execute(store: Path) -> dict[str, Any]:
    """Executes the notebooks, each in a kernel of its own.

    Args:
        store: A folder for their runs.

    Returns:
        The executed notebooks by name.

    Raises:
        nbclient.exceptions.CellExecutionError: If a cell raises.
    """
    import nbformat
    from nbclient import NotebookClient

    environment = {**os.environ, "NEMO_RL_HOME": str(store), "PYTHONPATH": str(REPOSITORY)}
    notebooks = {}
    for name in NAMES:
        notebook = nbformat.read(_file(name), 4)  # type: ignore[no-untyped-call]
        client = NotebookClient(notebook, timeout=_SECONDS, kernel_name="python3")
        client.execute(env=environment, cwd=str(store))
        notebooks[name] = notebook
    return notebooks


def store_outputs(notebooks: dict[str, Any], store: Path) -> None:
    """Writes executed notebooks to where they are read from, without this machine's paths."""
    replaced = {str(store): "~/.nemo_rl", str(Path(sys.executable).parent): ".venv/bin"}
    for name, notebook in notebooks.items():
        for cell in (each for each in notebook.cells if each["cell_type"] == "code"):
            cell["outputs"] = [each for each in cell["outputs"] if each.get("name") != "stderr"]
            cell["metadata"].pop("execution", None)  # times
        text = json.dumps(notebook, indent=1, ensure_ascii=False)
        for here, shown in replaced.items():
            text = text.replace(here, shown)
        _file(name).write_text(text + "\n")


def _file(name: str) -> Path:
    return REPOSITORY / "docs" / FOLDER / f"{name}.ipynb"


def _page(name: str) -> str:
    cells = json.loads(_file(name).read_text())["cells"]
    note = f"This page is a notebook: [{name}.ipynb]({name}.ipynb)."
    title, *rest = ["\n\n".join(_shown(cell)) for cell in cells]
    return "\n\n".join([title, note, *rest]) + "\n"


def _shown(cell: dict[str, Any]) -> list[str]:
    text = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return [re.sub(r"\((\w+)\.ipynb\)", r"(\1.md)", text)]
    outputs = [_output(each) for each in cell["outputs"]]
    return [f"```python\n{text}\n```", *(each for each in outputs if each)]


def _output(output: dict[str, Any]) -> str:
    data = output.get("data", {})
    if "text/html" in data:
        # No blank lines, at which Markdown would end the block, and one style for all tables.
        html = re.sub(r"<style.*?</style>", "", "".join(data["text/html"]), flags=re.S)
        return "<div>" + re.sub(r"\n\s*", "", html) + "</div>"
    text = "".join(data.get("text/plain", output.get("text", "")))
    return f"```text\n{text.rstrip()}\n```" if text else ""


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        store_outputs(execute(Path(folder)), Path(folder))
