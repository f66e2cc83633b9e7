"""Draws the folders of the repository as rooms, layer upon layer, and measures the code.

    cd docs && ../.venv/bin/python -m generate.house ../ > pictures/house.svg
    cd docs && ../.venv/bin/python -m generate.house --measures ../

A room is a folder or a single module; its area is its lines, its cells are its files, and a row is
a layer of import-linter's contract: a room imports only from rows below it.
"""

import ast
import html
import statistics
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

CORE = "nemo_rl_core"
WIDTH, HEIGHT, GAP, MARGIN = 1280, 74, 10, 16
COLORS = ("#dbe7f6", "#e3f0dc", "#fbeacb", "#f3dfe6", "#e5e0f2")


@dataclass(frozen=True)
class Room:
    """A folder or a single module.

    Attributes:
        name: From the repository, as `tasks/cli` or `store`.
        lines: Number of lines of each file, the longest first.
    """

    name: str
    lines: tuple[int, ...]

    @property
    def total(self) -> int:
        """Lines of all files."""
        return sum(self.lines)


def rows(root: Path) -> list[tuple[str, list[Room]]]:
    """The layers from top to bottom, each with its name and its rooms."""
    project = tomllib.loads((root / "pyproject.toml").read_text())
    contracts = project["tool"]["importlinter"]["contracts"]
    (layers,) = (each["layers"] for each in contracts if each["name"] == "Layers of the core")
    rows = [("workflows", [_room(root, "workflows")]), ("tasks", _rooms_of_tasks(root))]
    for layer in layers:
        names = [name.strip() for name in layer.split("|")]
        rows.append((layer, [_room(root / CORE, name) for name in names]))
    return rows


def _rooms_of_tasks(root: Path) -> list[Room]:
    inner = sorted(path.parent.name for path in (root / "tasks").glob("*/__init__.py"))
    sizes = [_num_lines(path) for path in (root / "tasks").glob("*.py")]
    stages = Room("tasks", tuple(sorted(sizes, reverse=True)))
    return [stages, *(_room(root / "tasks", name, prefix="tasks/") for name in inner)]


def _room(folder: Path, name: str, prefix: str = "") -> Room:
    path = folder / name
    files = path.rglob("*.py") if path.is_dir() else [path.with_suffix(".py")]
    lines = sorted((_num_lines(file) for file in files), reverse=True)
    return Room(prefix + name, tuple(lines))


def _num_lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def picture(root: Path) -> str:
    """The repository's rooms as SVG."""
    layers = rows(root)
    widest = max(sum(room.total for room in rooms) for _, rooms in layers)
    most = max(len(rooms) for _, rooms in layers)
    scale = (WIDTH - 2 * MARGIN - (most - 1) * GAP) / widest
    height = 2 * MARGIN + len(layers) * (HEIGHT + GAP) - GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="13" role="img">',
        "<title>The rooms of nemo-rl-flow, layer upon layer</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    for number, (_, rooms) in enumerate(layers):
        x, y = float(MARGIN), MARGIN + number * (HEIGHT + GAP)
        for room in rooms:
            width = max(room.total * scale, 4.0)
            parts += _drawn(room, x, y, width, COLORS[number % len(COLORS)])
            x += max(width, 7.5 * len(_label(room))) + GAP
    return "\n".join([*parts, "</svg>\n"])


def _label(room: Room) -> str:
    return f"{room.name} {room.total:,}"


def _drawn(room: Room, x: float, y: float, width: float, color: str) -> Iterable[str]:
    """Draws a package with one cell per file; longer files have wider columns."""
    top, height = y + 20, HEIGHT - 20
    yield f'<text x="{x:.1f}" y="{y + 14}">{html.escape(_label(room))}</text>'
    yield (
        f'<rect x="{x:.1f}" y="{top}" width="{width:.1f}" height="{height}" '
        f'fill="{color}" stroke="#444444"/>'
    )
    for cell in _cells(room.lines, x, top, width, height):
        left, upper, wide, high = cell
        yield (
            f'<rect x="{left:.1f}" y="{upper:.1f}" width="{wide:.1f}" height="{high:.1f}" '
            'fill="none" stroke="#888888" stroke-width="0.5"/>'
        )


def _cells(
    lines: Sequence[int], x: float, y: float, width: float, height: float
) -> Iterable[tuple[float, float, float, float]]:
    """Halves the longer side until each file has a rectangle of its share of the area."""
    if len(lines) < 2 or not sum(lines):
        yield x, y, width, height
        return
    half, taken = 0, 0
    while half < len(lines) - 1 and taken < sum(lines) / 2:
        taken += lines[half]
        half += 1
    share = taken / sum(lines)
    if width >= height:
        yield from _cells(lines[:half], x, y, width * share, height)
        yield from _cells(lines[half:], x + width * share, y, width * (1 - share), height)
    else:
        yield from _cells(lines[:half], x, y, width, height * share)
        yield from _cells(lines[half:], x, y + height * share, width, height * (1 - share))


def measures(root: Path) -> dict[str, str]:
    """Sizes of files and functions, complexity and public names of the three packages."""
    files = [file for name in (CORE, "tasks", "workflows") for file in (root / name).rglob("*.py")]
    lengths = sorted(_num_lines(file) for file in files)
    trees = [ast.parse(file.read_text()) for file in files]
    functions = sorted(
        (node.end_lineno or node.lineno) - node.lineno + 1
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    public = [
        node.name
        for tree in trees
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
    ]
    return {
        "lines, files": f"{sum(lengths):,}, {len(files)}",
        "lines of a file: median, p90, most": _spread(lengths, (50, 90, 100)),
        "lines of a function: p50, p90, p99, most": _spread(functions, (50, 90, 99, 100)),
        "functions with a complexity above 12": str(_num_complex(root)),
        "public names, of which in two places": (
            f"{len(set(public)):,}, {sum(public.count(name) > 1 for name in set(public))}"
        ),
    }


def _spread(values: Sequence[int], percents: Iterable[int]) -> str:
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return ", ".join(f"{values[-1] if p == 100 else round(cuts[p - 1])}" for p in percents)


def _num_complex(root: Path) -> int:
    """By ruff's C901; the tree of an older commit needs none of its own settings."""
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "C901"]
    options = ["--config", "lint.mccabe.max-complexity = 12", "--output-format", "concise"]
    folders = [str(root / name) for name in (CORE, "tasks", "workflows")]
    done = subprocess.run(
        [*command, *options, *folders], check=False, capture_output=True, text=True
    )
    return done.stdout.count("C901")


def main() -> None:
    """Writes the picture, or the measures as a table."""
    root = Path(sys.argv[-1])
    if "--measures" in sys.argv:
        for name, value in measures(root).items():
            sys.stdout.write(f"| {name} | {value} |\n")
    else:
        sys.stdout.write(picture(root))


if __name__ == "__main__":
    main()
