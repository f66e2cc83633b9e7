"""Stage: the effect of preference training on pairs that it has not seen."""

import json
from pathlib import Path

from nemo_rl_core.produce import StageResult
from nemo_rl_core.store.files import write_atomic
from nemo_rl_core.telemetry.curves import completions_html
from nemo_rl_core.telemetry.decks import with_interval
from tasks.artifacts import Checkpoint, Dataset, EvalReport, Evaluation, Logprobs
from tasks.pods.resources import DATA
from tasks.recipes.verdict import PairEvaluationTaskConfig
from tasks.stage.stage import cached_task, make

NUMERICS_VERSION = 1
_ROWS_SHOWN = 40


@cached_task(DATA)
def evaluate_pairs(
    config: PairEvaluationTaskConfig,
    checkpoint: Checkpoint,
    pairs: Dataset,
    start: Logprobs,
    trained: Logprobs,
) -> Evaluation:
    """Computes the share of held-out pairs whose chosen completion gained on the rejected one."""

    def work(folder: Path) -> StageResult:
        import pandas as pd

        from nemo_rl_core.data.frames import check_frame
        from nemo_rl_core.data.loader import load_records
        from nemo_rl_core.data.pairs import load_pairs
        from nemo_rl_core.data.pretrained import load_tokenizer
        from nemo_rl_core.data.record_frames import PairEvalSchema
        from nemo_rl_core.evals.comparison import pair_metrics, pair_scores

        logprobs = [load_records(each.folder) for each in (start, trained)]
        tokenizer = load_tokenizer(checkpoint.model_folder)
        rows = [
            {
                **scores,
                "chosen": tokenizer.decode(pair.chosen.token_ids, skip_special_tokens=True),
                "rejected": tokenizer.decode(pair.rejected.token_ids, skip_special_tokens=True),
            }
            for pair, scores in zip(
                load_pairs(pairs.folder, tokenizer),
                pair_scores(*logprobs, per_token=config.per_token),
                strict=True,
            )
        ]
        metrics = pair_metrics(rows, confidence=config.confidence)
        frame = pd.DataFrame(rows)
        check_frame(PairEvalSchema, frame, name="scored pairs")
        frame.to_parquet(folder / "rows.parquet", index=False)
        write_atomic(folder / "metrics.json", json.dumps(metrics, indent=1))
        return StageResult(
            "evaluation",
            "parquet",
            f"{checkpoint.stage}: pair accuracy {with_interval(metrics, 'accuracy')}, "
            f"mean margin {metrics['margin']:+.3f} nats",
            step=checkpoint.step,
            deck=completions_html([metrics]) + completions_html(rows[:_ROWS_SHOWN]),
            figures=metrics,
        )

    parents = {"checkpoint": checkpoint, "pairs": pairs, "start": start, "trained": trained}
    fields = make(__name__, "evaluate_pairs", config=config, parents=parents, work=work)
    metrics = json.loads((Path(fields["directory"].path) / "metrics.json").read_text())
    return EvalReport(**fields, metrics=metrics, measured=checkpoint.stage)
