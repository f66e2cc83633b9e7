"""Stage: logprobs of every pair under the reference policy, computed once.

It depends only on the reference's weights and the pairs' tokens, and not on the training that
follows: a run with another learning rate, beta or batch size finds it in the cache.
"""

from pathlib import Path

from nemo_rl_core.distributed.session import connect
from nemo_rl_core.produce import StageResult
from tasks.artifacts import Checkpoint, Dataset, LogprobArtifact, Logprobs
from tasks.pods.resources import SCORE
from tasks.recipes.pairs import ReferenceTaskConfig
from tasks.stage.stage import cached_task, make

NUMERICS_VERSION = 1


@cached_task(SCORE)
def cache_reference_logprobs(
    config: ReferenceTaskConfig, reference: Checkpoint, pairs: Dataset
) -> Logprobs:
    """Makes one forward pass over all pairs."""

    def work(folder: Path) -> StageResult:
        from nemo_rl_core.algorithms.dpo.reference import reference_logprobs
        from nemo_rl_core.data.pairs import save_logprobs

        scored = reference_logprobs(
            reference.model_folder, pairs.folder, connect(config.cluster), settings=config
        )
        save_logprobs(scored, folder)
        return StageResult("logprobs", "parquet", f"{len(scored)} pairs")

    parents = {"reference": reference, "pairs": pairs}
    fields = make(__name__, "cache_reference_logprobs", config=config, parents=parents, work=work)
    return LogprobArtifact(**fields)
