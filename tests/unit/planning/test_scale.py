"""The tables of `deployment/SCALE.md` are those that the formulas give."""

from pathlib import Path

import pytest
from generate import scale

from nemo_rl_core.planning.load import layout_problem
from nemo_rl_core.planning.memory import missing_cache, plan_memory

PAGE = Path(__file__).resolve().parents[3] / "deployment" / "SCALE.md"


def test_the_plan_on_paper_shows_the_computed_figures() -> None:
    text = PAGE.read_text()
    for table in scale.tables():
        assert "\n".join(table) in text


def test_the_formulas_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    one, eight, seventy, largest = scale.MODELS
    assert scale.mtbf_hours(16_384) == pytest.approx(3.093, abs=1e-3)  # "every three hours"
    assert scale.save_seconds(eight, 8) == pytest.approx(8.03e9 * 12 / 2e9, rel=1e-4)
    assert scale.save_seconds(largest, 1024) == pytest.approx(405.85e9 * 12 / 100e9, rel=1e-4)
    # 3 s a GiB in four processes: 89.7 GiB of 8B from one machine, an eighth of it from each of 8.
    assert scale.send_seconds(eight, 8) == pytest.approx(89.7 * 3 / 4, rel=1e-3)
    assert scale.send_seconds(eight, 64) == pytest.approx(89.7 * 3 / 4 / 8, rel=1e-3)
    # Young: sqrt(2 * 60 * 86400) = 3220 s; Daly's terms add 1/3 sqrt(C / 2M) of it, and take C off.
    ratio = 60 / (2 * 86_400)
    daly = 3219.94 * (1 + ratio**0.5 / 3 + ratio / 9) - 60
    assert scale.daly_seconds(60, 86_400) == pytest.approx(daly, rel=1e-5)
    # No save begins before the last one is sent, however slowly.
    assert scale.save_every_seconds(seventy, 64) > scale.send_seconds(seventy, 64)
    monkeypatch.setattr(scale, "SENT_BYTES_PER_NODE_AND_SECOND", 1e6)
    assert scale.save_every_seconds(seventy, 64) == scale.send_seconds(seventy, 64)
    assert one.min_gpus == 1
    assert eight.min_gpus == 3  # 128.5 GB in 50.9 GB each


def test_the_best_interval_is_the_best() -> None:
    save, mtbf = 60.0, 2 * 86_400.0
    best = scale.daly_seconds(save, mtbf)
    at_best = scale.lost_share(save, best, mtbf)
    assert at_best < scale.lost_share(save, best * 1.5, mtbf)
    assert at_best < scale.lost_share(save, best / 1.5, mtbf)


def test_the_plan_on_paper_has_layouts_that_fit() -> None:
    for model, num_gpus in scale.fitting():
        stage_load = model.step(num_gpus).load
        memory = plan_memory(stage_load, scale.H100.memory_gib)
        assert layout_problem(stage_load) is None, model.name
        assert not missing_cache(stage_load, memory), model.name
        assert stage_load.num_gpus == num_gpus


def test_rollouts_are_the_largest_part_of_every_step_on_paper() -> None:
    for model, num_gpus in scale.fitting():
        seconds = model.step(num_gpus).seconds
        assert max(seconds, key=lambda part: seconds[part]) == "rollouts", (model.name, num_gpus)
        assert seconds["rollouts"] / sum(seconds.values()) > 0.47, (model.name, num_gpus)
