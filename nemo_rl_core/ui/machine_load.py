"""Load of the machine while stages ran: curves over seconds of the run, not over steps."""

from collections.abc import Mapping, Sequence

from nemo_rl_core.history.queries import History
from nemo_rl_core.history.records import Node
from nemo_rl_core.ui.charts import Chart, Point, Series, chart

PREFIX = "machine/"
_TOTAL, _CONSTANT = "_mib", "_total_gib"


def charts(
    history: History, nodes: Sequence[Node], names: Mapping[int, Sequence[str]], *, wanted: str = ""
) -> list[Chart]:
    """One chart per metric of the machine, over the nodes that ran in this run (no cache hits).

    Totals, which the system counts from its boot, are shown relative to the first sample;
    constants are left out.

    Args:
        history: The database that holds them.
        nodes: Nodes of one run.
        names: Names of each node's metrics, by node id.
        wanted: Only metrics whose name contains this; case-insensitive.
    """
    found: dict[str, list[Point]] = {}
    for node in nodes:
        read = [name for name in names.get(node.id, ()) if name.startswith(PREFIX)]
        if read and node.cached_from is None:  # a hit has the metrics of another run
            for name, points in history.metrics(node.id, names=read).items():
                seconds = [(float(second), value) for second, value in points]
                found.setdefault(name, []).extend(seconds)
    return [
        chart(name.removeprefix(PREFIX), [Series("", _relative(name, points))], axis="seconds")
        for name, points in sorted(found.items())
        if wanted.casefold() in name.casefold() and not name.endswith(_CONSTANT)
    ]


def _relative(name: str, points: list[Point]) -> list[Point]:
    points = sorted(points)
    start = points[0][1] if name.endswith(_TOTAL) else 0.0
    return [(second, value - start) for second, value in points]
