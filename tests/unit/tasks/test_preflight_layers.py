"""Layers and heads that do not fit a recipe are refused before the run."""

from pathlib import Path

import pytest

from nemo_rl_core.errors import ConfigError, ModelError
from nemo_rl_core.model_files.loading import load_scalar_model
from tasks.local_run.preflight import preflight
from tasks.recipes.common import PipelineRecipe
from tasks.recipes.distillation import DistillationRecipe
from tasks.recipes.post_train import PostTrainRecipe
from tasks.recipes.ppo import PPORecipe
from tasks.recipes.reward_model import RewardModelRecipe
from tests.model_types import save_tokenizer, tiny_model

pytestmark = pytest.mark.usefixtures("on_this_machine")


def _saved(kind: str, folder: Path) -> Path:
    tiny_model(kind).save_pretrained(folder / "start")
    save_tokenizer(folder)
    return folder / "start"


@pytest.mark.parametrize("recipe", [RewardModelRecipe, PPORecipe, PostTrainRecipe])
@pytest.mark.parametrize("kind", ["granite", "bart", "bert"])
def test_models_without_a_scalar_head_are_refused(
    kind: str, recipe: type[PipelineRecipe], tmp_path: Path
) -> None:
    folder = _saved(kind, tmp_path)
    with pytest.raises(ModelError, match="no class with a scalar head"):
        preflight({"config": recipe(model={"name": str(folder)})})
    with pytest.raises(ModelError, match="no class with a scalar head"):
        load_scalar_model(folder)


def test_a_teacher_needs_no_load_balancing_loss(tmp_path: Path) -> None:
    student, teacher = (_saved(kind, tmp_path / kind) for kind in ("mixtral", "llama"))
    training = {"router_aux_loss_coef": 0.1}
    models = {"model": {"name": str(student)}, "teacher": {"model": {"name": str(teacher)}}}
    sampling = {"backend": "hf", "max_new_tokens": 16}
    preflight({"config": DistillationRecipe(**models, training=training, generation=sampling)})
    with pytest.raises(ConfigError, match="LlamaForCausalLM has no load-balancing loss"):
        preflight(
            {
                "config": DistillationRecipe(
                    model=models["teacher"]["model"], training=training, generation=sampling
                )
            }
        )
