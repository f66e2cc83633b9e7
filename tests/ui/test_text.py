import math

import pytest

from nemo_rl_core.ui.charts import Series, chart
from nemo_rl_core.ui.costs import total_cost
from nemo_rl_core.ui.text import NONE, cut, duration, iso, moment, number, size, visible


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("plain\ttext\n", "plain\ttext\n"),
        ("\x1b[31m\x00\r", "\\x1b[31m\\x00\\r"),
        ("a\u202eb\u2066c", "a\\u202eb\\u2066c"),
        ("line\u2028paragraph\u2029", "line\\u2028paragraph\\u2029"),
        ("\ud800half", "\\ud800half"),
        ("Grüße 東京 👍", "Grüße 東京 👍"),
        ("<b>&", "<b>&"),  # escaping is the template's work
    ],
)
def test_characters_that_would_garble_a_page_are_escaped(written: str, shown: str) -> None:
    assert visible(written) == shown
    shown.encode()


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (None, NONE),
        (-0.1, "0 ms"),
        (0.0123, "12 ms"),
        (9.94, "9.9 s"),
        (59.4, "59 s"),
        (59.6, "1 min 0 s"),
        (3599.7, "1 h 0 min"),
        (90_000, "1 d 1 h"),
    ],
)
def test_durations_read_well(seconds: float | None, shown: str) -> None:
    assert duration(seconds) == shown


def test_times_sizes_and_figures() -> None:
    assert (moment(0), iso(0)) == ("1970-01-01 00:00:00", "1970-01-01T00:00:00Z")
    assert [size(n) for n in (1023, 1024, 3 * 2**40)] == ["1023 B", "1.0 KiB", "3.0 TiB"]
    assert [number(n) for n in (None, 1234567, 0.123456)] == [NONE, "1,234,567", "0.1235"]
    assert cut("abc", 3) == "abc"


def test_costs_add_up_but_peaks_do_not() -> None:
    costs = [
        {"wall_seconds": 2.0, "tokens": 10, "peak_memory_gib": 1.0},
        {},
        {"wall_seconds": 3.0, "tokens": 5, "peak_memory_gib": 2.0},
    ]
    assert total_cost(costs) == [
        ("of work", "5.0 s"),
        ("tokens", "15"),
        ("GiB at its peak", "2"),
    ]
    assert total_cost([{}]) == ()


def test_curves_share_one_scale_and_have_gaps_where_values_are_missing() -> None:
    picture = chart(
        "loss", [Series("a", [(1, 0.0), (2, math.nan), (3, 10.0)]), Series("b", [(2, 5.0)])]
    )

    assert picture.lines[0].strokes == ["60.0,172.0 60.0,172.0", "410.0,14.0 410.0,14.0"]
    assert picture.lines[1].strokes == ["235.0,93.0 235.0,93.0"]
    assert picture.ticks_y == [(172, "0"), (93, "5"), (14, "10")]
    assert picture.description == "loss over steps 1 to 3: a 10; b 5"


def test_a_curve_without_values_is_described_as_such() -> None:
    picture = chart("loss", [Series("", [(1, math.inf)])])
    assert (picture.ticks_x, picture.description) == ([], "loss: no values")


def test_a_long_curve_is_thinned_but_keeps_its_extremes_and_its_end() -> None:
    points = [(float(n), 0.0) for n in range(100_000)]
    points[776] = (776.0, math.nan)
    points[777] = (777.0, 50.0)
    (line,) = chart("spike", [Series("", points)]).lines

    points_shown = line.strokes[0].split()
    assert len(points_shown) < 500
    assert any(point.endswith(",14.0") for point in points_shown)
    assert points_shown[-1].startswith("410.0,")
    assert line.count == 100_000


def test_huge_values_of_opposite_sign_fit_into_a_chart() -> None:
    (line,) = chart("x", [Series("", [(1, -1.7e308), (2, 1.7e308)])]).lines
    assert line.strokes == ["60.0,172.0 410.0,14.0"]
