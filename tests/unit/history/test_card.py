"""Model cards, and differences between two artifacts."""

import hashlib
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file

from nemo_rl_core.history.card import inherited_license, model_card
from nemo_rl_core.history.card_evaluations import recorded_evaluations
from nemo_rl_core.history.equality import TensorDifference, compare_artifacts
from nemo_rl_core.store.ancestry import write_ancestors
from nemo_rl_core.store.manifest import Cost, Manifest

FIGURES = {
    "greedy_accuracy": 0.75,
    "greedy_accuracy_low": 0.5,
    "greedy_accuracy_high": 0.9,
    "num_prompts": 40.0,
    "pass_at_4": 0.875,
    "pass_at_4_low": 0.625,
    "pass_at_4_high": 0.9375,
}


def artifact(folder: Path, stage: str, kind: str, *parents: Path, **fields: object) -> Path:
    folder.mkdir()
    refs = tuple(Manifest.read(parent).ref(parent) for parent in parents)
    digest = hashlib.sha256(folder.name.encode()).hexdigest()
    manifest = Manifest(
        kind=kind, format="hf", stage=stage, content_hash=digest, parents=refs, **fields
    )
    manifest.write(folder)
    return folder


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    model = {"model": {"kind": "pretrained", "name": "org/model"}}
    base = artifact(tmp_path / "base", "prepare_model", "checkpoint", config=model)
    data = {"data": {"kind": "hub", "name": "org/rows", "note": "a|b<script>`x`"}}
    rows = artifact(tmp_path / "rows", "prepare_data train", "dataset", config=data)
    return artifact(
        tmp_path / "grpo",
        "grpo_iteration 2",
        "checkpoint",
        base,
        rows,
        weights_hash="ab" * 32,
        step=8,
        seed=3,
        cost=Cost(tokens=1234, wall_seconds=5.0, peak_memory_gib=1.5),
        config={"grpo": {"learning_rate": 0.001}},
        git_commit="c0ffee" * 6,
        git_dirty=True,
    )


@pytest.fixture
def evaluation(tmp_path: Path, trained: Path) -> Path:
    settings = {"evaluation": {"confidence": 0.9}}
    return artifact(
        tmp_path / "evaluation", "evaluate", "evaluation", trained, figures=FIGURES, config=settings
    )


def test_a_card_has_data_training_evaluation_and_lineage(trained: Path, evaluation: Path) -> None:
    card = model_card(trained, evaluations=recorded_evaluations(evaluation))
    _, front, body = card.split("---\n", 2)
    metadata = yaml.safe_load(front)
    assert metadata["library_name"] == "transformers"
    assert metadata["base_model"] == "org/model"
    assert metadata["datasets"] == ["org/rows"]
    assert metadata["tags"] == ["nemo-rl-flow", "grpo"]
    (result,) = metadata["model-index"][0]["results"]
    assert result["dataset"] == {"name": "held-out prompts of org/rows", "type": "org/rows"}
    assert {one["name"]: one["value"] for one in result["metrics"]} == {
        "greedy accuracy": 0.75,
        "pass@4": 0.875,
    }
    assert "license" not in metadata
    assert "License: not recorded" in body
    assert "| **this model** | 0.750 [0.500, 0.900] | 40 |" in body
    assert "| **this model**, pass@4 | 0.875 [0.625, 0.938] | |" in body
    assert "pass@k and cons@k of sampled ones; in brackets" in body
    assert "the interval at 90 %" in body
    assert "**grpo_iteration 2**, seed 3: 1,234 tokens.\n" in body
    assert "| grpo.learning\\_rate | 0.001 |" in body
    assert "`c0ffeec0ff` with changes" in body
    assert "nemo-rl reproduce grpo" in body and "ab" * 32 in body
    # The data cannot end a cell or add markup.
    assert "a\\|b\\<script>\\`x\\`" in body


def test_a_card_has_license_task_limits_curve_and_the_settings_that_matter_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "README.md").write_text("---\nlicense: mit\n---\n# Base\n")
    model = {"model": {"kind": "pretrained", "name": str(tmp_path / "base")}}
    start = artifact(tmp_path / "start", "prepare_model", "checkpoint", config=model)
    data = {"data": {"kind": "file", "train": "data/sums.jsonl"}}
    rows = artifact(tmp_path / "rows", "prepare_data train", "dataset", config=data)
    config = {
        "training": {"compile": False},
        "generation": {"max_new_tokens": 24},
        "environment": {"kind": "function", "target": "my_rewards:number"},
        "grpo": {"learning_rate": 0.001, "overlong": None},
    }
    fields = {"name": "g", "cost": Cost(tokens=7), "config": config}
    last = artifact(tmp_path / "g", "grpo_iteration 1", "checkpoint", start, rows, **fields)
    steps = [{"metrics": {"reward": value, "loss": 9.0}} for value in (0.0, 1.0, 3.5, 7.0)]
    (last / "metrics.jsonl").write_text("\n".join(map(json.dumps, steps)))

    assert inherited_license(last) == "mit"
    card = model_card(last, evaluations=[], license_id="apache-2.0")
    assert yaml.safe_load(card.split("---\n")[1])["license"] == "apache-2.0"
    assert "License: apache-2.0.\n" in card
    assert "with GRPO on sums.jsonl, rewarded by `my_rewards:number`." in card
    assert "Nothing was evaluated; other tasks" in card
    assert "at most 24 tokens" in card
    assert "7 tokens; reward 0 `▁▂▅█` 7.\n" in card
    keys = [
        line.split("|")[1].strip().replace("\\", "") for line in card.splitlines() if "|" in line
    ]
    settings = [key for key in keys if "." in key]
    expected = ["environment.kind", "environment.target", "grpo.learning_rate"]
    assert settings == [*expected, "generation.max_new_tokens", "training.compile"]


def test_training_stages_are_in_order(tmp_path: Path) -> None:
    # The start is the reference of every iteration, so it is a parent of the last one, too.
    cost, config = Cost(tokens=5), {"model": {"kind": "pretrained", "name": "org/model"}}
    base = artifact(tmp_path / "base", "prepare_model", "checkpoint", config=config)
    start = artifact(tmp_path / "sft", "train_sft", "checkpoint", base, cost=cost)
    last = start
    for number in range(1, 12):
        stage, folder = f"grpo_iteration {number}", tmp_path / f"grpo{number}"
        last = artifact(folder, stage, "checkpoint", last, start, cost=cost)
    lines = model_card(last, evaluations=[]).splitlines()
    stages = [line.split("**")[1] for line in lines if line.endswith("5 tokens.")]
    assert stages == ["train_sft", *(f"grpo_iteration {number}" for number in range(1, 12))]


def test_times_and_costs_are_left_out(trained: Path) -> None:
    card = model_card(trained, evaluations=[])
    manifest = Manifest.read(trained)
    cost = Cost(tokens=1234, wall_seconds=7.0, cpu_seconds=9.0, flops=1e9, peak_memory_gib=2.5)
    later = {"cost": cost, "created_at": "2100-01-01T00:00:00+00:00"}
    manifest.model_copy(update=later).write(trained)
    assert model_card(trained, evaluations=[]) == card


def test_evaluation_figures_are_kept_without_the_evaluation(
    tmp_path: Path, trained: Path, evaluation: Path
) -> None:
    promotion = artifact(tmp_path / "promotion", "promote", "promotion", evaluation)
    write_ancestors(evaluation, [trained])
    write_ancestors(promotion, [evaluation])
    here = recorded_evaluations(promotion)
    shutil.rmtree(evaluation)
    shutil.rmtree(trained)
    assert recorded_evaluations(promotion) == here
    (found,) = here
    assert found.accuracy == (0.75, 0.5, 0.9)
    assert (found.num_rows, found.confidence) == (40, 0.9)
    assert found.checkpoint.stage == "grpo_iteration 2"


def test_a_card_without_evaluation_has_a_note(trained: Path) -> None:
    card = model_card(trained, evaluations=[], name="My: model")
    assert "No evaluation of this model is recorded." in card
    assert "model-index" not in card
    assert "# My: model" in card


def with_weights(folder: Path, tensors: dict[str, torch.Tensor], digest: str) -> Path:
    (folder / "model").mkdir(parents=True)
    save_file(tensors, folder / "model" / "model.safetensors")
    Manifest(
        kind="checkpoint", format="hf", stage="s", content_hash=digest, weights_hash=digest
    ).write(folder)
    return folder


def test_differing_tensors_are_named_with_their_difference(tmp_path: Path) -> None:
    tensors = {"a": torch.zeros(4), "b": torch.ones(2, 2)}
    one = with_weights(tmp_path / "one", tensors, "aa" * 32)
    shutil.copytree(one, tmp_path / "same")
    same = compare_artifacts(one, tmp_path / "same")
    assert same.is_bitwise_identical and same.num_tensors == 2 and same.tensors == ()
    changed = {"a": torch.tensor([0.0, 0.5, 0.0, 0.0]), "b": torch.ones(4), "c": torch.ones(1)}
    other = with_weights(tmp_path / "other", changed, "bb" * 32)
    result = compare_artifacts(one, other)
    assert not result.is_bitwise_identical and not result.content and result.weights is False
    by_name = {each.name: each for each in result.tensors}
    assert (by_name["a"].largest, by_name["a"].share) == (0.5, 0.25)
    assert by_name["b"].what == "(2, 2) torch.float32 and (4,) torch.float32"
    assert by_name["c"].what == "only the second has it"


@pytest.mark.parametrize(
    ("before", "after", "far"),
    [(1.0, 1.0 + 2**-23, 2**-23), (0.0, -0.0, 0.0), (1.0, math.nan, math.inf)],
)
def test_one_changed_bit_on_disk_is_detected_despite_an_equal_manifest(
    tmp_path: Path, before: float, after: float, far: float
) -> None:
    weights = torch.full((4,), 7.0)
    folders = []
    for name, value in (("one", before), ("other", after)):
        weights[2] = value
        folders.append(with_weights(tmp_path / name, {"w": weights, "n": weights * math.nan}, "a"))
    result = compare_artifacts(*folders)
    assert (result.is_bitwise_identical, result.content, result.weights) == (False, False, False)
    assert result.tensors == (TensorDifference("w", "differs", far, 0.25),)


@pytest.mark.parametrize("card", [None, "---\nlicense: : x\n---\n", "---\n- a\n---\n", "no block"])
@pytest.mark.parametrize("address", ["base", "s3://bucket/base", "alias:production"])
def test_a_model_without_a_license_has_none(tmp_path: Path, card: str | None, address: str) -> None:
    """A folder without a card, a damaged card, and names of another kind."""
    base = tmp_path / "base"
    base.mkdir()
    if card is not None:
        (base / "README.md").write_text(card)
    name = str(base) if address == "base" else address
    model = {"model": {"kind": "pretrained", "name": name}}
    assert (
        inherited_license(artifact(tmp_path / "a", "prepare_model", "checkpoint", config=model))
        == ""
    )
