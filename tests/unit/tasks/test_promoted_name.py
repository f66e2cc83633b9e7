"""The alias that a recipe names moves only to promoted models."""

from pathlib import Path

import pytest

from nemo_rl_core.config.evaluation import PromotionConfig
from nemo_rl_core.evals.rows import save_eval_rows
from nemo_rl_core.produce import StageResult
from nemo_rl_core.store.aliases import Aliases
from nemo_rl_core.store.store import Store
from tasks.artifacts import CheckpointArtifact, EvalReport
from tasks.promote import promote
from tasks.recipes.common import PromotionTaskConfig
from tasks.stage.stage import make
from tests.unit.tasks.test_export import Seed, checkpoint

NUMERICS_VERSION = 1
NUM_PROMPTS = 12


def report(num_right: int) -> EvalReport:
    """An evaluation with this number of right answers."""

    def work(folder: Path) -> StageResult:
        rows = [
            {
                "prompt_id": str(prompt),
                "mode": "greedy",
                "sample": 0,
                "category": "",
                "prompt": f"{prompt}+0=",
                "completion": str(prompt),
                "answer": str(prompt),
                "extracted": str(prompt),
                "reward": float(prompt < num_right),
                "correct": prompt < num_right,
                "truncated": False,
                "error": "",
            }
            for prompt in range(NUM_PROMPTS)
        ]
        save_eval_rows(rows, folder / "rows.parquet")
        return StageResult("evaluation", "parquet")

    fields = make(__name__, "evaluate", config=Seed(seed=num_right), parents={}, work=work)
    return EvalReport(**fields, metrics={}, measured="grpo_iteration")


def promoted(
    candidate: CheckpointArtifact, *, num_right: int, name: str | None = "production"
) -> bool:
    decision = promote.task_function(
        config=PromotionTaskConfig(promotion=PromotionConfig(name=name), confidence=0.95),
        incumbent=checkpoint("prepare_model", 1),
        candidate=candidate,
        before=report(0),
        after=report(num_right),
    )
    return bool(decision.promoted)


def test_an_alias_moves_to_a_promoted_candidate(own_store: Path) -> None:
    aliases = Aliases(Store.default())
    first, second = checkpoint("grpo_iteration", 2), checkpoint("grpo_iteration", 3)
    assert not promoted(first, num_right=1)
    assert aliases.names() == []
    assert promoted(first, num_right=NUM_PROMPTS, name=None)
    assert aliases.names() == []
    assert promoted(first, num_right=NUM_PROMPTS)
    assert Path(aliases.located("production")) == first.model_folder
    assert promoted(second, num_right=NUM_PROMPTS)
    assert Path(aliases.located("production")) == second.model_folder
    # From the cache: another model may have the name by now.
    assert promoted(first, num_right=NUM_PROMPTS)
    assert Path(aliases.located("production")) == second.model_folder


@pytest.mark.parametrize("name", ["Production", "", "a/b"])
def test_a_name_that_no_alias_can_have_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="name"):
        PromotionConfig(name=name)
