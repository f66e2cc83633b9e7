"""Stage: the preference rows of a data set as token sequences."""

from pathlib import Path

from nemo_rl_core.config.base import FrozenConfig
from nemo_rl_core.produce import StageResult
from tasks.artifacts import Dataset, DatasetArtifact, Tokenizer
from tasks.pods.resources import DATA
from tasks.stage.stage import cached_task, make

NUMERICS_VERSION = 1


class TokenizeTaskConfig(FrozenConfig):
    """Config of `tokenize_pairs`, which reads nothing but its rows and the tokenizer."""


@cached_task(DATA)
def tokenize_pairs(tokenizer: Tokenizer, rows: Dataset) -> Dataset:
    """Renders every pair with the model's chat template, and masks everything but the answers."""

    def work(folder: Path) -> StageResult:
        from nemo_rl_core.data.pairs import save_pairs, tokenized_pairs
        from nemo_rl_core.data.pretrained import load_tokenizer

        pairs = tokenized_pairs(rows.folder, load_tokenizer(tokenizer.folder))
        save_pairs(pairs, folder)
        return StageResult("pairs", "parquet", f"{len(pairs)} pairs")

    parents = {"tokenizer": tokenizer, "rows": rows}
    fields = make(
        __name__, "tokenize_pairs", config=TokenizeTaskConfig(), parents=parents, work=work
    )
    return DatasetArtifact(**fields)
