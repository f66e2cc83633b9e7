"""What differs between a recorded run and this machine."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from nemo_rl_core.history.records import Execution
from nemo_rl_core.store.git import git_state
from nemo_rl_core.store.machine import Machine
from nemo_rl_core.store.manifest import package_versions
from nemo_rl_core.store.source_digest import source_digest
from tasks.cli.reproduction import ROOT


@dataclass(frozen=True)
class Differences:
    """Reasons why a second run may differ.

    Attributes:
        serious: Differences of code or packages.
        warnings: Differences that should not matter, but may.
        bits: Differences of the machine that change the last bits of sums.
    """

    serious: tuple[str, ...]
    warnings: tuple[str, ...]
    bits: tuple[str, ...]


def differences_from(execution: Execution, *, checked_out: bool = False) -> Differences:
    """Compares this machine and source with those of the run.

    Args:
        execution: The run to repeat.
        checked_out: Whether it will run in a checkout of its commit; ignores the current source.
    """
    serious, warnings = [], []
    current = package_versions()
    for name in sorted({*current, *execution.packages}):
        then, now = execution.packages.get(name, "none"), current.get(name, "none")
        if then != now:
            serious.append(f"{name} was {then} and is {now}")
    commit, dirty = git_state(ROOT)
    if checked_out:
        if execution.git_dirty:
            serious.append("the run's source had uncommitted changes")
    elif source_digest(execution.workflow.rpartition(".")[0]) != execution.source_digest:
        serious.append("the source of the workflow differs")
    if not checked_out and commit != execution.git_commit:
        warnings.append(f"the commit was {execution.git_commit} and is {commit}")
    if not checked_out and dirty:
        warnings.append("the working tree has uncommitted changes")
    bits = tuple(_of_machine(execution.machine, Machine.current()))
    return Differences(tuple(serious), tuple(warnings), bits)


def _of_machine(then: dict[str, Any], current: Machine) -> Iterator[str]:
    """Yields differences of the machine that affect the order of floating-point sums."""
    now = current.model_dump()
    texts = {
        "cpu_model": "the processor was {0} and is {1}",
        "instruction_set": "its vector extensions differ (only then {0}, only now {1})",
        "threads": "libraries took {0} threads and take {1}",
        "cores": "it had {0} cores and has {1}",
    }
    for name, text in texts.items():
        before, after = then.get(name), now[name]
        if before in (None, after):  # older records have fewer fields
            continue
        if name == "instruction_set":
            before, after = _only_in(before, after), _only_in(after, before)
        yield text.format(before, after)


def _only_in(one: str, other: str) -> str:
    return " ".join(sorted({*one.split()} - {*other.split()})) or "none"
