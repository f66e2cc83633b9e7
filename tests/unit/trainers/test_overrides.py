"""Settings given only by name: their sections, and errors for unknown names."""

from typing import Any

import pytest

from nemo_rl_core.algorithms.grpo.config import GRPOConfig
from nemo_rl_core.algorithms.grpo.loss_config import GSPOLoss
from nemo_rl_core.algorithms.grpo.trainer import GRPOTrainer
from nemo_rl_core.algorithms.ppo.trainer import PPOTrainer
from nemo_rl_core.algorithms.sft.trainer import SFTTrainer
from nemo_rl_core.config.base import FrozenConfig
from nemo_rl_core.config.generation import VllmGenerationConfig
from nemo_rl_core.config.model import ModelFromConfig
from nemo_rl_core.errors import ConfigError
from nemo_rl_core.trainers.base import BaseTrainer
from nemo_rl_core.trainers.fit.overrides import nested_overrides, refuse_unclaimed


def grpo(**overrides: Any) -> Any:
    return GRPOTrainer.from_pretrained(ModelFromConfig(), **overrides).settings


def test_without_overrides_all_settings_are_defaults() -> None:
    assert grpo() == GRPOTrainer.settings_class()
    assert GRPOTrainer.from_pretrained("a/model").model == "a/model"


def test_a_name_is_assigned_to_the_section_that_has_it() -> None:
    settings = grpo(num_prompts_per_step=8, temperature=0.5, num_threads=1, seed=3)
    assert settings.grpo.num_prompts_per_step == 8
    assert settings.generation.temperature == 0.5
    assert settings.cluster.num_threads == 1
    assert settings.seed == 3


def test_a_section_overrides_its_defaults() -> None:
    settings = grpo(grpo={"num_prompts_per_step": 4, "loss": {"kind": "gspo"}})
    assert settings.grpo == GRPOConfig(num_prompts_per_step=4, loss=GSPOLoss())


@pytest.mark.parametrize("order", [1, -1])
def test_a_name_overrides_its_section_in_any_order(order: int) -> None:
    overrides = [("generation", {"max_new_tokens": 5, "temperature": 0.5}), ("temperature", 0.7)]
    settings = grpo(**dict(overrides[::order]))
    assert (settings.generation.max_new_tokens, settings.generation.temperature) == (5, 0.7)


@pytest.mark.parametrize("order", [1, -1])
def test_a_section_may_be_a_config(order: int) -> None:
    overrides = [("grpo", GRPOConfig(num_prompts_per_step=4)), ("learning_rate", 0.5)]
    settings = grpo(**dict(overrides[::order]))
    assert (settings.grpo.num_prompts_per_step, settings.grpo.learning_rate) == (4, 0.5)
    assert grpo(generation=VllmGenerationConfig(max_new_tokens=5), temperature=0.5).generation == (
        VllmGenerationConfig(max_new_tokens=5, temperature=0.5)
    )


def test_a_section_of_the_caller_is_not_changed() -> None:
    mine = {"max_new_tokens": 5}
    grpo(generation=mine, temperature=0.5)
    assert mine == {"max_new_tokens": 5}


def test_the_algorithms_section_takes_precedence_for_a_shared_name() -> None:
    class First(FrozenConfig):
        rate: float = 0.0

    class Other(First):
        width: int = 0

    class Third(First):
        width: int = 0

    class Settings(FrozenConfig):
        first: First = First()
        other: Other = Other()
        third: Third = Third()

    assert nested_overrides(Settings, "first", {"rate": 1.0}) == {"first": {"rate": 1.0}}
    with pytest.raises(ConfigError, match="'width' is in several sections") as caught:
        nested_overrides(Settings, "first", {"width": 1})
    assert caught.value.expected == "one of other={'width': ...}, third={'width': ...}"


@pytest.mark.parametrize(
    ("misspelt", "meant"),
    [
        ("learnin_rate", "learning_rate"),
        ("temprature", "temperature"),
        ("sead", "seed"),
        ("enviroment", "environment"),
    ],
)
def test_a_misspelt_name_is_refused_with_the_nearest(misspelt: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"no setting '{misspelt}'") as caught:
        grpo(**{misspelt: 1})
    assert caught.value.fix == f"did you mean {meant!r}?"


def test_an_unknown_name_lists_the_choices() -> None:
    with pytest.raises(ConfigError) as caught:
        SFTTrainer.from_pretrained("a/model", zzzz=1)
    assert caught.value.fix == "leave it out"
    assert {"num_steps", "seed", "num_threads"} <= set(
        str(caught.value.expected).removeprefix("one of ").split(", ")
    )


def test_all_unknown_names_are_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="no setting 'temprature', 'zzzz'") as caught:
        grpo(temprature=1, zzzz=2)
    assert caught.value.fix == "'temprature': did you mean 'temperature'?; 'zzzz': leave it out"


def test_an_algorithm_refuses_settings_of_another() -> None:
    assert PPOTrainer.from_pretrained("a/model", gamma=0.9).config.gamma == 0.9
    with pytest.raises(ConfigError, match="no setting 'gamma'"):
        grpo(gamma=0.9)


def test_an_invalid_value_is_explained() -> None:
    with pytest.raises(ConfigError, match=r"  generation\.temperature: "):
        grpo(temperature="hot")
    with pytest.raises(ConfigError, match=r"unknown key 'grpo\.num_prompt'"):
        grpo(grpo={"num_prompt": 3})


class TakingTrainer(BaseTrainer[Any, Any]):
    """Accepts settings that no class declares, like the reference documents."""

    @classmethod
    def _build_config_from_pretrained(cls, model: Any, **kwargs: Any) -> dict[str, Any]:
        config = super()._build_config_from_pretrained(model, **kwargs)
        config["taking"] = {"my_param": kwargs.pop("my_param", 1.0)}
        return config

    def _train_step(self, batch: list[Any]) -> dict[str, float]:
        return {}


def test_a_trainer_may_accept_custom_settings() -> None:
    settings = TakingTrainer.from_pretrained("a/model", my_param=2.0, num_steps=3, seed=1).settings
    assert (settings.taking, settings.loop.num_steps, settings.seed) == ({"my_param": 2.0}, 3, 1)
    assert TakingTrainer.from_pretrained("a/model").settings.taking == {"my_param": 1.0}


def test_other_unknown_settings_are_still_refused() -> None:
    with pytest.raises(ConfigError, match="no setting 'my_parm'") as caught:
        TakingTrainer.from_pretrained("a/model", my_parm=2.0)
    assert caught.value.fix == "did you mean 'my_param'?"


def test_an_override_lost_by_replacing_its_section_is_refused() -> None:
    # `learning_rate` was in the section that the trainer then replaced.
    config = {"sft": {"num_steps": 3}}
    with pytest.raises(ConfigError, match="no setting 'learning_rate'"):
        refuse_unclaimed(
            SFTTrainer.settings_class, "sft", config, {"num_steps": 1, "learning_rate": 1.0}
        )


def test_a_preset_belongs_to_the_section_that_has_it() -> None:
    from nemo_rl_core import GRPOTrainer

    trainer = GRPOTrainer.from_pretrained("some/model", preset="cispo", learning_rate=1e-6)
    assert (trainer.config.loss.kind, trainer.config.learning_rate) == ("cispo", 1e-6)
    with pytest.raises(ConfigError, match="there is no setting 'presett'") as caught:
        GRPOTrainer.from_pretrained("some/model", presett="cispo")
    assert caught.value.fix == "did you mean 'preset'?"
