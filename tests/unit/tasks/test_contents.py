"""A file that changes under its name is another input."""

from pathlib import Path
from typing import Any

import pytest

from nemo_rl_core.config.environment import RetrieverTool, ToolUse
from nemo_rl_core.infra.lineage import config_hash
from tasks.contents import reward_content
from tasks.experiments.grpo import GRPOExperiment, plan_grpo

STAGES = ("model", "data", "sft", "grpo", "num_iterations", "evaluation", "promotion")


def hashes(recipe: dict[str, Any]) -> dict[str, str]:
    stages = plan_grpo(config=GRPOExperiment.model_validate(recipe))
    return {stage: config_hash(getattr(stages, stage)) for stage in STAGES}


@pytest.mark.parametrize(
    ("changed_file", "stages"),
    [
        ("train.jsonl", {"data"}),
        ("validation.jsonl", {"data"}),
        ("model/model.safetensors", {"model"}),
        ("model/tokenizer.json", {"model"}),
        ("my_reward_module.py", {"grpo", "evaluation"}),
        ("something_else.txt", set()),
    ],
)
def test_a_changed_file_reaches_the_stages_that_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed_file: str, stages: set[str]
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "model").mkdir()
    names = ["train.jsonl", "validation.jsonl", "my_reward_module.py", "something_else.txt"]
    for name in [*names, "model/model.safetensors", "model/tokenizer.json"]:
        (tmp_path / name).write_text("1")
    recipe = {
        "model": {"name": str(tmp_path / "model")},
        "data": {
            "kind": "file",
            "train": str(tmp_path / "train.jsonl"),
            "validation": str(tmp_path / "validation.jsonl"),
        },
        "environment": {"kind": "function", "target": "my_reward_module:reward"},
    }
    before = hashes(recipe)
    assert hashes(recipe) == before
    (tmp_path / changed_file).write_text("2")
    after = hashes(recipe)
    assert {stage for stage in STAGES if before[stage] != after[stage]} == stages


def test_a_changed_file_of_a_folder_reaches_the_data_stage(tmp_path: Path) -> None:
    for part in ("train", "validation"):
        (tmp_path / part).mkdir()
        (tmp_path / part / "0.jsonl").write_text("1")
    data = {"kind": "file", **{part: str(tmp_path / part) for part in ("train", "validation")}}
    before = hashes({"data": data})
    (tmp_path / "train" / "1.jsonl").write_text("2")
    after = hashes({"data": data})
    assert {stage for stage in STAGES if before[stage] != after[stage]} == {"data"}


def test_a_hub_data_set_is_known_by_name_and_revision() -> None:
    one, other = ({"kind": "hub", "name": "a/b", "revision": word} for word in ("v1", "v2"))
    assert plan_grpo(config=GRPOExperiment.model_validate({"data": one})).data.content == ""
    assert hashes({"data": one})["data"] != hashes({"data": other})["data"]


def test_names_of_what_is_not_here_have_no_content() -> None:
    stages = plan_grpo(
        config=GRPOExperiment.model_validate(
            {
                "model": {"name": "organization/model"},
                "data": {"kind": "file", "train": "no.jsonl", "validation": "no.jsonl"},
                "environment": {"kind": "function", "target": "no_such_module.below:reward"},
            }
        )
    )
    assert stages.model.content == stages.grpo.reward_content == ""
    assert stages.data.content.strip() == ""


def test_a_retrievers_file_counts(tmp_path: Path) -> None:
    facts = tmp_path / "facts.txt"
    environment = ToolUse(tools=[RetrieverTool(path=str(facts))])
    facts.write_text("Paris is in France")
    before = reward_content(environment)
    facts.write_text("Paris is in Texas")
    assert before != reward_content(environment)
    assert reward_content(ToolUse()) == ""
