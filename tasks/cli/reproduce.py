"""`nemo-rl reproduce`: a checkpoint made again from its record, and compared to the bit."""

import shutil
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import click

from nemo_rl_core.errors import StoreError
from nemo_rl_core.history.equality import Equality, compare_artifacts
from nemo_rl_core.history.queries import History
from nemo_rl_core.history.records import ArtifactRow, Execution
from nemo_rl_core.store.store import Store
from tasks.cli.reproduction import (
    BITS_FOLLOW_THE_MACHINE,
    ROOT,
    Doubts,
    OutputPlace,
    artifact_at,
    checkout,
    doubts_about,
    maker_of,
    place_of,
    run_again,
)

_MAX_TENSORS = 10


@click.command()
@click.argument("checkpoint")
@click.option("--store", type=click.Path(path_type=Path), help="Where; by default a new folder.")
@click.option("--checkout", "at_commit", is_flag=True, help="In a git worktree of its commit.")
@click.option("--anyway", is_flag=True, help="Also where the source or packages differ.")
@click.option("--keep", is_flag=True, help="Keep the new store; one that differs is always kept.")
def reproduce(
    checkpoint: str, store: Path | None, at_commit: bool, anyway: bool, keep: bool
) -> None:
    """Runs again what made CHECKPOINT, and says whether the same came of it, to the bit.

    The whole workflow runs, with its recorded inputs, in a store of its own, where nothing is
    cached. CHECKPOINT is named as in `nemo-rl lineage`. Exit code 0: equal; 1: not; 2: refused.
    """
    with History(Store.default()) as history:
        artifact = history.find_artifact(checkpoint)
        execution = maker_of(history, artifact)
        place = place_of(history, artifact)
    doubts = doubts_about(execution, checked_out=at_commit)
    _refuse_or_remark(doubts, anyway=anyway)
    folder = store or Path(tempfile.mkdtemp(prefix="nemo-rl-reproduce-"))
    target = Store(folder)
    _refuse_used(target)
    click.echo(f"running {execution.workflow} of {execution.id} again in {target.root}")
    with ExitStack() as stack:
        source = ROOT
        if at_commit:
            apart = stack.enter_context(tempfile.TemporaryDirectory(prefix="nemo-rl-source-"))
            source = stack.enter_context(checkout(execution.git_commit, Path(apart)))
        code = run_again(execution, target, source=source)
    again = _made_again(target, place, code)
    result = compare_artifacts(Path(artifact.path), Path(again.path))
    _tell(artifact, again, result, execution)
    if not result.to_the_bit:
        click.echo(f"  why: {_why(doubts)}")
    if result.to_the_bit and store is None and not keep:
        shutil.rmtree(folder)
    sys.exit(0 if result.to_the_bit else 1)


def _refuse_or_remark(doubts: Doubts, *, anyway: bool) -> None:
    explained = [BITS_FOLLOW_THE_MACHINE] if doubts.bits else []
    for line in (*doubts.serious, *doubts.remarks, *doubts.bits, *explained):
        click.echo(f"note: {line}", err=True)
    if doubts.serious and not anyway:
        raise StoreError(
            "what ran then is not what would run now",
            expected="the same source and packages",
            got="; ".join(doubts.serious),
            fix="--checkout runs the commit of then; --anyway runs what is here and compares",
        )


def _why(doubts: Doubts) -> str:
    found = [*doubts.serious, *doubts.bits]
    if doubts.bits:
        found.append(BITS_FOLLOW_THE_MACHINE)
    return "; ".join(found) or "not known: source, packages and machine are those of the run"


def _refuse_used(target: Store) -> None:
    if target.root.exists() and any(target.root.iterdir()):
        raise StoreError(
            f"{target.root} is not empty, so that its artifacts would be taken from the cache",
            fix="name an empty folder in --store, or none",
        )


def _made_again(target: Store, place: OutputPlace, code: int) -> ArtifactRow:
    with History(target) as history:
        runs = history.executions().items
        if not runs:
            raise StoreError(
                "the second run did not begin", got=f"exit code {code}", fix="see above"
            )
        return artifact_at(history, runs[0].id, place)


def _tell(
    artifact: ArtifactRow, again: ArtifactRow, result: Equality, execution: Execution
) -> None:
    if result.to_the_bit:
        weights = f", {result.num_tensors} tensors of weights" if result.num_tensors else ""
        click.echo(f"EQUAL to the bit: {artifact.id}, content {artifact.content_hash}{weights}")
        return
    click.echo(f"DIFFERENT: {artifact.path} and {again.path}")
    if artifact.content_hash == again.content_hash:
        click.echo("  both were made the same; the files of one have changed since: nemo-rl verify")
    else:
        click.echo(f"  content {artifact.content_hash[:16]} and {again.content_hash[:16]}")
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
    click.echo(f"  it was made by {execution.id}")
