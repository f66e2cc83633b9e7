"""Applies each mutant to a scratch copy and runs the tests that must notice it.

`python -m tests.mutants [TEXT]` runs all mutants, or those whose file or text contains TEXT. Each
run is a fork of this process, which has imported the large packages but none of the copy.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import hypothesis  # noqa: F401
import pytest
import torch  # noqa: F401
import transformers  # noqa: F401

from tests.mutants.table import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
COPIED = ("nemo_rl_core", "tasks", "workflows", "tests", "docs", "pyproject.toml")
SHARE = 0.97
"""Share of the mutants that must be noticed."""
MAX_SECONDS = 600
"""A run that takes longer ends and counts as a failure of its tests."""


def main(text: str = "") -> int:
    """Runs the mutants and returns the exit status."""
    chosen = [mutant for mutant in MUTANTS if text in f"{mutant.file} {mutant.old}"]
    start, num_noticed = time.monotonic(), 0
    with tempfile.TemporaryDirectory() as folder:
        scratch = copy(Path(folder))
        for tests in sorted({each.tests for each in chosen}):
            if not passes(scratch, tests):
                raise RuntimeError(f"a test fails without a mutant: {' '.join(tests)}")
        for mutant in chosen:
            is_noticed = notices(scratch, mutant)
            num_noticed += is_noticed
            change = f"{mutant.old!r} -> {mutant.new!r}"
            report(f"{'noticed ' if is_noticed else 'SURVIVED'} {mutant.file} {change}")
    seconds = time.monotonic() - start
    report(f"{num_noticed} of {len(chosen)} mutants noticed, in {seconds:.0f} s")
    return int(num_noticed < SHARE * len(chosen))


def report(line: str) -> None:
    """Writes a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def copy(folder: Path) -> Path:
    """Copies the sources, with compiled files that Python checks by content and not by time."""
    scratch = folder / "copy"
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, scratch / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, scratch / name)
    compiled = [sys.executable, "-m", "compileall", "-qq", "--invalidation-mode", "checked-hash"]
    subprocess.run([*compiled, "nemo_rl_core", "tasks"], cwd=scratch, check=True)
    return scratch


def notices(scratch: Path, mutant: Mutant) -> bool:
    """Whether a test fails with the mutant.

    Raises:
        ValueError: If the mutant's text does not occur exactly once.
    """
    file = scratch / mutant.file
    original = file.read_text()
    if (count := original.count(mutant.old)) != 1:
        raise ValueError(f"{mutant.file}: {mutant.old!r} occurs {count} times; update the table")
    file.write_text(original.replace(mutant.old, mutant.new))
    try:
        return not passes(scratch, mutant.tests)
    finally:
        file.write_text(original)


def passes(scratch: Path, tests: tuple[str, ...]) -> bool:
    """Whether all tests pass in the scratch copy.

    Raises:
        RuntimeError: If pytest could not run them.
    """
    output = scratch.parent / "output"
    child = os.fork()
    if not child:
        signal.alarm(MAX_SECONDS)
        os.chdir(scratch)
        sys.path.insert(0, str(scratch))
        written = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(written, 1)
        os.dup2(written, 2)
        os._exit(pytest.main(["-n", "0", "-x", "-q", "-p", "no:cacheprovider", *tests]))
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code not in (0, 1, -signal.SIGALRM):
        raise RuntimeError(f"pytest exited with {code}\n{output.read_text()}")
    return code == 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
