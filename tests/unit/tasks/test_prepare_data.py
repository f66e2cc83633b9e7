"""A recipe with published data sets, up to the rows that training reads."""

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

RECIPE = """
model: {{kind: text_from_config}}
data:
  kind: mixture
  sources:
    - {{weight: 2, data: {{kind: file, train: {gsm8k}, validation_fraction: 0.2, task: school}}}}
    - weight: 1
      data:
        kind: file
        train: {verl}
        validation_fraction: 0.2
        columns: {{question: prompt, reward_model.ground_truth: answer}}
        drop_columns: [images]
"""

SCRIPT = """
import sys, json, yaml
from nemo_rl_core.data.loader import load_records
from nemo_rl_core.store.manifest import Manifest
from tasks.evaluate_questions import evaluate_questions
from tasks.prepare_data import prepare_data
from tasks.prepare_model import prepare_model
from tasks.recipes.common import DataTaskConfig, ModelTaskConfig
from tasks.recipes.verdict import QuestionsTaskConfig
from tasks.recipes.sft import SFTRecipe

recipe = SFTRecipe.model_validate(yaml.safe_load(sys.argv[1]))
tokenizer = prepare_model(config=ModelTaskConfig.of(recipe)).tokenizer
made = prepare_data(config=DataTaskConfig.of(recipe), tokenizer=tokenizer)
config = QuestionsTaskConfig(questions=DataTaskConfig.of(recipe))
questions = evaluate_questions(config=config, tokenizer=tokenizer)
print(json.dumps({
    "read_as": Manifest.read(made.train.folder).config["read_as"],
    "questions_read_as": Manifest.read(questions.folder).config["questions"]["read_as"],
    "train": load_records(made.train.folder),
    "validation": load_records(made.validation.folder),
}))
"""


@pytest.mark.slow
def test_a_recipe_of_published_sets_gives_rows(tmp_path: Path, python: Callable[..., str]) -> None:
    gsm8k = [{"question": f"{n}+1=", "answer": f"one more\n#### {n + 1}"} for n in range(20)]
    verl = [
        {
            "question": f"{n}+2=",
            "reward_model": {"ground_truth": str(n + 2), "style": "rule"},
            "images": [] if n else ["a.png"],
        }
        for n in range(10)
    ]
    for name, rows in (("gsm8k", gsm8k), ("verl", verl)):
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"{name}.parquet")
    recipe = RECIPE.format(gsm8k=tmp_path / "gsm8k.parquet", verl=tmp_path / "verl.parquet")
    made = json.loads(python(SCRIPT, recipe).splitlines()[-1])
    assert made["read_as"].startswith("0: gsm8k: prompts with answers after ####")
    assert made["read_as"].endswith("1: prompts with answers")
    assert made["questions_read_as"] == made["read_as"]
    # 16 and 8 rows are left to train on, and the weights take two of one for each of the other.
    assert sorted(row["task"] for row in made["train"]) == ["file"] * 8 + ["school"] * 16
    assert len(made["validation"]) == 6
    for row in made["train"] + made["validation"]:
        one, other = map(int, row["prompt"].rstrip("=").split("+"))
        assert row["answer"] == str(one + other)
