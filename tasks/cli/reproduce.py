"""`nemo-rl reproduce`: reproduce a checkpoint from its record, and compare the bits."""

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
from tasks.cli.differences import Differences, differences_from
from tasks.cli.reproduction import (
    BITS_FOLLOW_THE_MACHINE,
    ROOT,
    OutputRef,
    checkout,
    is_training,
    output_artifact,
    output_of,
    run_again,
    run_of,
    train_again,
)

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
    "--keep", is_flag=True, help="Keep the new store; it is always kept if the results differ."
)
def reproduce(
    checkpoint: str, store: Path | None, at_commit: bool, anyway: bool, keep: bool
) -> None:
    """Runs the workflow of CHECKPOINT again, and checks that the result is bit-identical.

    The whole workflow runs, with its recorded inputs, in a separate store without cached results.
    A training that Python started runs on the artifacts and with the reward that it had.
    CHECKPOINT is given as in `nemo-rl lineage`. Exit code 0: equal; 1: not; 2: refused.
    """
    with History(Store.default()) as history:
        artifact = history.find_artifact(checkpoint)
        execution = run_of(history, artifact)
        output = output_of(history, artifact)
    differences = differences_from(execution, checked_out=at_commit)
    _refuse_or_warn(differences, anyway=anyway)
    folder = store or Path(tempfile.mkdtemp(prefix="nemo-rl-reproduce-"))
    target = Store(folder)
    _refuse_used(target)
    click.echo(f"running {execution.workflow} of {execution.id} again in {target.root}")
    with ExitStack() as stack:
        source = ROOT
        if at_commit:
            apart = stack.enter_context(tempfile.TemporaryDirectory(prefix="nemo-rl-source-"))
            source = stack.enter_context(checkout(execution.git_commit, Path(apart)))
        if is_training(execution):
            code = train_again(execution, artifact, target, source=source, anyway=anyway)
        else:
            code = run_again(execution, target, source=source)
    again = _reproduced_artifact(target, output, code)
    result = compare_artifacts(Path(artifact.path), Path(again.path))
    _report(artifact, again, result, execution)
    if not result.to_the_bit:
        click.echo(f"  why: {_why(differences)}")
    if result.to_the_bit and store is None and not keep:
        shutil.rmtree(folder)
    sys.exit(0 if result.to_the_bit else 1)


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


def _why(differences: Differences) -> str:
    found = [*differences.serious, *differences.bits]
    if differences.bits:
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


def _report(
    artifact: ArtifactRow, again: ArtifactRow, result: Equality, execution: Execution
) -> None:
    if result.to_the_bit:
        weights = f", {result.num_tensors} tensors of weights" if result.num_tensors else ""
        click.echo(f"EQUAL to the bit: {artifact.id}, content {artifact.content_hash}{weights}")
        return
    click.echo(f"DIFFERENT: {artifact.path} and {again.path}")
    if artifact.content_hash == again.content_hash:
        click.echo("  both were equal when created; one has changed on disk since: nemo-rl verify")
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
