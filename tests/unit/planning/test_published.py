"""The roofline compared with published measurements of steps."""

import pytest
from generate.published_steps import MODELS, PART_FACTOR, PARTS, SOURCES, STEPS, Published

from nemo_rl_core.planning.accelerators import ACCELERATORS
from nemo_rl_core.planning.load import layout_of, layout_problem
from nemo_rl_core.planning.memory import missing_cache, plan_memory
from nemo_rl_core.planning.sizes import sizes_of
from nemo_rl_core.planning.speed import TOTAL_FACTOR
from tests.unit.planning.layouts import sizes

NAMES = [f"{step.setting.model}, {step.setting.num_gpus} GPUs, {step.source}, {step.total_seconds}"
         for step in STEPS]  # fmt: skip


@pytest.mark.parametrize("step", STEPS, ids=NAMES)
def test_the_roofline_is_within_the_stated_factor_of_every_published_step(step: Published) -> None:
    expected = step.setting.seconds
    assert tuple(expected) == PARTS
    ratio = sum(expected.values()) / step.total_seconds
    assert 1 / TOTAL_FACTOR < ratio < TOTAL_FACTOR
    for part, seconds in (step.parts or {}).items():
        assert 1 / PART_FACTOR < expected[part] / seconds < PART_FACTOR, part


def test_factors_are_no_wider_than_they_must_be() -> None:
    totals = [sum(step.setting.seconds.values()) / step.total_seconds for step in STEPS]
    assert max(max(ratio, 1 / ratio) for ratio in totals) > 0.95 * TOTAL_FACTOR
    parts = [step.setting.seconds[part] / seconds
             for step in STEPS for part, seconds in (step.parts or {}).items()]  # fmt: skip
    assert max(max(ratio, 1 / ratio) for ratio in parts) > 0.95 * PART_FACTOR


def test_rollouts_take_the_share_of_a_step_that_is_published() -> None:
    for step in STEPS:
        if step.parts is None:
            continue
        expected = step.setting.seconds
        share = expected["rollouts"] / sum(expected.values())
        published = step.parts["rollouts"] / step.total_seconds
        assert share == pytest.approx(published, abs=0.13), step.setting.model


@pytest.mark.parametrize("step", STEPS, ids=NAMES)
def test_a_published_layout_is_one_that_fits(step: Published) -> None:
    load = step.setting.load
    assert step.source in SOURCES
    assert layout_problem(load) is None
    assert layout_of(step.setting.training, step.setting.num_gpus).data >= 1
    plan = plan_memory(load, ACCELERATORS["nvidia-h100"].memory_gib)
    assert not missing_cache(load, plan)


def test_models_have_their_published_sizes() -> None:
    billions = {name: sizes_of(config).num_parameters / 1e9 for name, config in MODELS.items()}
    assert billions == pytest.approx(
        {
            "Llama 3.2 1B": 1.2358,
            "Llama 3.1 8B": 8.030,
            "Llama 3.1 70B": 70.554,
            "Llama 3.1 405B": 405.853,
            "Qwen3 32B": 32.762,
            "Qwen3 30B-A3B": 30.532,
            "Qwen3 235B-A22B": 235.094,
        },
        rel=1e-4,
    )
    assert sizes_of(MODELS["Llama 3.1 8B"]) == sizes("llama-3.1-8b")
    assert sizes_of(MODELS["Llama 3.1 70B"]) == sizes("llama-3.1-70b")
    assert sizes_of(MODELS["Qwen3 30B-A3B"]) == sizes("qwen3-30b-a3b")
