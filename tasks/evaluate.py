"""Stage: a checkpoint measured on rows that were never trained on."""

import json
from pathlib import Path

from nemo_rl_core.distributed.session import connect
from nemo_rl_core.infra.curves import completions_html
from nemo_rl_core.infra.files import write_atomic
from nemo_rl_core.infra.produce import Made
from tasks.artifacts import Checkpoint, Dataset, EvalReport, Evaluation
from tasks.experiments.common import EvaluationStage
from tasks.resources import ray_stage
from tasks.stage import cached_task, make


@cached_task(task_config=ray_stage())
def evaluate(config: EvaluationStage, checkpoint: Checkpoint, validation: Dataset) -> Evaluation:
    """Greedy accuracy with its interval, and pass@k."""

    def work(folder: Path) -> Made:
        import pandas as pd

        from nemo_rl_core.evals.evaluate import evaluate as evaluate_model

        result = evaluate_model(
            checkpoint.model_folder,
            validation.folder,
            connect(config.cluster),
            config=config.evaluation,
            settings=config,
        )
        pd.DataFrame(result.rows).to_parquet(folder / "rows.parquet", index=False)
        write_atomic(folder / "metrics.json", json.dumps(result.metrics, indent=1))
        metrics = result.metrics
        summary = (
            f"{checkpoint.stage}: "
            f"greedy accuracy {metrics['greedy_accuracy']:.3f} "
            f"[{metrics['greedy_accuracy_low']:.3f}, {metrics['greedy_accuracy_high']:.3f}]"
        )
        return Made(
            "evaluation",
            "parquet",
            summary,
            num_tokens=result.num_tokens,
            peak_memory_gib=result.peak_memory_gib,
            step=checkpoint.step,
            deck=completions_html([metrics]) + completions_html(result.rows[:40]),
        )

    parents = {"checkpoint": checkpoint, "validation": validation}
    fields = make("evaluate", config=config, parents=parents, work=work)
    metrics = json.loads((Path(fields["directory"].path) / "metrics.json").read_text())
    return EvalReport(**fields, metrics=metrics, measured=checkpoint.stage)
