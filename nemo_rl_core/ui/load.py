"""What the machine did while stages ran: curves over seconds of the run, not over steps."""

from collections.abc import Mapping, Sequence

from nemo_rl_core.history.queries import History
from nemo_rl_core.history.records import Node
from nemo_rl_core.ui.charts import Chart, Point, Series, chart

PREFIX = "machine/"
_TOTAL, _CONSTANT = "_mib", "_total_gib"


def draw(
    history: History, nodes: Sequence[Node], names: Mapping[int, Sequence[str]], *, wanted: str = ""
) -> list[Chart]:
    """One chart a figure, over the nodes that did their work in this run.

    Totals of what was moved, which the system counts from its start, are shown from the first
    sample on; what never changes is left out.

    Args:
        history: Where they are recorded.
        nodes: Of one run.
        names: Of what each node's record holds, by the node.
        wanted: Only figures whose name holds this; letter case does not count.
    """
    found: dict[str, list[Point]] = {}
    for node in nodes:
        read = [name for name in names.get(node.id, ()) if name.startswith(PREFIX)]
        if read and node.cached_from is None:  # a hit's figures are those of another run
            for name, points in history.metrics(node.id, names=read).items():
                seconds = [(float(second), value) for second, value in points]
                found.setdefault(name, []).extend(seconds)
    return [
        chart(name.removeprefix(PREFIX), [Series("", _shown(name, points))], axis="seconds")
        for name, points in sorted(found.items())
        if wanted.casefold() in name.casefold() and not name.endswith(_CONSTANT)
    ]


def _shown(name: str, points: list[Point]) -> list[Point]:
    points = sorted(points)
    start = points[0][1] if name.endswith(_TOTAL) else 0.0
    return [(second, value - start) for second, value in points]
