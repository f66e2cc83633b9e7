"""Load of the machine during stages, as curves over seconds of the run, not over steps."""

from collections.abc import Mapping, Sequence

from nemo_rl_core.history.queries import History
from nemo_rl_core.history.records import Node
from nemo_rl_core.ui.charts import Chart, Point, Series, chart

PREFIX = "machine/"
_TOTAL, _CONSTANT = "_mib", "_total_gib"


def charts(
    history: History, nodes: Sequence[Node], names: Mapping[int, Sequence[str]], *, text: str = ""
) -> list[Chart]:
    """Returns one chart per metric of the machine, over the nodes that ran (no cache hits).

    Totals since the system's boot are shown relative to the first sample; constants are left out.
    """
    samples: dict[str, list[Point]] = {}
    for node in nodes:
        machine_names = [name for name in names.get(node.id, ()) if name.startswith(PREFIX)]
        if machine_names and node.cached_from is None:  # a hit has the metrics of another run
            for name, envelope in history.envelopes(node.id, machine_names).items():
                seconds = [(each.x, each.value) for bucket in envelope for each in bucket.points]
                samples.setdefault(name, []).extend(seconds)
    return [
        chart(name.removeprefix(PREFIX), [Series("", _relative(name, points))], axis="seconds")
        for name, points in sorted(samples.items())
        if text.casefold() in name.casefold() and not name.endswith(_CONSTANT)
    ]


def _relative(name: str, points: list[Point]) -> list[Point]:
    points = sorted(points)
    start = points[0][1] if name.endswith(_TOTAL) else 0.0
    return [(second, value - start) for second, value in points]
