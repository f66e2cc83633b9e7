"""Stage: a page and a record of a model's ancestry."""

import json
from pathlib import Path

from nemo_rl_core.config.base import FrozenConfig
from nemo_rl_core.produce import StageResult
from nemo_rl_core.store.ancestry import ancestry_of
from nemo_rl_core.store.files import write_atomic
from nemo_rl_core.store.manifest import Manifest
from nemo_rl_core.telemetry.lineage_page import lineage_html
from tasks.artifacts import Checkpoint, Lineage, LineageReport
from tasks.pods.resources import PLAIN
from tasks.stage.stage import cached_task, make

NUMERICS_VERSION = 1


class LineageTaskConfig(FrozenConfig):
    """Config of `lineage_report`, which reads nothing but its model."""


@cached_task(PLAIN)
def lineage_report(model: Checkpoint) -> Lineage:
    """Follows the model's parents back to data, code and config."""

    def work(folder: Path) -> StageResult:
        ancestors = ancestry_of(model.records)
        rows = [_row(0, model.manifest)]
        rows += [
            _row(a.depth, a.manifest)
            if a.manifest
            else {"generation": a.depth, "stage": a.ref.stage, "content": a.state}
            for a in ancestors
        ]
        write_atomic(folder / "lineage.json", json.dumps(rows, indent=1, sort_keys=True))
        summary = f"{model.manifest.stage} and the {len(ancestors)} artifacts that it came from"
        return StageResult("lineage", "json", summary, deck=lineage_html(rows))

    fields = make(
        __name__, "lineage_report", config=LineageTaskConfig(), parents={"model": model}, work=work
    )
    return LineageReport(**fields)


def _row(depth: int, manifest: Manifest) -> dict[str, object]:
    return {
        "generation": depth,
        "stage": manifest.stage,
        "kind": manifest.kind,
        "content": manifest.content_hash[:16],
        "step": manifest.step or None,  # data and evaluations have none
        "seed": manifest.seed,
        "config": manifest.config_hash[:12],
        "source": manifest.source_digest,
        "parents": ", ".join(parent.content_hash[:8] for parent in manifest.parents),
    }
