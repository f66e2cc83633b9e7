"""Stage: the rows that models are evaluated on, if the data has none."""

from collections.abc import Sequence
from pathlib import Path

from nemo_rl_core.config.data import source_of
from nemo_rl_core.environments.contents import refuse_changed
from nemo_rl_core.errors import DataError
from nemo_rl_core.produce import StageResult
from nemo_rl_core.telemetry.curves import completions_html
from nemo_rl_core.telemetry.decks import records
from nemo_rl_core.types import Row
from tasks.artifacts import Dataset, DatasetArtifact, Tokenizer
from tasks.pods.resources import DATA
from tasks.recipes.verdict import QuestionsTaskConfig
from tasks.stage.stage import cached_task, make

NUMERICS_VERSION = 1


@cached_task(DATA)
def evaluate_questions(config: QuestionsTaskConfig, tokenizer: Tokenizer) -> Dataset:
    """Reads or generates the rows, and refuses bad ones by number.

    `prepare_data` would also read rows to train on, and refuse those that are also questions.
    """

    from nemo_rl_core.data.datasets import recognized_validation
    from nemo_rl_core.data.loader import save_rows
    from nemo_rl_core.data.pretrained import load_tokenizer
    from nemo_rl_core.data.schemas import checked_rows

    data = config.questions.data
    recognized = recognized_validation(data, seed=config.questions.seed or 0)
    _refuse_unanswerable(recognized.rows)
    refuse_changed(data, config.questions.content)

    def write(folder: Path) -> StageResult:
        rows = checked_rows(
            recognized.rows,
            tokenizer=load_tokenizer(tokenizer.folder),
            max_prompt_tokens=data.max_prompt_tokens,
            name="validation",
            source=source_of(data, "validation"),
            policy=data,
        )
        save_rows(rows, folder)
        deck = completions_html(records(rows.slice(0, 20).to_pandas()))
        return StageResult("dataset", "parquet", f"{len(rows)} questions", deck=deck)

    fields = make(
        __name__,
        "evaluate_questions",
        config=config.replace(questions=config.questions.replace(read_as=recognized.read_as)),
        parents={"tokenizer": tokenizer},
        work=write,
    )
    return DatasetArtifact(**fields)


def _refuse_unanswerable(rows: Sequence[Row]) -> None:
    from nemo_rl_core.data.row_kinds import described_kind, kind_of_row

    if rows and (kind := kind_of_row(rows[0])) not in ("prompts", "lone_prompts"):
        raise DataError(
            f"the questions of an evaluation are {described_kind(kind)}, which cannot be answered",
            expected="rows with the columns prompt and answer",
            got=f"the columns {', '.join(rows[0])}",
            fix="name a data set of questions: evaluation.data in a recipe that trains, data in "
            "one that evaluates",
        )
