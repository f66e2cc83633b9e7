"""Finds differences between a recorded run and this machine."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_rl_core.history.records import Execution
from nemo_rl_core.store.git import git_state
from nemo_rl_core.store.machine import Machine
from nemo_rl_core.store.manifest import Manifest, package_versions
from nemo_rl_core.store.source_digest import source_digest
from tasks.reproduce.reproduction import ROOT, StageCall


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
    serious = list(_package_differences(execution.packages))
    if checked_out:
        if execution.git_dirty:
            serious.append("the run's source had uncommitted changes")
    elif source_digest(execution.workflow.rpartition(".")[0]) != execution.source_digest:
        serious.append("the source of the workflow differs")
    warnings = [] if checked_out else _commit_differences([execution.git_commit])
    bits = tuple(_machine_differences(execution.machine, Machine.current()))
    return Differences(tuple(serious), tuple(warnings), bits)


def differences_from_stages(
    manifests: Mapping[str, Manifest], calls: Sequence[StageCall], *, checked_out: bool = False
) -> Differences:
    """Compares this machine and source with those of each stage, which may have been several."""
    serious: list[str] = []
    bits: list[str] = []
    for call in calls:
        manifest = manifests[call.name]
        serious += _package_differences(manifest.packages)
        if checked_out and manifest.git_dirty:
            serious.append(f"the source of {call.stage} had uncommitted changes")
        if not checked_out and _digest(call.module) != manifest.source_digest:
            serious.append(f"the source of {call.stage} differs")
        threads = (call.config.get("cluster") or {}).get("num_threads")
        bits += _machine_differences(manifest.machine.model_dump(), Machine.current(threads))
    commits = [each.git_commit for each in manifests.values()]
    warnings = [] if checked_out else _commit_differences(commits)
    return Differences(_once(serious), tuple(warnings), _once(bits))


def _once(lines: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(lines))


def _digest(module: str) -> str:
    try:
        return source_digest(module)
    except (ImportError, OSError):
        return "not here"


def _package_differences(then: Mapping[str, str]) -> Iterator[str]:
    current = package_versions()
    for name in sorted({*current, *then}):
        before, now = then.get(name, "none"), current.get(name, "none")
        if before != now:
            yield f"{name} was {before} and is {now}"


def _commit_differences(then: Iterable[str | None]) -> list[str]:
    commit, dirty = git_state(ROOT)
    changes = [
        f"the commit was {each} and is {commit}" for each in dict.fromkeys(then) if each != commit
    ]
    return [*changes, *(["the working tree has uncommitted changes"] if dirty else [])]


def differences_of_making(one: Machine, other: Machine) -> tuple[str, ...]:
    """Compares how two artifacts were made: machines, and the processes that computed."""
    return (
        *_machine_differences(one.model_dump(), other),
        *_process_variable_differences(one, other),
    )


def _machine_differences(then: dict[str, Any], current: Machine) -> Iterator[str]:
    """Yields differences of the machine that affect the order of floating-point sums."""
    now = current.model_dump()
    texts = {
        "cpu_model": "the processor was {0} and is {1}",
        "instruction_set": "its vector extensions differ (only then {0}, only now {1})",
        "threads": "libraries took {0} threads and take {1}",
        "cores": "it had {0} cores and has {1}",
        "driver": "the driver of its GPUs was {0} and is {1}",
        "variables": "variables that choose kernels were {0} and are {1}",
    }
    for name, text in texts.items():
        before, after = then.get(name), now[name]
        if before in (None, after):  # older records have fewer fields
            continue
        shown = _SHOWN.get(name, _as_it_is)(before, after)
        yield text.format(*(each or "none" for each in shown))
    yield from _process_differences(then.get("processes", {}), current.processes)


def _process_differences(
    then: Mapping[str, Mapping[str, str]], now: Mapping[str, Mapping[str, str]]
) -> Iterator[str]:
    """Yields differences between the processes of each role, such as training, that both have."""
    for role in sorted({*then} & {*now}):
        for name in sorted({*then[role], *now[role]}):
            before, after = (each[role].get(name, "none") for each in (then, now))
            if before != after:
                yield f"{name} in {role} was {before} and is {after}"


def _process_variable_differences(one: Machine, other: Machine) -> Iterator[str]:
    """Yields variables of processes that differ from their machine's variables in both."""
    then, now = one.process_variables, other.process_variables
    if then is None or now is None:  # a record of an earlier version
        return
    for role in sorted({*then} & {*now}):
        for name in sorted({*then[role], *now[role]}):
            before, after = (each.variable_in(role, name) for each in (one, other))
            if before != after:
                yield f"{name} in {role} was {before or 'none'} and is {after or 'none'}"


def _as_it_is(before: Any, after: Any) -> tuple[str, str]:
    return str(before), str(after)


def _only_in_each(before: str, after: str) -> tuple[str, str]:
    one, other = {*before.split()}, {*after.split()}
    return " ".join(sorted(one - other)), " ".join(sorted(other - one))


def _assignments(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[str, str]:
    one, other = (
        " ".join(f"{name}={value}" for name, value in sorted(each.items()))
        for each in (before, after)
    )
    return one, other


_SHOWN: dict[str, Callable[[Any, Any], tuple[str, str]]] = {
    "instruction_set": _only_in_each,
    "variables": _assignments,
}
