"""Stage: the rows that models are measured on, where none are trained on."""

from pathlib import Path

from nemo_rl_core.produce import StageResult
from nemo_rl_core.telemetry.curves import completions_html
from tasks.artifacts import Dataset, DatasetArtifact, Tokenizer
from tasks.platform.decks import records
from tasks.platform.resources import DATA
from tasks.platform.stage import cached_task, make
from tasks.recipes.evaluate import QuestionsTaskConfig


@cached_task(DATA)
def evaluate_questions(config: QuestionsTaskConfig, tokenizer: Tokenizer) -> Dataset:
    """Reads or generates the rows, and refuses bad ones by number.

    `prepare_data` would also read rows to train on, and refuse those that are asked here too.
    """

    def write(folder: Path) -> StageResult:
        from nemo_rl_core.data.datasets import load_validation
        from nemo_rl_core.data.loader import save_frame
        from nemo_rl_core.data.pretrained import load_tokenizer
        from nemo_rl_core.data.schemas import validate_rows

        data = config.questions.data
        rows = load_validation(data, seed=config.questions.seed or 0)
        frame = validate_rows(
            rows,
            tokenizer=load_tokenizer(tokenizer.folder),
            max_prompt_tokens=data.max_prompt_tokens,
            name="validation",
            policy=data,
        )
        save_frame(frame, folder)
        deck = completions_html(records(frame.head(20)))
        return StageResult("dataset", "parquet", f"{len(frame)} questions", deck=deck)

    fields = make(
        __name__, "evaluate_questions", config=config, parents={"tokenizer": tokenizer}, work=write
    )
    return DatasetArtifact(**fields)
