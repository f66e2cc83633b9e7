"""A store of 1,000 runs, 100,000 nodes, and steps of 1,000 rollouts: how long pages take."""

import importlib.util
import statistics
from pathlib import Path
from types import ModuleType

import pytest

from nemo_rl_core.store.store import Store


@pytest.mark.thorough
def test_every_page_of_a_large_store_is_quick(tmp_path: Path) -> None:
    benchmark = _benchmark("large_pages")
    store = Store(tmp_path)
    benchmark.fill(store)

    medians = {
        name: statistics.median(ms) for name, ms in benchmark.response_times(store, 5).items()
    }
    assert len(medians) == len(benchmark.pages())
    assert {name: ms for name, ms in medians.items() if ms >= 200} == {}


@pytest.mark.thorough
def test_views_of_many_rollouts_are_quick(tmp_path: Path) -> None:
    benchmark = _benchmark("completions_view")
    benchmark.fill(tmp_path, num_steps=200)
    medians = benchmark.milliseconds(tmp_path, 5)
    assert {name: ms for name, ms in medians.items() if ms >= 300} == {}


def _benchmark(name: str) -> ModuleType:
    path = Path(__file__).parents[1] / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
