"""A grid of ranks with named axes."""

from collections.abc import Mapping, Sequence

import numpy as np

from nemo_rl_core.config.training import Parallelism

PIPELINE, DATA, CONTEXT, TENSOR = (
    "pipeline_parallel",
    "data_parallel",
    "context_parallel",
    "tensor_parallel",
)


class NamedSharding:
    """An array of ranks whose axes have names.

    Args:
        layout: Array of any shape that has each rank from 0 to the number of ranks - 1 once.
        names: Names of the array's axes, slowest first.

    Example:
        >>> grid = NamedSharding([[0, 1], [2, 3]], ["data_parallel", "tensor_parallel"])
        >>> grid.coordinates(2)
        {'data_parallel': 1, 'tensor_parallel': 0}
        >>> grid.ranks(tensor_parallel=1)
        [1, 3]
    """

    def __init__(self, layout: Sequence[object] | np.ndarray, names: Sequence[str]) -> None:
        self._layout = np.asarray(layout, dtype=np.int64)
        self.names = tuple(names)
        if len(self.names) != self._layout.ndim or len(set(self.names)) != len(self.names):
            raise ValueError(
                f"a layout of {self._layout.ndim} axes needs as many different names, "
                f"got {list(self.names)}"
            )
        if sorted(self._layout.flat) != list(range(self._layout.size)):
            raise ValueError(
                f"a layout needs each rank from 0 to {self._layout.size - 1} once, "
                f"got {self._layout.tolist()}"
            )

    @property
    def shape(self) -> dict[str, int]:
        """Length of each axis, slowest first."""
        return dict(zip(self.names, self._layout.shape, strict=True))

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return int(self._layout.size)

    def axis_size(self, name: str) -> int:
        """Returns the length of an axis."""
        return int(self._layout.shape[self._axis(name)])

    def coordinates(self, rank: int) -> dict[str, int]:
        """Returns the coordinates of a rank by axis name."""
        (position,) = np.argwhere(self._layout == rank)
        return dict(zip(self.names, position.tolist(), strict=True))

    def ranks(self, **coordinates: int) -> list[int]:
        """Returns the ranks at these coordinates, in the layout's order.

        Example:
            >>> grid = NamedSharding([[0, 1], [2, 3]], ["data_parallel", "tensor_parallel"])
            >>> grid.ranks(data_parallel=1), grid.ranks(tensor_parallel=1), grid.ranks()
            ([2, 3], [1, 3], [0, 1, 2, 3])
        """
        index: list[int | slice] = [slice(None)] * self._layout.ndim
        for name, coordinate in coordinates.items():
            index[self._axis(name)] = coordinate
        return [int(rank) for rank in self._layout[tuple(index)].flat]

    def along(self, name: str) -> list[list[int]]:
        """Returns the ranks of each coordinate on an axis, first the one at 0 on all other axes.

        Example:
            >>> NamedSharding([[0, 1], [2, 3]], ["data_parallel", "tensor_parallel"]).along(
            ...     "tensor_parallel"
            ... )
            [[0, 2], [1, 3]]
        """
        first_axis = np.moveaxis(self._layout, self._axis(name), 0)
        ranks: list[list[int]] = first_axis.reshape(len(first_axis), -1).tolist()
        return ranks

    def _axis(self, name: str) -> int:
        if name not in self.names:
            raise ValueError(f"there is no axis {name!r}; the axes are {', '.join(self.names)}")
        return self.names.index(name)

    def __repr__(self) -> str:
        return f"NamedSharding({_product(self.shape)})"


def training_sharding(training: Parallelism, num_workers: int) -> NamedSharding:
    """Returns the grid of a training backend's ranks: pipeline slowest, then data, context, tensor.

    Tensor parallelism communicates most, so its ranks are neighbors; pipelines communicate least.
    """
    tensor, context = training.tensor_parallel_size, training.context_parallel_size
    pipeline = training.ranks_per_replica // (tensor * context)
    data = training.data_parallel_size(num_workers)
    layout = np.arange(num_workers).reshape(pipeline, data, context, tensor)
    return NamedSharding(layout, (PIPELINE, DATA, CONTEXT, TENSOR))


def _product(shape: Mapping[str, int]) -> str:
    return " x ".join(f"{name}={size}" for name, size in shape.items())
