"""Every preset is a valid config with the values of its paper."""

import pytest

from nemo_rl_core.algorithms.grpo.config import GRPOConfig, GRPOSchedule, GRPOSettings
from nemo_rl_core.algorithms.grpo.loss_config import ClippedLoss, ConstantDenominator, KLInLoss
from nemo_rl_core.algorithms.grpo.presets import PRESETS
from nemo_rl_core.config.kl import KLInReward
from nemo_rl_core.errors import ConfigError

NAMES = ["grpo", "dapo", "dr_grpo", "gspo", "cispo", "rloo", "reinforce_plus_plus", "sapo", "gdpo"]


def preset(name, **changes):
    return GRPOConfig.model_validate({"preset": name, **changes})


def test_all_presets_exist():
    assert sorted(PRESETS) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_preset_loads_with_its_values(name):
    dumped = preset(name).model_dump(mode="json")

    def holds(part, full):
        if isinstance(part, dict):
            return all(holds(value, full[key]) for key, value in part.items())
        return part == full

    assert holds(PRESETS[name], dumped)


def test_no_two_presets_are_the_same():
    assert len({preset(name).model_dump_json() for name in NAMES}) == len(NAMES)


def test_overrides_change_what_they_name():
    config = preset("dapo", loss={"clip_high": 0.4}, num_prompts_per_step=3)
    assert (config.loss.clip_low, config.loss.clip_high, config.loss.kl) == (0.2, 0.4, None)
    assert config.num_prompts_per_step == 3
    assert preset("dapo").loss.clip_high == 0.28  # the data are unchanged


def test_overrides_reach_maps_within_maps():
    config = preset("rloo", loss={"kl": {"beta": 0.5}})
    assert config.loss.kl == KLInReward(beta=0.5)
    assert config.loss.reduction == ConstantDenominator(max_tokens=1)


def test_an_estimator_keeps_the_weight_of_the_penalty():
    config = preset("grpo", loss={"kl": {"kind": "k1"}})
    assert config.loss.kl == KLInLoss(kind="k1", beta=0.04)


def test_kl_in_the_reward_replaces_the_penalty_of_the_preset():
    assert preset("grpo", loss={"kl": {"place": "in_reward"}}).loss.kl == KLInReward()


def test_another_kind_replaces_the_part_of_the_preset():
    config = preset("dapo", loss={"kind": "sapo"}, overlong=None)
    assert config.loss.kind == "sapo"
    assert config.loss.kl == KLInLoss()  # the default of its kind
    assert config.overlong is None


def test_an_unknown_name_lists_the_choices():
    with pytest.raises(ConfigError, match="did you mean 'dr_grpo'") as caught:
        preset("dr-grpo")
    assert all(name in str(caught.value) for name in NAMES)


@pytest.mark.parametrize("name", [["dapo"], {"kind": "dapo"}, "", 7])
def test_an_invalid_name_is_refused_too(name):
    with pytest.raises(ConfigError, match="there is no preset"):
        preset(name)


def test_a_config_from_a_preset_equals_one_written_out():
    written_out = GRPOConfig.model_validate({**PRESETS["dapo"], "learning_rate": 1e-6})
    assert preset("dapo", learning_rate=1e-6).model_dump_json() == written_out.model_dump_json()
    assert "preset" not in written_out.model_dump()


def test_no_preset_is_the_default():
    assert preset(None) == GRPOConfig()


def test_schedules_and_settings_take_presets_too():
    schedule = GRPOSchedule.model_validate({"preset": "gspo", "num_iterations": 2})
    assert (schedule.num_iterations, schedule.iteration) == (2, preset("gspo"))
    assert GRPOSettings.model_validate({"grpo": {"preset": "gspo"}}).grpo == preset("gspo")


def test_a_config_survives_json_and_changes():
    config = preset("rloo")
    assert GRPOConfig.model_validate_json(config.model_dump_json()) == config
    assert config.replace(learning_rate=1.0).loss == config.loss


def test_a_config_object_replaces_the_part_of_the_preset():
    assert preset("gspo", loss=ClippedLoss(kl=None)).loss == ClippedLoss(kl=None)


def test_contradictions_with_a_preset_are_refused():
    with pytest.raises(ValueError, match="must be above"):
        preset("dapo", loss={"dual_clip": 1.2})


def test_an_unknown_field_is_refused():
    with pytest.raises(ConfigError, match="learning_rate"):
        preset("grpo", learning_rat=1.0)
