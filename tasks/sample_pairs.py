"""Stage: preference pairs from the policy's own scored completions."""

from pathlib import Path

from nemo_rl_core.distributed.session import connect
from nemo_rl_core.produce import StageResult
from tasks.artifacts import Checkpoint, Dataset, DatasetArtifact
from tasks.pods.resources import GENERATE
from tasks.recipes.pairs import PairTaskConfig
from tasks.stage.stage import cached_task, make

NUMERICS_VERSION = 1


@cached_task(GENERATE)
def sample_pairs(
    config: PairTaskConfig, checkpoint: Checkpoint, prompts: Dataset, iteration: int
) -> Dataset:
    """Samples, scores, and keeps the best and the worst completion of each prompt."""

    def work(folder: Path) -> StageResult:
        from nemo_rl_core.data.pairs import save_pairs
        from nemo_rl_core.rollouts.pairs import sample_pairs as sample

        sampled = sample(
            checkpoint.model_folder,
            prompts.folder,
            connect(config.cluster),
            settings=config,
            num_generations_per_prompt=config.pairs.num_generations_per_prompt,
            margin=config.pairs.margin,
            iteration=iteration,
        )
        save_pairs(sampled.pairs, folder)
        summary = f"{len(sampled.pairs)} pairs of {sampled.num_prompts} prompts"
        if sampled.num_failed_rollouts:
            summary += f", {sampled.num_failed_rollouts} completions could not be scored"
        return StageResult(
            "pairs",
            "parquet",
            summary,
            num_tokens=sampled.num_tokens,
            peak_memory_gib=sampled.peak_memory_gib,
        )

    parents = {"checkpoint": checkpoint, "prompts": prompts}
    fields = make(
        __name__, "sample_pairs", config=config, parents=parents, work=work, part=str(iteration)
    )
    return DatasetArtifact(**fields)
