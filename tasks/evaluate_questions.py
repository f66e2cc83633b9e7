"""Stage: the rows that models are measured on, where none are trained on."""

from pathlib import Path

from nemo_rl_core.config.data import source_of
from nemo_rl_core.environments.contents import refuse_changed
from nemo_rl_core.produce import StageResult
from nemo_rl_core.telemetry.curves import completions_html
from nemo_rl_core.telemetry.decks import records
from tasks.artifacts import Dataset, DatasetArtifact, Tokenizer
from tasks.platform.resources import DATA
from tasks.platform.stage import cached_task, make
from tasks.recipes.evaluate import QuestionsTaskConfig

NUMERICS_VERSION = 1


@cached_task(DATA)
def evaluate_questions(config: QuestionsTaskConfig, tokenizer: Tokenizer) -> Dataset:
    """Reads or generates the rows, and refuses bad ones by number.

    `prepare_data` would also read rows to train on, and refuse those that are asked here too.
    """

    from nemo_rl_core.data.datasets import recognised_validation
    from nemo_rl_core.data.loader import save_rows
    from nemo_rl_core.data.pretrained import load_tokenizer
    from nemo_rl_core.data.schemas import checked_rows

    data = config.questions.data
    found = recognised_validation(data, seed=config.questions.seed or 0)
    refuse_changed(data, config.questions.content)

    def write(folder: Path) -> StageResult:
        rows = checked_rows(
            found.rows,
            tokenizer=load_tokenizer(tokenizer.folder),
            max_prompt_tokens=data.max_prompt_tokens,
            name="validation",
            source=source_of(data, "validation"),
            policy=data,
        )
        save_rows(rows, folder)
        deck = completions_html(records(rows.head(20)))
        return StageResult("dataset", "parquet", f"{len(rows)} questions", deck=deck)

    fields = make(
        __name__,
        "evaluate_questions",
        config=config.replace(questions=config.questions.replace(read_as=found.read_as)),
        parents={"tokenizer": tokenizer},
        work=write,
    )
    return DatasetArtifact(**fields)
