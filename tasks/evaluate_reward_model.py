"""Stage: a reward model measured on pairs that it was not trained on."""

import json
from pathlib import Path

from nemo_rl_core.distributed.session import connect
from nemo_rl_core.produce import StageResult
from nemo_rl_core.store.files import write_atomic
from nemo_rl_core.telemetry.curves import completions_html
from tasks.artifacts import Checkpoint, Dataset, EvalReport, Evaluation
from tasks.pods.resources import SCORE
from tasks.recipes.reward_model import RewardModelEvaluationTaskConfig
from tasks.stage.stage import cached_task, make

NUMERICS_VERSION = 1


@cached_task(SCORE)
def evaluate_reward_model(
    config: RewardModelEvaluationTaskConfig, checkpoint: Checkpoint, pairs: Dataset
) -> Evaluation:
    """Computes the share of pairs that the reward model ranks correctly, with its interval."""

    def work(folder: Path) -> StageResult:
        import pandas as pd

        from nemo_rl_core.data.frames import check_frame
        from nemo_rl_core.data.record_frames import PairEvalSchema
        from nemo_rl_core.evals.reward_model import evaluate_reward_model as evaluate

        result = evaluate(
            checkpoint.model_folder,
            pairs.folder,
            connect(config.cluster),
            settings=config,
            confidence=config.confidence,
        )
        frame = pd.DataFrame(result.rows)
        check_frame(PairEvalSchema, frame, name="scored pairs")
        frame.to_parquet(folder / "rows.parquet", index=False)
        write_atomic(folder / "metrics.json", json.dumps(result.metrics, indent=1))
        metrics = result.metrics
        summary = (
            f"accuracy {metrics['accuracy']:.3f} "
            f"[{metrics['accuracy_low']:.3f}, {metrics['accuracy_high']:.3f}]"
        )
        deck = completions_html([metrics]) + completions_html(result.rows[:40])
        return StageResult(
            "evaluation",
            "parquet",
            summary,
            step=checkpoint.step,
            deck=deck,
            figures=metrics,
        )

    parents = {"checkpoint": checkpoint, "pairs": pairs}
    fields = make(__name__, "evaluate_reward_model", config=config, parents=parents, work=work)
    metrics = json.loads((Path(fields["directory"].path) / "metrics.json").read_text())
    return EvalReport(**fields, metrics=metrics, measured=checkpoint.stage)
