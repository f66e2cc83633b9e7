"""`nemo-rl reproduce`: reproduce a checkpoint from its record, and compare bitwise."""

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import rich_click

from nemo_rl_core.errors import StoreError
from nemo_rl_core.history.ancestry import folder_around, from_folder
from nemo_rl_core.history.database import path_of
from nemo_rl_core.history.equality import Equality, compare_artifacts
from nemo_rl_core.history.queries import History
from nemo_rl_core.history.records import ArtifactRow, Execution
from nemo_rl_core.history.signed import is_signed, key_file
from nemo_rl_core.store.machine import Machine
from nemo_rl_core.store.manifest import Manifest
from nemo_rl_core.store.store import Store
from tasks.cli.records.names import complete_artifacts, resolve_alias
from tasks.reproduce.differences import (
    Differences,
    differences_from,
    differences_from_stages,
    differences_of_making,
)
from tasks.reproduce.reproduction import (
    BITS_FOLLOW_THE_MACHINE,
    ROOT,
    checkout,
    is_training,
    manifests_behind,
    run_stages,
    stage_calls,
    train_again,
)

_MAX_TENSORS = 10


@rich_click.command()
@click.argument("checkpoint", shell_complete=complete_artifacts, callback=resolve_alias)
@click.option("--store", type=click.Path(path_type=Path),
              help="Store of the second run; a new folder by default.")  # fmt: skip
@click.option("--checkout", "at_commit", is_flag=True, help="Run in a git worktree of its commit.")
@click.option("--anyway", is_flag=True, help="Run even if the source or packages differ.")
@click.option("--trust", is_flag=True, help="Run the code of any record, also of a record that no "
              "run of this user has written.")  # fmt: skip
@click.option("--keep", is_flag=True,
              help="Keep the new store; it is always kept if the results differ.")  # fmt: skip
def reproduce(
    checkpoint: str, store: Path | None, at_commit: bool, anyway: bool, trust: bool, keep: bool
) -> None:
    """Runs the stages that made CHECKPOINT again, and checks that the result is bitwise identical.

    All ancestors of the checkpoint run, as recorded in their manifests, in a separate store without
    cached results. Artifacts that were made on a cluster are reproduced on this machine.
    A training run started by `fit` runs with its recorded artifacts and reward.
    CHECKPOINT is given as in `nemo-rl lineage`. Exit code 0: equal; 1: not; 2: refused.
    """
    artifact, repetition = _found(checkpoint, trust=trust)
    differences = repetition.differences(at_commit)
    _refuse_or_warn(differences, anyway=anyway)
    folder = store or Path(tempfile.mkdtemp(prefix="nemo-rl-reproduce-"))
    target = Store(folder)
    _refuse_used(target)
    click.echo(f"running {repetition.what} again in {target.root}")
    with ExitStack() as stack:
        source = ROOT
        if at_commit:
            scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="nemo-rl-source-"))
            source = stack.enter_context(checkout(repetition.commit, Path(scratch)))
        again = repetition.run(target, source, anyway)
    result = _compared(artifact, again)
    _report(artifact, again, result, repetition.maker)
    machine_changes = _machine_changes(artifact, again, differences)
    if result.is_bitwise_identical:
        click.echo(
            f"  made by {'; '.join(machine_changes) or 'equal processors, threads and kernels'}"
        )
    else:
        click.echo(f"  why: {_why(differences, machine_changes)}")
    if result.is_bitwise_identical and store is None and not keep:
        shutil.rmtree(folder)
    sys.exit(0 if result.is_bitwise_identical else 1)


@dataclass(frozen=True)
class _Repetition:
    """How to make an artifact again.

    Attributes:
        what: Description for the terminal.
        differences: Returns differences from this machine and source; takes whether the commit is
            checked out.
        run: Takes the store, the source and whether a changed reward is used; returns the folder.
    """

    what: str
    maker: str
    commit: str | None
    differences: Callable[[bool], Differences]
    run: Callable[[Store, Path, bool], Path]


def _found(checkpoint: str, *, trust: bool) -> tuple[ArtifactRow, _Repetition]:
    """Finds an artifact; a download needs no record of runs, since it has all manifests."""
    store, folder = Store.default(), folder_around(Path(checkpoint).expanduser())
    downloaded = from_folder(folder) if folder is not None else None
    if downloaded is not None and not path_of(store).is_file():
        if not trust:
            _refuse_unknown_code(store, None, manifests_behind(None, downloaded))
        return downloaded, _stages(None, downloaded)
    with History(store) as history:
        artifact = history.find_artifact(checkpoint)
        maker = history.maker(artifact)
        is_of_this_machine = artifact.manifest.get("run") is None
        if maker is not None and not trust and (is_training(maker) or is_of_this_machine):
            _refuse_unsigned(store, maker)
        if not trust:
            _refuse_unknown_code(store, maker, manifests_behind(history, artifact))
        return artifact, _training(history, artifact, trust) or _stages(history, artifact)


def _refuse_unsigned(store: Store, execution: Execution) -> None:
    if is_signed(store, execution):
        return
    raise StoreError(
        f"no run of this user has written the record of {execution.id}",
        expected=f"a signature of the run with the key in {key_file()}",
        got="none, or one with another key: the run is older than signatures, or the store comes "
        "from elsewhere",
        fix="reproducing runs the code that a record names and unpickles its reward: pass --trust "
        f"if you trust whoever wrote {store.root}",
    )


def _refuse_unknown_code(
    store: Store, maker: Execution | None, manifests: Mapping[str, Manifest]
) -> None:
    is_known = maker is not None and is_signed(store, maker)
    signed = set(_code_in(maker.inputs)) if maker is not None and is_known else set()
    names = {name for each in manifests.values() for name in _code_in(each.config)} - signed
    if names:
        raise StoreError(
            "the manifests name code that no record of this user's runs names",
            expected=f"functions and modules of a run that is signed with the key in {key_file()}",
            got=", ".join(sorted(names))[:200],
            fix="look at this code, and pass --trust to run it",
        )


def _code_in(config: Any) -> Iterator[str]:
    if isinstance(config, Mapping):
        if config.get("trust_remote_code"):
            yield str(config.get("name"))
        for key, value in config.items():
            # A sweep has values of a field by its path, such as `environment.target`.
            if key.rpartition(".")[2] in ("target", "module"):
                yield from _texts(value)
            if key == "isolation":
                yield from _texts(value)
            yield from _code_in(value)
    elif isinstance(config, list):
        for each in config:
            yield from _code_in(each)


def _texts(values: Any) -> Iterator[str]:
    if isinstance(values, str):
        yield values
    elif isinstance(values, Mapping | list):
        for each in values.values() if isinstance(values, Mapping) else values:
            yield from _texts(each)


def _training(history: History, artifact: ArtifactRow, trust: bool) -> _Repetition | None:
    """Returns how to repeat a training run started by `fit`; None for a pipeline's stages."""
    execution = history.maker(artifact)
    if execution is None or not is_training(execution):
        return None
    return _Repetition(
        what=f"{execution.workflow} of {execution.id}",
        maker=execution.id,
        commit=execution.git_commit,
        differences=lambda checked_out: differences_from(execution, checked_out=checked_out),
        run=lambda target, source, anyway: train_again(
            execution, artifact, target, source=source, anyway=anyway, trust=trust
        ),
    )


def _stages(history: History | None, artifact: ArtifactRow) -> _Repetition:
    manifests = manifests_behind(history, artifact)
    calls = stage_calls(history, manifests)
    made_by = manifests[artifact.id]
    # A run on this machine has a record; a run on a cluster has only its manifests.
    execution = history.maker(artifact) if history is not None and made_by.run is None else None
    folder = Path(execution.folder) if execution is not None else Path.cwd()

    def differences(checked_out: bool) -> Differences:
        if execution is not None:
            return differences_from(execution, checked_out=checked_out)
        return differences_from_stages(manifests, calls, checked_out=checked_out)

    return _Repetition(
        what=", ".join(call.stage for call in calls),
        maker=execution.id if execution else str(made_by.run and made_by.run.execution),
        commit=made_by.git_commit,
        differences=differences,
        run=lambda target, source, _: run_stages(calls, target, source=source, folder=folder),
    )


def _compared(artifact: ArtifactRow, again: Path) -> Equality:
    """Compares files; if the files are elsewhere, as on a cluster, only the hashes."""
    if Path(artifact.path).is_dir():
        return compare_artifacts(Path(artifact.path), again)
    is_equal = Manifest.read(again).content_hash == artifact.content_hash
    return Equality(content=is_equal, weights=None, tensors=(), num_tensors=0)


def _refuse_or_warn(differences: Differences, *, anyway: bool) -> None:
    explained = [BITS_FOLLOW_THE_MACHINE] if differences.bits else []
    for line in (*differences.serious, *differences.warnings, *differences.bits, *explained):
        click.echo(f"note: {line}", err=True)
    if differences.serious and not anyway:
        raise StoreError(
            "the recorded source or packages differ from the current ones",
            expected="the same source and packages",
            got="; ".join(differences.serious),
            fix="--checkout runs the recorded commit; --anyway runs the current source",
        )


def _machine_changes(
    artifact: ArtifactRow, again: Path, differences: Differences
) -> tuple[str, ...]:
    then = artifact.manifest.get("machine")  # manifests of earlier versions have none
    now = Manifest.read(again).machine
    changes = differences_of_making(Machine.model_validate(then), now) if then else ()
    return tuple(dict.fromkeys([*differences.bits, *changes]))


def _why(differences: Differences, machine_changes: Sequence[str]) -> str:
    reasons = [*differences.serious, *machine_changes]
    if machine_changes:
        reasons.append(BITS_FOLLOW_THE_MACHINE)
    return "; ".join(reasons) or "unknown: source, packages and machine are equal to the run's"


def _refuse_used(target: Store) -> None:
    if target.root.exists() and any(target.root.iterdir()):
        raise StoreError(
            f"{target.root} is not empty, so its artifacts would be cache hits",
            fix="pass an empty folder as --store, or omit it",
        )


def _report(artifact: ArtifactRow, again: Path, result: Equality, maker: str) -> None:
    if result.is_bitwise_identical:
        weights = f", {result.num_tensors} tensors of weights" if result.num_tensors else ""
        click.echo(f"bitwise identical: {artifact.id}, content {artifact.content_hash}{weights}")
        return
    click.echo(f"DIFFERENT: {artifact.path} and {again}")
    new_hash = Manifest.read(again).content_hash
    if artifact.content_hash == new_hash:
        click.echo("  both were equal when created; one has changed on disk since: nemo-rl verify")
    else:
        click.echo(f"  content {artifact.content_hash[:16]} and {new_hash[:16]}")
    if result.weights:
        click.echo(f"  weights: the same, {result.num_tensors} tensors")
    for tensor in result.tensors[:_MAX_TENSORS]:
        if tensor.what == "differs":
            difference = (
                f"by up to {tensor.largest:.3g} in {100 * tensor.share:.2f} % of its elements"
            )
            click.echo(f"  {tensor.name} differs {difference}")
        else:
            click.echo(f"  {tensor.name}: {tensor.what}")
    if len(result.tensors) > _MAX_TENSORS:
        click.echo(f"  … {len(result.tensors) - _MAX_TENSORS} more of {result.num_tensors}")
    click.echo(f"  it was made by {maker}")
