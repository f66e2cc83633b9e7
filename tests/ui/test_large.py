"""A store of 1,000 runs and 100,000 nodes: each page is answered within 200 ms."""

import importlib.util
import statistics
from pathlib import Path

import pytest

from nemo_rl_core.store.store import Store


@pytest.mark.thorough
def test_every_page_of_a_large_store_is_quick(tmp_path: Path) -> None:
    path = Path(__file__).parents[1] / "benchmarks" / "large_pages.py"
    spec = importlib.util.spec_from_file_location("large_pages", path)
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    store = Store(tmp_path)
    benchmark.fill(store)

    medians = {
        name: statistics.median(ms) for name, ms in benchmark.response_times(store, 5).items()
    }
    assert len(medians) == len(benchmark.pages())
    assert {name: ms for name, ms in medians.items() if ms >= 200} == {}
