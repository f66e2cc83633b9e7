"""A file with changed content is a different input."""

from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_core.config.multi_turn import RetrieverTool, ToolUse
from nemo_rl_core.config.single_turn import RewardFunction
from nemo_rl_core.environments.contents import reward_content
from nemo_rl_core.store.manifest import config_hash
from tasks.plan_tasks.grpo import plan_grpo
from tasks.recipes.grpo import GRPORecipe

STAGES = ("model", "data", "sft", "grpo", "num_iterations", "evaluation")


def hashes(recipe: dict[str, Any]) -> dict[str, str]:
    stages = plan_grpo(config=GRPORecipe.model_validate(recipe))
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


HELPERS = {
    "my_scores.py": "from my_helpers import sign\nimport my_package.inner, json\n",
    "my_helpers.py": "def sign(x): return x\n",
    "my_package/__init__.py": "",
    "my_package/inner.py": "from . import sibling\nfrom .words import LIST\n",
    "my_package/sibling.py": "import my_helpers  # a circle is allowed\n",
    "my_package/words.py": (
        "from pathlib import Path\nLIST = Path(__file__).with_name('list.txt').read_text()\n"
    ),
    "my_package/list.txt": "one",
    "my_package/unused.py": "",
}


@pytest.mark.parametrize(
    ("changed", "text", "counts"),
    [
        ("my_helpers.py", "def sign(x): return -x\n", True),
        ("my_package/__init__.py", "ONE = 1\n", True),
        ("my_package/inner.py", HELPERS["my_package/inner.py"] + "TWO = 2\n", True),
        ("my_package/sibling.py", "", True),
        ("my_package/words.py", "LIST = []\n", True),
        ("my_package/list.txt", "two", True),
        ("my_package/unused.py", "THREE = 3\n", False),
        ("my_helpers.py", "# A remark.\n\ndef sign(x):\n    return x\n", False),
    ],
)
def test_imports_of_a_reward_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str, text: str, counts: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_package").mkdir()
    for name, content in HELPERS.items():
        (tmp_path / name).write_text(content)
    environment = RewardFunction(target="my_scores:score")
    before = reward_content(environment)
    assert len(before.split()) == 6
    (tmp_path / changed).write_text(text)
    assert (reward_content(environment) != before) == counts


def test_packages_that_a_reward_imports_count_by_their_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_yaml_reward.py").write_text("import json\nfrom yaml import safe_load\n")
    words = reward_content(RewardFunction(target="my_yaml_reward:score")).split()
    assert f"PyYAML=={metadata.version('pyyaml')}" in words
    assert len(words) == 2


def test_a_changed_file_of_a_folder_reaches_the_data_stage(tmp_path: Path) -> None:
    for part in ("train", "validation"):
        (tmp_path / part).mkdir()
        (tmp_path / part / "0.jsonl").write_text("1")
    data = {"kind": "file", **{part: str(tmp_path / part) for part in ("train", "validation")}}
    before = hashes({"data": data})
    (tmp_path / "train" / "1.jsonl").write_text("2")
    after = hashes({"data": data})
    assert {stage for stage in STAGES if before[stage] != after[stage]} == {"data"}


def test_a_changed_file_of_a_mixture_reaches_the_data_stage(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text("1")
    files = [{"kind": "file", "train": str(tmp_path / f"{name}.jsonl")} for name in "ab"]
    data = {"kind": "mixture", "sources": [{"data": file} for file in files]}
    before = hashes({"data": data})
    (tmp_path / "b.jsonl").write_text("2")
    after = hashes({"data": data})
    assert {stage for stage in STAGES if before[stage] != after[stage]} == {"data"}
    # How columns are read and which rows are drawn counts as well.
    files[0]["answer_pattern"] = "boxed"
    assert hashes({"data": data})["data"] != after["data"]
    assert hashes({"data": data, "seed": 1})["data"] != hashes({"data": data})["data"]


def test_a_hub_data_set_is_known_by_name_and_revision() -> None:
    one, other = ({"kind": "hub", "name": "a/b", "revision": word} for word in ("v1", "v2"))
    assert plan_grpo(config=GRPORecipe.model_validate({"data": one})).data.content == ""
    assert hashes({"data": one})["data"] != hashes({"data": other})["data"]


def test_missing_files_have_no_content() -> None:
    stages = plan_grpo(
        config=GRPORecipe.model_validate(
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
