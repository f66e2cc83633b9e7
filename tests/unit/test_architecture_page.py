"""`docs/architecture.md` shows the existing folders and layers."""

import re
import tomllib
from pathlib import Path

from generate import house

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = (REPOSITORY / "docs" / "architecture.md").read_text()


def blocks() -> list[str]:
    return re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)


def shown_under(folder: str) -> set[str]:
    """Returns the names that the tree shows under a top-level folder, with a slash."""
    (tree,) = (block for block in blocks() if "\nnemo_rl_core/" in block)
    part = tree.split(f"\n{folder}/")[1] if not tree.startswith(f"{folder}/") else tree
    names = []
    for line in part.splitlines()[1:]:
        if not line.startswith("  "):
            break
        names.append(line.split()[0])
    return set(names)


def folders(folder: Path) -> set[str]:
    return {f"{path.parent.name}/" for path in folder.glob("*/__init__.py")}


def test_the_tree_shows_every_folder() -> None:
    core = REPOSITORY / "nemo_rl_core"
    small_files = {"errors.py", "registry.py", "types.py", "__init__.py"}
    files = {path.name for path in core.glob("*.py")} - small_files
    assert shown_under("nemo_rl_core") == folders(core) | files
    assert shown_under("tasks") == folders(REPOSITORY / "tasks")


def test_the_layers_are_those_that_lint_checks() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    contracts = project["tool"]["importlinter"]["contracts"]
    (layers,) = (each["layers"] for each in contracts if each["name"] == "Layers of the core")
    (shown,) = (block for block in blocks() if block.startswith(layers[0]))
    assert shown.splitlines() == layers


def test_the_picture_shows_the_existing_packages() -> None:
    drawn = (REPOSITORY / "docs" / "pictures" / "house.svg").read_text()
    shown = set(re.findall(r">([\w/]+) [\d,]+</text>", drawn))
    assert shown == {room.name for _, rooms in house.rows(REPOSITORY) for room in rooms}


def test_the_page_names_existing_files() -> None:
    names = re.findall(r"`((?:nemo_rl_core|tasks|workflows|tests)/[\w/]+\.py)`", PAGE)
    assert [name for name in names if not (REPOSITORY / name).is_file()] == []
    assert "nemo_rl_core/algorithms/grpo/trainer.py" in names
