"""`nemo-rl card`: a checkpoint's model card."""

import json
from pathlib import Path
from typing import IO

import click
import rich_click

from nemo_rl_core.errors import StoreError
from nemo_rl_core.history.card import inherited_license, model_card
from nemo_rl_core.history.card_evaluations import CardEvaluation, recorded_evaluations
from nemo_rl_core.history.queries import History
from nemo_rl_core.history.records import ArtifactRow
from nemo_rl_core.store.store import Store
from tasks.cli.records.names import complete_artifacts, resolve_alias

_MODELS = ("checkpoint", "model")
"""Kinds of artifacts that have weights."""


@rich_click.command()
@click.argument("checkpoint", shell_complete=complete_artifacts, callback=resolve_alias)
@click.option("--store", type=click.Path(path_type=Path), help="Instead of NEMO_RL_HOME.")
@click.option("--name", default="", help="The title.")
@click.option("--license", "license_id", default="", help="Its id on the hub, such as apache-2.0; "
              "by default that of the base model, if its card is on this machine.")  # fmt: skip
@click.option(
    "--output", type=click.File("w"), default="-", help="Output file; the terminal by default."
)
def card(checkpoint: str, store: Path | None, name: str, license_id: str, output: IO[str]) -> None:
    """Writes the card (README.md in the hub's format) of CHECKPOINT.

    CHECKPOINT is given as in `nemo-rl lineage`. Exported models have a card in their folder; this
    one also includes later evaluations.
    """
    with History(Store(store) if store else Store.default()) as history:
        artifact = history.find_artifact(checkpoint)
        if artifact.kind not in _MODELS:
            raise StoreError(
                f"{artifact.id} is not a model, so it has no model card",
                expected="a checkpoint or an exported model",
                got=f"an artifact of kind {artifact.kind!r}",
                fix="name the model: nemo-rl lineage shows the models that it comes from",
            )
        trained = _trained(history, artifact)
        evaluations = _evaluations(history, trained, artifact)
    text = model_card(
        Path(trained.path),
        evaluations=evaluations,
        name=name,
        license_id=license_id or inherited_license(Path(trained.path)),
        reproduce=f"nemo-rl reproduce {artifact.id}",
        exported=_exported(artifact),
    )
    output.write(text)


def _exported(artifact: ArtifactRow) -> str:
    origin = Path(artifact.path) / "origin.json"
    if not origin.is_file():
        return ""
    export = json.loads(origin.read_text())
    return f"{export['exported']}; {export['verdict']}" if "exported" in export else ""


def _trained(history: History, artifact: ArtifactRow) -> ArtifactRow:
    """Returns the checkpoint that an exported model was copied from; else the artifact itself."""
    graph = history.ancestry(artifact.id)
    weights = artifact.manifest.get("weights_hash")
    for each in graph.artifacts:
        row = each.artifact
        if each.depth == 1 and row and weights and row.manifest.get("weights_hash") == weights:
            return row
    return artifact


def _evaluations(
    history: History, trained: ArtifactRow, artifact: ArtifactRow
) -> list[CardEvaluation]:
    folders = {Path(artifact.path)}
    for each in history.descendants(trained.id).artifacts:
        row = each.artifact
        if each.depth == 1 and row and row.kind == "evaluation" and each.state == "found":
            folders.add(Path(row.path))
    reports = {
        each.manifest.content_hash: each
        for folder in sorted(folders)
        for each in recorded_evaluations(folder)
    }
    return sorted(reports.values(), key=lambda each: each.manifest.created_at)
