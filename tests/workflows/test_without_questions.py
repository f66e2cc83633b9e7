"""SFT on conversations and DPO on pairs, with data that have no questions to evaluate."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_core.store.files import hash_file

Run = Any

pytestmark = pytest.mark.thorough


def written(path: Path, rows: list[dict[str, Any]]) -> dict[str, Any]:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"kind": "file", "train": str(path)}


def exports(run: Run, stage: str) -> None:
    """Asserts that the folder printed as `model:` has the weights that the stage trained."""
    folders = [run.artifact(stage) / "model", Path(run.value("model:"))]
    start = run.artifact("prepare_model") / "model"
    trained, exported, began = (hash_file(f / "model.safetensors") for f in (*folders, start))
    assert trained == exported != began
    assert run.value("exported:") == f"the trained model ({stage})"


def test_sft_on_conversations_ends_with_the_held_out_loss(
    recipe: dict[str, Any], run_recipe: Callable[..., Run], tmp_path: Path
) -> None:
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"say {number}"},
                {"role": "assistant", "content": f"{number} {number}"},
            ]
        }
        for number in range(60)
    ]
    words = {
        "model": {**recipe["model"], "kind": "text_from_config"},
        "data": written(tmp_path / "rows.jsonl", rows),
        "sft": recipe["sft"],
        "cluster": recipe["cluster"],
    }
    run = run_recipe(words, tmp_path / "store", ("sft", "sft"))
    assert run.exit_code == 0, run.output[-3000:]
    stages = ["prepare_model", "prepare_data", "train_sft", "export", "lineage_report"]
    assert run.stages("ran") == stages
    assert "no answers are evaluated: the data are conversations (messages)" in run.output
    last = run.metrics("train_sft")[-1]["validation_loss"]
    assert run.value("validation loss of train_sft:") == f"{last:.3f}"
    exports(run, "train_sft")


def test_dpo_on_pairs_is_judged_by_held_out_pairs(
    recipe: dict[str, Any], run_recipe: Callable[..., Run], tmp_path: Path
) -> None:
    # The rejected answer is always 7, so that held-out pairs can be learnt, too.
    rows = [
        {"prompt": f"{ten}+{one}=", "chosen": str(ten + one), "rejected": "7"}
        for ten in range(10, 20)
        for one in range(6)
    ]
    words = {
        "model": recipe["model"],
        "data": {**written(tmp_path / "rows.jsonl", rows), "validation_fraction": 0.3},
        "pairs": {"kind": "data"},
        "dpo": {"num_steps_per_iteration": 20, "num_pairs_per_step": 16, "learning_rate": 3e-3},
        "cluster": recipe["cluster"],
    }
    run = run_recipe(words, tmp_path / "store", ("dpo", "dpo"))
    assert run.exit_code == 0, run.output[-3000:]
    assert "held-out pairs give the verdict" in run.output
    assert run.value("pair accuracy of dpo_iteration 1:").startswith("1.000 [0.824, 1.000] on 18")
    assert run.value("promoted:").startswith("+50.0 points")
    decision = json.loads((run.artifact("promote") / "decision.json").read_text())
    assert (decision["promoted"], decision["gained"], decision["lost"]) == (True, 18, 0)
    assert decision["p_value"] == 2 / 2**18
    exports(run, "dpo_iteration 1")
