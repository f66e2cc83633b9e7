"""Every preset is a valid config that says what its paper says."""

import pytest

from nemo_rl_core.algorithms.grpo.config import ConstantDenominator, KLPenalty
from nemo_rl_core.algorithms.grpo.presets import PRESETS, preset
from nemo_rl_core.errors import ConfigError

NAMES = ["grpo", "dapo", "dr_grpo", "gspo", "cispo", "rloo", "reinforce_plus_plus", "sapo", "gdpo"]


def test_all_presets_are_there():
    assert sorted(PRESETS) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_preset_loads_and_holds_what_it_says(name):
    dumped = preset(name).model_dump(mode="json")

    def holds(part, whole):
        if isinstance(part, dict):
            return all(holds(value, whole[key]) for key, value in part.items())
        return part == whole

    assert holds(PRESETS[name], dumped)


def test_no_two_presets_are_the_same():
    assert len({preset(name).model_dump_json() for name in NAMES}) == len(NAMES)


def test_overrides_change_what_they_name():
    config = preset("dapo", loss={"clip_high": 0.4}, num_prompts_per_step=3)
    assert (config.loss.clip_low, config.loss.clip_high, config.loss.kl) == (0.2, 0.4, None)
    assert config.num_prompts_per_step == 3
    assert preset("dapo").loss.clip_high == 0.28  # the data is as it was


def test_overrides_reach_maps_within_maps():
    config = preset("rloo", loss={"kl": {"beta": 0.5}})
    assert config.loss.kl == KLPenalty(kind="k1", beta=0.5, place="in_reward")
    assert config.loss.reduction == ConstantDenominator(max_tokens=1)


def test_another_kind_replaces_what_there_was():
    config = preset("dapo", loss={"kind": "sapo"}, overlong=None)
    assert config.loss.kind == "sapo"
    assert config.loss.kl == KLPenalty()  # the default of its kind
    assert config.overlong is None


def test_an_unknown_name_lists_the_choices():
    with pytest.raises(ConfigError) as caught:
        preset("ppo")
    assert all(name in str(caught.value) for name in NAMES)


def test_an_unknown_field_is_refused():
    with pytest.raises(ConfigError, match="learning_rate"):
        preset("grpo", learning_rat=1.0)
