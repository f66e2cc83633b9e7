"""Kinds are read from mappings, and incompatible settings are refused."""

import pytest
from pydantic import ValidationError

from nemo_rl_core.algorithms.grpo.config import (
    GRPOConfig,
    GRPOSchedule,
    OverlongFilter,
    OverlongPenalty,
)
from nemo_rl_core.algorithms.grpo.loss_config import (
    CISPOLoss,
    ClippedLoss,
    ConstantDenominator,
    GSPOLoss,
    KLInLoss,
    OnPolicyLoss,
    ReinforceLoss,
    SAPOLoss,
    SequenceMaskImportance,
    TruncatedImportance,
)
from nemo_rl_core.algorithms.ppo.config import PPOConfig
from nemo_rl_core.config.kl import KLInReward
from nemo_rl_core.errors import ConfigError

IN_REWARD = {"place": "in_reward"}


def config(**values):
    return GRPOConfig.model_validate(values)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"clip_low": 0.1, "kl": {"kind": "k2", "beta": 0.5}}, "clipped"),
        ({"kind": "clipped", "dual_clip": 3.0}, "clipped"),
        ({"kind": "cispo"}, "cispo"),
        ({"kind": "reinforce"}, "reinforce"),
        ({"kind": "on_policy"}, "on_policy"),
        ({"kind": "gspo"}, "gspo"),
        ({"kind": "sapo", "tau_negative": 2.0}, "sapo"),
    ],
)
def test_losses_are_read_by_kind_and_survive_a_dump(values, expected):
    types = {
        "clipped": ClippedLoss,
        "cispo": CISPOLoss,
        "reinforce": ReinforceLoss,
        "on_policy": OnPolicyLoss,
        "gspo": GSPOLoss,
        "sapo": SAPOLoss,
    }
    schedule = GRPOSchedule.model_validate({"loss": values})
    assert type(schedule.loss) is types[expected]
    assert schedule.iteration.loss == schedule.loss
    assert GRPOSchedule.model_validate_json(schedule.model_dump_json()) == schedule


def test_parts_of_a_loss_are_read_by_kind():
    loss = config(
        loss={
            "reduction": {"kind": "constant", "max_tokens": 9},
            "importance": {"kind": "truncated", "cap": 3.0},
            "kl": {"kind": "k1", "place": "in_reward"},
        }
    ).loss
    assert loss.reduction == ConstantDenominator(max_tokens=9)
    assert loss.importance == TruncatedImportance(cap=3.0)
    assert loss.kl == KLInReward()
    assert config(loss={"reduction": "sequence_mean"}).loss.reduction == "sequence_mean"


@pytest.mark.parametrize("kl", [IN_REWARD, {**IN_REWARD, "beta": 0.5}])
def test_the_kl_in_the_reward_is_estimated_by_k1(kl):
    assert config(loss={"kl": kl}).loss.kl.kind == "k1"
    assert config().loss.kl.kind == "k3"
    # From a preset, too, whose penalty in the loss has another kind.
    assert config(preset="grpo", loss={"kl": kl}).loss.kl.kind == "k1"


@pytest.mark.parametrize("kind", ["k2", "k3"])
@pytest.mark.parametrize("read", [GRPOConfig, PPOConfig])
def test_a_biased_kl_in_the_reward_must_be_allowed(read, kind):
    def with_kl(**kl):
        section = {"kl": {"kind": kind, **kl}}
        return read.model_validate({"loss": section} if read is GRPOConfig else section)

    with pytest.raises(ConfigError, match=f"the estimator {kind} in the reward") as caught:
        with_kl(place="in_reward")
    assert "set kl.kind to k1" in str(caught.value)
    assert with_kl(place="in_reward", allow_biased_gradient=True)
    assert config(loss={"kl": {"kind": kind}}).loss.kl == KLInLoss(kind=kind)


def test_an_option_of_the_other_place_is_named():
    with pytest.raises(ConfigError, match="'allow_biased_gradient' belongs to place in_reward"):
        config(loss={"kl": {"allow_biased_gradient": True}})


def test_overlong_completions_are_penalized_or_filtered():
    assert config(overlong={"buffer_tokens": 5}).overlong == OverlongPenalty(buffer_tokens=5)
    assert config(overlong={"kind": "filter"}).overlong == OverlongFilter()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"loss": {"kind": "clip"}}, ["clip", "'gspo'"]),
        ({"loss": {"reduction": "mean"}}, ["token_mean", "sequence_mean"]),
        ({"loss": {"kind": "gspo", "reduction": "token_mean"}}, ["sequence_mean"]),
        ({"loss": {"dual_clip": 1.1}}, ["dual_clip (1.1)", "1.2"]),
        ({"loss": {"importance": {"kind": "band", "low": 3}}}, ["low (3.0)", "high (2.0)"]),
        ({"loss": {"entropy_bonus": -1}}, ["entropy_bonus"]),
        ({"dynamic_sampling": {"max_draws": 1}}, ["max_draws"]),
        ({"advantage": {"kind": "gdpo"}}, ["weights"]),
        ({"advantage": {"kind": "gdpo", "weights": []}}, ["weights"]),
        ({"train_global_batch_size": 7}, ["(7)", "(512)"]),
        (
            {"train_global_batch_size": 256, "loss": {"kind": "on_policy"}},
            ["on_policy", "(256)", "2 optimizer steps"],
        ),
        ({"num_generations_per_prompt": 1}, ["group_normalized", "at least 2"]),
        (
            {
                "num_generations_per_prompt": 1,
                "advantage": {"kind": "reinforce_plus_plus_baseline"},
            },
            ["reinforce_plus_plus_baseline"],
        ),
        (
            {
                "num_generations_per_prompt": 1,
                "advantage": {"kind": "reinforce_plus_plus"},
                "dynamic_sampling": {},
            },
            ["dynamic_sampling"],
        ),
        (
            {
                "advantage": {"kind": "reinforce_plus_plus"},
                "loss": {"kind": "gspo", "kl": IN_REWARD},
            },
            ["gspo", "token to token"],
        ),
        (
            {"advantage": {"kind": "gdpo", "weights": [1]}, "loss": {"kl": IN_REWARD}},
            ["gdpo", "in_loss"],
        ),
        (
            {"advantage": {"kind": "gdpo", "weights": [1]}, "overlong": {"buffer_tokens": 2}},
            ["gdpo", "penalty on length"],
        ),
    ],
)
def test_contradictions_are_refused(values, words):
    with pytest.raises(ValidationError) as caught:
        config(**values)
    for word in words:
        assert word in str(caught.value)


def test_compatible_settings_are_accepted():
    assert config(num_generations_per_prompt=1, advantage={"kind": "reinforce_plus_plus"})
    assert config(train_global_batch_size=512, loss={"kind": "on_policy"})
    by_group = config(loss={"kind": "gspo", "kl": IN_REWARD})
    assert by_group.has_kl_in_reward
    assert not config().has_kl_in_reward
    assert not config(loss={"kl": None}).has_kl_in_reward


def test_a_misspelt_field_names_the_nearest():
    with pytest.raises(ConfigError, match="clip_low"):
        config(loss={"clip_lo": 0.1})
    with pytest.raises(ConfigError, match="tau_positive"):
        config(loss={"kind": "sapo", "tau_positiv": 0.1})
    with pytest.raises(ConfigError, match="high"):
        SequenceMaskImportance.model_validate({"hihg": 3})
