"""The lists of modules that cache keys leave out are correct."""

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from nemo_rl_core.store import source_digest
from nemo_rl_core.store.digest_scope import (
    MACHINERY,
    NOT_OF_THE_RESULT,
    RECORDS_ARE_THE_RESULT,
    REPORTING,
)

REPOSITORY = Path(__file__).resolve().parents[3]

TAKEN = {
    # Errors and their texts.
    "config.mistakes.CONTRADICTION",
    "config.mistakes.FIX",
    "config.mistakes.Mistake",
    "config.mistakes.describe",
    "config.mistakes.follows",  # which mistakes are listed with another
    "config.mistakes.mistakes_of",
    "config.names.unknown_names",
    "config.peer_names.NO_EFFECT",
    # Destinations of tracking and limits of costs, which are in no stage's config.
    "config.tracking.BudgetConfig",
    "config.tracking.TrackingConfig",
    # Reads CPU seconds into `Spent`.
    "distributed.cpu_time.read_cpu_seconds",
    # Objects under names of other projects' documents; the objects themselves count.
    "documented_names.documented",
    # Values in the card of an exported model, which no content hash covers.
    "history.card_evaluations.recorded_evaluations",
    # Stored and read only for reports.
    "checkpoints.stop_request",
    "distributed.step_times.RankTimesLog",
    "store.machine.Machine",
    "store.machine.process_numerics",  # for the manifest
    "telemetry.budget.current_budget",  # ends a run, after a save
    "telemetry.decks.curves",  # summary and deck
    "telemetry.decks.records",
    "telemetry.events.StageResumed",
    "telemetry.events.StageSaved",
    "telemetry.usage.GpuUse",
    "telemetry.usage.gpu_use",
    "telemetry.usage.opened_nvml",
    "telemetry.decks.sampled_figures",
    "telemetry.usage.Timer",  # seconds in metrics.jsonl, which no content hash covers
    "telemetry.usage.peak_memory_gib",
    "telemetry.usage",
    # `advance` of a wait is only displayed.
    "telemetry.waiting.waiting",
}
"""Names that counted modules import from reporting ones, except functions that return nothing or a
text; each was reviewed."""

SAYS_NOTHING = {"None", "str", "str | None", "Iterator[None]", "AbstractContextManager[None]"}


@cache
def counted() -> frozenset[str]:
    """Returns all modules in the key of any stage."""
    stages = [
        path.stem
        for path in sorted((REPOSITORY / "tasks").glob("*.py"))
        if "@cached_task" in path.read_text()
    ]
    assert len(stages) == 23
    modules = (source_digest.reachable_modules(f"tasks.{stage}") for stage in stages)
    return frozenset().union(*modules)


def taken() -> Iterator[tuple[str, str]]:
    """Yields module and name of each import from a reporting module in a counted one."""
    for module in counted():
        path = source_digest._path(module)
        assert path is not None
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                of_module = source_digest._with_packages(node.module)
                for alias in node.names:
                    if not REPORTING.isdisjoint([*of_module, f"{node.module}.{alias.name}"]):
                        yield node.module, alias.name


def test_reports_return_no_values_used_in_results() -> None:
    """A function whose value is used in a result must be in a counted module."""
    used = set()
    for module, name in set(taken()):
        home = importlib.import_module(module)
        value = getattr(home, name, None) or importlib.import_module(f"{module}.{name}")
        returns = inspect.signature(value).return_annotation if inspect.isfunction(value) else ""
        text = returns if isinstance(returns, str) else inspect.formatannotation(returns)
        if text.replace("collections.abc.", "") not in SAYS_NOTHING:
            defined = getattr(value, "__module__", module)  # a constant has none
            used.add(f"{defined}.{name}".removeprefix("nemo_rl_core."))
    assert used == TAKEN


@pytest.mark.parametrize("module", sorted(REPORTING))
def test_reports_do_not_draw_or_set_global_state(module: str) -> None:
    """Reporting modules must not draw from or set global state, which could affect numbers."""
    path = source_digest._path(module)
    assert path is not None
    files = sorted(path.parent.rglob("*.py")) if path.stem == "__init__" else [path]
    draws = r"manual_seed|\brandn?\(|\brandint\(|\bshuffle\("
    sets = r"\bset_\w*(?:threads|dtype)\(|use_deterministic"
    for file in files:
        assert not re.search(f"{draws}|{sets}", file.read_text()), file


def test_both_lists_have_only_modules_and_do_not_overlap() -> None:
    assert not REPORTING & MACHINERY
    assert all(source_digest._path(name) is not None for name in NOT_OF_THE_RESULT)


def test_every_entry_is_reachable_or_hides_a_reachable_module() -> None:
    """An entry that no counted module imports would hide later additions."""
    imported = {
        each
        for module in counted()
        for name in source_digest._source(module).imports
        for each in source_digest._with_packages(name)
    }
    not_imported = {each for each in NOT_OF_THE_RESULT if each not in imported}
    for name in not_imported:
        users = [
            other
            for other in NOT_OF_THE_RESULT - {name}
            if any(
                name in source_digest._with_packages(each)
                for file in _files_of(other)
                for each in source_digest.read_source(file, other).imports
            )
        ]
        assert users, f"{name} is imported by nothing that a stage reaches: remove it"


def _files_of(module: str) -> list[Path]:
    path = source_digest._path(module)
    assert path is not None
    return sorted(path.parent.rglob("*.py")) if path.stem == "__init__" else [path]


def test_records_count_where_they_are_the_result() -> None:
    for stage, records in RECORDS_ARE_THE_RESULT.items():
        assert records <= MACHINERY
        assert records <= source_digest.reachable_modules(stage)
        assert not records & source_digest.reachable_modules("tasks.train_sft")


def test_every_stage_declares_a_numerics_version() -> None:
    for path in sorted((REPOSITORY / "tasks").glob("*.py")):
        declared = re.findall(r"^NUMERICS_VERSION = [1-9]\d*$", path.read_text(), re.MULTILINE)
        assert len(declared) == ("@cached_task" in path.read_text()), path


def test_the_minor_version_of_flytekit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_flytekit(version: str) -> str:
        real = source_digest._version
        with monkeypatch.context() as patch:
            patch.setattr(
                source_digest,
                "_version",
                lambda name: version if name == "flytekit" else real(name),
            )
            return source_digest.source_digest("tasks.export")

    assert with_flytekit("1.16.31") == with_flytekit("1.16.32")
    assert with_flytekit("1.16.31") != with_flytekit("1.17.0")
