"""The page of a model's ancestry: links between rows, empty cells and escaped names."""

import re

from tasks.lineage_report import lineage_html

ROWS = [
    {"generation": 0, "stage": "export", "content": "aa11223344556677", "seed": None,
     "parents": "bb112233, bb112233, cc112233"},
    {"generation": 1, "stage": "<b>sft", "content": "bb11223344556677", "seed": 0, "parents": ""},
    {"generation": 1, "stage": "prepare_data", "content": "missing"},
]  # fmt: skip


def test_parents_are_links_to_existing_rows() -> None:
    page = lineage_html(ROWS)
    # The third parent has no row, and a parent in two roles is one link.
    assert re.findall(r'href="#(\w+)"', page) == ["bb112233"]
    assert re.findall(r'<tr id="(\w+)"', page) == ["aa112233", "bb112233", "missing"]
    assert "cc112233" in page


def test_missing_values_are_empty_and_markup_is_escaped() -> None:
    page = lineage_html(ROWS)
    assert "None" not in page
    assert "<td>0</td>" in page  # a seed of 0 is a value
    assert "&lt;b&gt;sft" in page and "<b>" not in page
    assert "What export aa112233 came from" in page
