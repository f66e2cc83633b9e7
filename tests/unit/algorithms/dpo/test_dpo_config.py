"""Settings of preference optimisation: kinds, their properties, and what is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from nemo_rl_core.algorithms.dpo.config import DPOConfig, DPOSchedule
from nemo_rl_core.errors import ConfigError


@pytest.mark.parametrize(
    ("kind", "needs_reference", "needs_pairs"),
    [
        ("sigmoid", True, True),
        ("hinge", True, True),
        ("ipo", True, True),
        ("robust", True, True),
        ("simpo", False, True),
        ("length_normalized", True, True),
        ("kto", True, False),
        ("orpo", False, True),
    ],
)
def test_a_kind_is_read_by_its_name_and_knows_its_needs(kind, needs_reference, needs_pairs):
    config = DPOConfig.model_validate({"loss": {"kind": kind}})
    assert config.loss.kind == kind
    assert config.needs_reference is needs_reference
    assert config.loss.needs_pairs is needs_pairs
    assert DPOConfig.model_validate(config.model_dump(mode="json")) == config


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        ({"kind": "sigmod"}, "sigmoid"),
        ({"kind": "robust", "label_smoothing": 0.5}, "less than 0.5"),
        ({"kind": "sigmoid", "beta": 0}, "greater than 0"),
        ({"kind": "ipo", "per": "word"}, "token"),
    ],
)
def test_a_wrong_value_is_refused(loss, words):
    with pytest.raises(ValidationError, match=words):
        DPOConfig.model_validate({"loss": loss})


@pytest.mark.parametrize(
    ("loss", "key"),
    [
        ({"kind": "hinge", "label_smoothing": 0.1}, "label_smoothing"),
        ({"kind": "orpo", "sft": {"weight": 1}}, "sft"),
        ({"kind": "kto", "sft": {"weight": 1}}, "sft"),
        ({"kind": "sigmoid", "gamma": 1}, "gamma"),
    ],
)
def test_a_field_of_another_kind_is_unknown(loss, key):
    with pytest.raises(ConfigError, match=f"unknown key 'loss.{key}'"):
        DPOConfig.model_validate({"loss": loss})


@given(st.integers(1, 1000), st.integers(1, 1000))
def test_an_iteration_does_not_know_how_many_follow(one, other):
    first, second = (
        DPOSchedule(num_iterations=number, loss={"kind": "simpo"}).iteration
        for number in (one, other)
    )
    assert first == second
    assert first.loss.kind == "simpo"
    assert type(first) is DPOConfig
