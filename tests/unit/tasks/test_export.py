"""The exported model of a run: the trained one, or the one that the verdict names."""

import json
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_core.config.base import FrozenConfig
from nemo_rl_core.config.export import ExportConfig
from nemo_rl_core.config.model import ModelFromConfig
from nemo_rl_core.converters.materialize import materialize
from nemo_rl_core.produce import StageResult
from nemo_rl_core.store.files import hash_file
from tasks.artifacts import CheckpointArtifact, PromotionDecision
from tasks.export import export
from tasks.stage.stage import make

NUMERICS_VERSION = 1
MODEL = ModelFromConfig(hidden_size=32, intermediate_size=64, num_layers=1, num_heads=2)


class Seed(FrozenConfig):
    """Identifies the random weights of a model."""

    seed: int


def checkpoint(stage: str, seed: int) -> CheckpointArtifact:
    def work(folder: Path) -> StageResult:
        materialize(MODEL, folder / "model", seed=seed)
        return StageResult("checkpoint", "hf", step=seed)

    fields = make(__name__, stage, config=Seed(seed=int(seed)), parents={}, work=work)
    return CheckpointArtifact(**fields)


def verdict(*, promoted: bool) -> PromotionDecision:
    def work(folder: Path) -> StageResult:
        (folder / "decision.json").write_text(str(promoted))
        return StageResult("promotion", "json", "promoted: +9.0" if promoted else "NOT promoted: 0")

    fields = make(__name__, "promote", config=Seed(seed=int(promoted)), parents={}, work=work)
    return PromotionDecision(**fields, promoted=promoted, difference=0, low=0, high=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("which", "promoted", "exports_trained"),
    [
        ("trained", True, True),
        ("trained", False, True),
        ("trained", None, True),
        ("promoted", True, True),
        ("promoted", False, False),
    ],
)
def test_the_recipe_names_the_exported_weights(
    own_store: Path, which: Any, promoted: bool | None, exports_trained: bool
) -> None:
    start, trained = checkpoint("prepare_model", 1), checkpoint("grpo_iteration", 2)
    decision = None if promoted is None else verdict(promoted=promoted)
    exported = export.task_function(
        config=ExportConfig(model=which),
        start=start,
        trained=trained,
        decision=decision,
    )
    hashes = {
        hash_file(each.model_folder / "model.safetensors") for each in (start, trained, exported)
    }
    assert len(hashes) == 2
    source = trained if exports_trained else start
    weights = [hash_file(each.model_folder / "model.safetensors") for each in (source, exported)]
    assert weights[0] == weights[1]
    origin = json.loads((exported.folder / "origin.json").read_text())
    assert origin["checkpoint"] == source.content_hash
    sentence = "the trained model (grpo_iteration)"
    if not exports_trained:
        sentence = "the model that training started from (prepare_model)"
    assert origin["exported"] == sentence
    assert exported.summary.startswith(sentence)
    # `nemo-rl reproduce` calls the task again with what the manifest names, by role.
    roles = {parent.role for parent in exported.manifest.parents}
    assert roles == {"start", "trained"} | ({"decision"} if decision else set())
    card = (exported.model_folder / "README.md").read_text().replace("\\", "")
    expected_summary = (
        decision.summary if decision else "not compared with the model it started from"
    )
    assert f"Exported: {sentence}; {expected_summary}." in card


@pytest.mark.parametrize(("step", "said"), [(0, False), (4, True)])
def test_a_step_is_named_only_if_it_exists(own_store: Path, step: int, said: bool) -> None:
    """After a supervised start only it is 0, which would read like a model without training."""
    trained = checkpoint("train_sft", step)
    exported = export.task_function(
        config=ExportConfig(), start=checkpoint("prepare_model", 1), trained=trained, decision=None
    )
    card = (exported.model_folder / "README.md").read_text()
    assert (f" of step {step}" in exported.summary) == said
    assert (f"A model at training step {step}, made" in card) == said
    assert ("A model, made" in card) != said
