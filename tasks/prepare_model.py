"""Stage: the model a run starts from, and its tokenizer."""

import shutil
from pathlib import Path
from typing import NamedTuple

from nemo_rl_core.converters.materialize import materialize
from nemo_rl_core.environments.contents import commit_in
from nemo_rl_core.produce import StageResult
from tasks.artifacts import Checkpoint, CheckpointArtifact, Tokenizer, TokenizerArtifact
from tasks.pods.resources import WEIGHTS
from tasks.recipes.common import ModelTaskConfig
from tasks.stage.stage import cached_task, make

NUMERICS_VERSION = 1


class PreparedModel(NamedTuple):
    """The first checkpoint and the tokenizer; data depend on the tokenizer only."""

    base: Checkpoint
    tokenizer: Tokenizer


@cached_task(WEIGHTS)
def prepare_model(config: ModelTaskConfig) -> PreparedModel:
    """Brings the model into the store, in the transformers layout."""

    def write_model(folder: Path) -> StageResult:
        shutil.rmtree(folder / "model", ignore_errors=True)
        count = materialize(
            config.model, folder / "model", seed=config.seed, commit=commit_in(config.content)
        )
        summary = f"{config.model.name}, {count / 1e6:.2f} M parameters"
        return StageResult("checkpoint", "hf", summary, step=0)

    base = CheckpointArtifact(
        **make(__name__, "prepare_model", config=config, parents={}, work=write_model)
    )

    def write_tokenizer(folder: Path) -> StageResult:
        for file in sorted(base.model_folder.iterdir()):
            if not file.name.endswith((".safetensors", ".index.json")):
                shutil.copy(file, folder)
        return StageResult("tokenizer", "hf")

    tokenizer = TokenizerArtifact(
        **make(__name__, "tokenizer", config=config, parents={"base": base}, work=write_tokenizer)
    )
    return PreparedModel(base, tokenizer)
