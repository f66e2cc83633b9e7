import math
import re
from html.parser import HTMLParser
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_core.telemetry.curves import completions_html, curve_svg, curves_svg

TAGS = {"table", "tr", "td", "th", "p"}


class _Page(HTMLParser):
    """Parses a page like a browser: tags, attribute names and text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.cells: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes.update(name for name, _ in attrs)
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_data(self, data: str) -> None:
        if self.cells:
            self.cells[-1] += data


def _polylines(svg: str) -> list[list[tuple[float, float]]]:
    root = ET.fromstring(svg)
    return [
        [tuple(map(float, pair.split(","))) for pair in line.attrib["points"].split()]
        for line in root.iter("{http://www.w3.org/2000/svg}polyline")
    ]


def test_a_curve_by_hand() -> None:
    # x spans 64..408 and y spans 176 (low) .. 28 (high): the middle is at 236 and 102.
    (line,) = _polylines(curve_svg("loss", [1, 2, 3], [0.0, 1.0, 2.0]))
    assert line[1:] == [(64, 176), (236, 102), (408, 28)]
    assert "last 2" in curve_svg("loss", [1, 2, 3], [0.0, 1.0, 2.0])


def test_gaps_single_points_and_nothing() -> None:
    nan, inf = float("nan"), float("inf")
    lines = _polylines(curve_svg("a", range(5), [0.0, nan, 1.0, inf, 0.5]))
    assert [len(set(line)) for line in lines] == [1, 1, 1]
    assert "no values" in curve_svg("a", [], [])
    assert "no values" in curve_svg("a", [1], [nan])
    assert _polylines(curve_svg("a", [1], [5.0])) == [[(236, 102), (236, 102)]]
    with pytest.raises(ValueError, match="zip"):
        curve_svg("a", [1], [])


@given(st.lists(st.floats(), max_size=8), st.text(max_size=30))
def test_every_curve_is_well_formed_and_within_its_frame(ys: list[float], title: str) -> None:
    svg = curve_svg(title, list(range(len(ys))), ys)
    for line in _polylines(svg):
        assert all(64 <= x <= 408 and 28 <= y <= 176 for x, y in line)
    assert ("no values" in svg) == (not any(map(math.isfinite, ys))) or "no values" in title


HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</td></table><h1>out",
    "{{ 7 * 7 }} {% raw %}",
    "&lt;b&gt;",
    "<!-- ",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_markup_is_shown_as_text(text: str) -> None:
    page = _Page(completions_html([{"prompt": text, text: 1.0}]))
    assert page.tags == {"table", "tr", "td", "th"}
    assert page.attributes == {"style"}
    assert page.cells == ["prompt", text, text, "1"]
    assert ET.fromstring(curve_svg(text, [1], [1])) is not None


@given(st.lists(st.dictionaries(st.text(max_size=4), st.text() | st.floats(), max_size=3)))
def test_any_rows_make_an_inert_table(rows: list[dict[str, str | float]]) -> None:
    text = completions_html(rows)
    text.encode("utf-8")
    page = _Page(text)
    assert page.tags <= TAGS
    assert page.attributes <= {"style"}
    columns = {key for row in rows for key in row}
    assert len(page.cells) == (len(rows) + 1) * len(columns) if columns else not page.cells


def test_long_values_are_cut_and_control_characters_spelled_out() -> None:
    cut, spelled = _Page(
        completions_html([{"a": "x" * 1000, "b": "1\n\x00\u202egnp\ud800"}])
    ).cells[2:]
    assert cut == "x" * 400 + "… (600 more characters)"
    assert spelled == "1\n\\x00\\u202egnp\\ud800"


def test_missing_values_leave_a_cell_empty() -> None:
    page = _Page(completions_html([{"a": 1}, {"b": 2.0}]))
    assert page.cells == ["a", "b", "1", "", "", "2"]
    assert not re.search("None", completions_html([{"a": 1}, {"b": 2.0}]))


def test_several_curves_share_their_axes_and_have_a_legend() -> None:
    svg = curves_svg("reward", {"seed <0>": [(0, 0.0), (1, 1.0)], "seed 1": [(0, 0.5), (1, 0.5)]})
    assert svg.count("<polyline") == 2
    # The second is half way up the axes, which the first one spans.
    assert 'points="64.0,102.0 64.0,102.0 408.0,102.0"' in svg
    assert "seed &lt;0&gt;" in svg and "<0>" not in svg
    assert len({part.split('"')[0] for part in svg.split('stroke="#')[1:]}) >= 2
    assert "<polyline" not in curves_svg("nothing", {"empty": []})
