"""Ranks on named axes: by hand for a small grid, by property for all."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_core.config.training import DTensorTraining, MegatronTraining
from nemo_rl_core.distributed.named_sharding import NamedSharding, training_sharding
from nemo_rl_core.errors import ConfigError

AXES = ("pipeline_parallel", "data_parallel", "context_parallel", "tensor_parallel")


def test_a_grid_by_hand() -> None:
    grid = training_sharding(MegatronTraining(pipeline_parallel_size=2, tensor_parallel_size=2), 8)
    assert grid.shape == dict(zip(AXES, (2, 2, 1, 2), strict=True))
    # rank = ((pipeline * 2 + data) * 1 + context) * 2 + tensor
    assert grid.coordinates(5) == dict(zip(AXES, (1, 0, 0, 1), strict=True))
    assert grid.ranks(data_parallel=0) == [0, 1, 4, 5]
    assert grid.ranks(data_parallel=1, tensor_parallel=0) == [2, 6]
    assert grid.axis_size("data_parallel") == 2
    assert "data_parallel=2" in repr(grid)


@given(st.lists(st.integers(1, 3), min_size=4, max_size=4))
def test_every_rank_matches_its_coordinates(sizes: list[int]) -> None:
    grid = NamedSharding(np.arange(np.prod(sizes)).reshape(sizes), AXES)
    for rank in range(grid.world_size):
        assert grid.ranks(**grid.coordinates(rank)) == [rank]
        for name in AXES:
            others = {axis: at for axis, at in grid.coordinates(rank).items() if axis != name}
            line = grid.ranks(**others)
            assert len(line) == grid.axis_size(name)
            assert line[grid.coordinates(rank)[name]] == rank


def test_one_worker_is_a_grid_of_one() -> None:
    grid = training_sharding(DTensorTraining(), 1)
    assert grid.shape == dict.fromkeys(AXES, 1)


def test_part_of_a_copy_is_refused() -> None:
    with pytest.raises(ConfigError, match="3 workers") as caught:
        training_sharding(DTensorTraining(tensor_parallel_size=2), 3)
    assert "set cluster.num_workers to 4" in str(caught.value)


@pytest.mark.parametrize(
    ("layout", "names", "message"),
    [
        ([[0, 1]], ["data"], "2 axes needs as many different names"),
        ([[0, 1]], ["data", "data"], "different names"),
        ([0, 2], ["data"], "each rank from 0 to 1 once"),
        ([0, 0], ["data"], "each rank from 0 to 1 once"),
    ],
)
def test_invalid_layout_is_refused(layout: list, names: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NamedSharding(layout, names)


def test_an_unknown_axis_lists_the_choices() -> None:
    grid = NamedSharding([0, 1], ["data_parallel"])
    for ask in (lambda: grid.axis_size("dp"), lambda: grid.ranks(dp=0)):
        with pytest.raises(ValueError, match="the axes are data_parallel"):
            ask()
