"""DPO on pairs from a file, with a loss that needs no reference, validated on the way."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Any

pytestmark = pytest.mark.thorough


def write_pairs(path: Path, tens: range) -> str:
    rows = [
        {"prompt": f"{ten}+{one}=", "chosen": str(ten + one), "rejected": str(ten + one + 1)}
        for ten in tens
        for one in range(4)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_dpo_on_pairs_of_a_file_without_a_reference(
    recipe: dict[str, Any], run_recipe: Callable[..., Run], tmp_path: Path
) -> None:
    data = {
        "kind": "file",
        "train": write_pairs(tmp_path / "train.jsonl", range(10, 14)),
        "validation": write_pairs(tmp_path / "validation.jsonl", range(14, 16)),
        "max_prompt_tokens": 16,
    }
    changes = {
        "data": data,
        "pairs": {"kind": "data"},
        "evaluation": {**recipe["evaluation"], "data": recipe["data"]},
        "dpo": {
            "num_steps_per_iteration": 4,
            "num_pairs_per_step": 16,  # all of them, so that losses can be compared
            "learning_rate": 3e-3,
            "validate_every_num_steps": 2,
            "loss": {"kind": "simpo"},
        },
    }
    shared = {key: recipe[key] for key in ("model", "generation", "cluster")}
    run = run_recipe({**shared, **changes}, tmp_path / "store", ("dpo", "dpo"))
    assert run.exit_code == 0, run.output[-3000:]
    assert "cache_reference_logprobs" not in run.output
    steps = run.metrics("dpo_iteration 1")
    assert steps[-1]["loss"] < steps[0]["loss"]
    validated = [step["global_step"] for step in steps if "validation_loss" in step]
    assert validated == [2, 4]
    assert "accuracy of dpo_iteration 1:" in run.output
