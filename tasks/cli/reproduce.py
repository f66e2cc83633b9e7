"""`nemo-rl reproduce`: reproduce a checkpoint from its record, and compare the bits."""

import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import click

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
from tasks.cli.differences import (
    Differences,
    differences_from,
    differences_from_stages,
    differences_of_making,
)
from tasks.cli.reproduction import (
    BITS_FOLLOW_THE_MACHINE,
    ROOT,
    OutputRef,
    checkout,
    is_training,
    output_artifact,
    output_of,
    train_again,
)
from tasks.cli.stage_calls import manifests_behind, run_stages, stage_calls

_MAX_TENSORS = 10


@click.command()
@click.argument("checkpoint")
@click.option(
    "--store",
    type=click.Path(path_type=Path),
    help="Store of the second run; a new folder by default.",
)
@click.option("--checkout", "at_commit", is_flag=True, help="In a git worktree of its commit.")
@click.option("--anyway", is_flag=True, help="Run even if the source or packages differ.")
@click.option(
    "--trust",
    is_flag=True,
    help="Run whatever code the record names, also one that no run of this user has written.",
)
@click.option(
    "--keep", is_flag=True, help="Keep the new store; it is always kept if the results differ."
)
def reproduce(
    checkpoint: str, store: Path | None, at_commit: bool, anyway: bool, trust: bool, keep: bool
) -> None:
    """Runs the stages behind CHECKPOINT again, and checks that the result is bit-identical.

    Those that it was made from run, as their manifests have them, in a separate store without
    cached results; later ones do not. What a cluster made is run here.
    A training that Python started runs on the artifacts and with the reward that it had.
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
            apart = stack.enter_context(tempfile.TemporaryDirectory(prefix="nemo-rl-source-"))
            source = stack.enter_context(checkout(repetition.commit, Path(apart)))
        again = repetition.run(target, source, anyway)
    result = _compared(artifact, again)
    _report(artifact, again, result, repetition.maker)
    made = _of_making(artifact, again, differences)
    if result.to_the_bit:
        click.echo(f"  made by {'; '.join(made) or 'equal processors, threads and kernels'}")
    else:
        click.echo(f"  why: {_why(differences, made)}")
    if result.to_the_bit and store is None and not keep:
        shutil.rmtree(folder)
    sys.exit(0 if result.to_the_bit else 1)


@dataclass(frozen=True)
class _Repetition:
    """How an artifact is made again.

    Attributes:
        what: For the terminal.
        maker: Id of the run that made it.
        commit: Its source.
        differences: From this machine and source; takes whether the commit is checked out.
        run: Takes the store, the source and whether a changed reward is used; returns the folder.
    """

    what: str
    maker: str
    commit: str | None
    differences: Callable[[bool], Differences]
    run: Callable[[Store, Path, bool], Path]


def _found(checkpoint: str, *, trust: bool) -> tuple[ArtifactRow, _Repetition]:
    """A download needs no record of runs: its folder has the manifests of its ancestors."""
    store, folder = Store.default(), folder_around(Path(checkpoint).expanduser())
    downloaded = from_folder(folder) if folder is not None else None
    if downloaded is not None and not path_of(store).is_file():
        return downloaded, _stages(None, downloaded)
    with History(store) as history:
        artifact = history.find_artifact(checkpoint)
        maker = history.maker(artifact)
        if maker is not None and not trust and _was_here(maker, artifact):
            _refuse_unsigned(store, maker)
        return artifact, _training(history, artifact, trust) or _stages(history, artifact)


def _was_here(maker: Execution, artifact: ArtifactRow) -> bool:
    """Whether the record is of a run on this machine, whose code comes from its folder."""
    return is_training(maker) or artifact.manifest.get("run") is None


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


def _training(history: History, artifact: ArtifactRow, trust: bool) -> _Repetition | None:
    """Of a training that Python started; None for the stages of a pipeline."""
    execution = history.maker(artifact)
    if execution is None or not is_training(execution):
        return None
    output = output_of(history, artifact)

    def run(target: Store, source: Path, anyway: bool) -> Path:
        code = train_again(execution, artifact, target, source=source, anyway=anyway, trust=trust)
        return Path(_reproduced_artifact(target, output, code).path)

    return _Repetition(
        what=f"{execution.workflow} of {execution.id}",
        maker=execution.id,
        commit=execution.git_commit,
        differences=lambda checked_out: differences_from(execution, checked_out=checked_out),
        run=run,
    )


def _stages(history: History | None, artifact: ArtifactRow) -> _Repetition:
    """Of the stages that an artifact was made by, here or on a cluster."""
    manifests = manifests_behind(history, artifact)
    calls = stage_calls(history, manifests)
    made_by = manifests[artifact.id]
    # Of a run here; what is recorded of one on a cluster is what its manifests have.
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
    """Compares files; of an artifact whose files are elsewhere, as on a cluster, the hashes."""
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


def _of_making(artifact: ArtifactRow, again: Path, differences: Differences) -> tuple[str, ...]:
    """What of machines and kernels differed, as both manifests have it."""
    then = artifact.manifest.get("machine")  # manifests of earlier versions have none
    now = Manifest.read(again).machine
    found = differences_of_making(Machine.model_validate(then), now) if then else ()
    return tuple(dict.fromkeys([*differences.bits, *found]))


def _why(differences: Differences, made: Sequence[str]) -> str:
    found = [*differences.serious, *made]
    if made:
        found.append(BITS_FOLLOW_THE_MACHINE)
    return "; ".join(found) or "unknown: source, packages and machine are equal to the run's"


def _refuse_used(target: Store) -> None:
    if target.root.exists() and any(target.root.iterdir()):
        raise StoreError(
            f"{target.root} is not empty, so its artifacts would be cache hits",
            fix="pass an empty folder as --store, or omit it",
        )


def _reproduced_artifact(target: Store, output: OutputRef, code: int) -> ArtifactRow:
    with History(target) as history:
        runs = history.executions().items
        if not runs:
            raise StoreError(
                "the second run did not begin", got=f"exit code {code}", fix="see above"
            )
        return output_artifact(history, runs[0].id, output)


def _report(artifact: ArtifactRow, again: Path, result: Equality, maker: str) -> None:
    if result.to_the_bit:
        weights = f", {result.num_tensors} tensors of weights" if result.num_tensors else ""
        click.echo(f"EQUAL to the bit: {artifact.id}, content {artifact.content_hash}{weights}")
        return
    click.echo(f"DIFFERENT: {artifact.path} and {again}")
    found = Manifest.read(again).content_hash
    if artifact.content_hash == found:
        click.echo("  both were equal when created; one has changed on disk since: nemo-rl verify")
    else:
        click.echo(f"  content {artifact.content_hash[:16]} and {found[:16]}")
    if result.weights:
        click.echo(f"  weights: the same, {result.num_tensors} tensors")
    for tensor in result.tensors[:_MAX_TENSORS]:
        if tensor.what == "differs":
            far = f"by up to {tensor.largest:.3g} in {100 * tensor.share:.2f} % of its elements"
            click.echo(f"  {tensor.name} differs {far}")
        else:
            click.echo(f"  {tensor.name}: {tensor.what}")
    if len(result.tensors) > _MAX_TENSORS:
        click.echo(f"  … {len(result.tensors) - _MAX_TENSORS} more of {result.num_tensors}")
    click.echo(f"  it was made by {maker}")
