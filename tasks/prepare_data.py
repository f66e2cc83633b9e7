"""Stage: rows, checked before any worker starts."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from nemo_rl_core.config.data import source_of
from nemo_rl_core.environments.contents import refuse_changed
from nemo_rl_core.produce import StageResult
from nemo_rl_core.telemetry.curves import completions_html
from nemo_rl_core.telemetry.decks import records
from nemo_rl_core.types import Row
from tasks.artifacts import Dataset, DatasetArtifact, Tokenizer
from tasks.pods.resources import DATA
from tasks.recipes.common import DataTaskConfig
from tasks.stage.stage import cached_task, make

NUMERICS_VERSION = 1


class PreparedData(NamedTuple):
    """Rows to train on, and rows that are never trained on."""

    train: Dataset
    validation: Dataset


@cached_task(DATA)
def prepare_data(config: DataTaskConfig, tokenizer: Tokenizer) -> PreparedData:
    """Reads or generates the rows, and refuses bad ones by number."""
    from nemo_rl_core.data.chunks import column_names
    from nemo_rl_core.data.datasets import load_parts
    from nemo_rl_core.data.frames import row_kind
    from nemo_rl_core.data.loader import save_rows
    from nemo_rl_core.data.pretrained import context_length, load_tokenizer
    from nemo_rl_core.data.row_kinds import kind_of_row
    from nemo_rl_core.data.schemas import check_disjoint, checked_rows

    parts = load_parts(config.data, seed=config.seed or 0)
    refuse_changed(config.data, config.content)
    train, validation = parts.train, parts.validation or []
    recorded = config.replace(read_as=parts.read_as)

    def is_trained_on(rows: Sequence[Row]) -> bool:
        if row_kind(column_names(rows)) != "prompts":
            return True
        return config.completions_are_trained and any(row.get("completion") for row in rows[:1])

    def artifact(name: str, rows: Sequence[Row]) -> DatasetArtifact:
        def write(folder: Path) -> StageResult:
            checked = checked_rows(
                rows,
                tokenizer=load_tokenizer(tokenizer.folder),
                max_prompt_tokens=config.data.max_prompt_tokens,
                name=name,
                source=source_of(config.data, name),
                policy=config.data,
                context_length=context_length(tokenizer.folder) if is_trained_on(rows) else None,
            )
            save_rows(checked, folder)
            deck = completions_html(records(checked.slice(0, 20).to_pandas()))
            dropped = f", {len(rows) - len(checked)} dropped" if len(checked) < len(rows) else ""
            return StageResult(
                "dataset", "parquet", f"{name} {len(checked)} rows{dropped}", deck=deck
            )

        fields = make(
            __name__,
            "prepare_data",
            config=recorded,
            parents={"tokenizer": tokenizer},
            work=write,
            part=name,
        )
        return DatasetArtifact(**fields, row_kind=kind_of_row(rows[0]))

    check_disjoint(train, validation)
    return PreparedData(artifact("train", train), artifact("validation", validation))
