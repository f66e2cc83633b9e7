"""Tables of decks."""

import re

from nemo_rl_core.telemetry.decks import decision_html, figures_html


def cells(html: str) -> list[list[str]]:
    rows = re.findall("<tr>(.*?)</tr>", html)
    return [re.findall("<t[hd][^>]*>(.*?)</t[hd]>", row) for row in rows]


def test_a_decision_shows_what_it_was_based_on() -> None:
    figures = {"before": 0.25, "after": 0.5, "gained": 6, "lost": 1, "num_prompts": 20}
    assert cells(decision_html("promoted: +25 points", {**figures, "p_value": 0.125})) == [
        ["figure", "value"],
        ["decision", "promoted: +25 points"],
        ["right before", "25.0%"],
        ["right after", "50.0%"],
        ["prompts gained", "6"],
        ["prompts lost", "1"],
        ["McNemar&#x27;s p", "0.125"],
        ["prompts", "20"],
    ]


def test_figures_have_their_intervals_in_the_same_row() -> None:
    metrics = {"num_prompts": 4.0, "accuracy": 0.5, "accuracy_low": 0.25, "accuracy_high": 0.75}
    assert cells(figures_html(metrics)) == [
        ["figure", "value", "interval"],
        ["num prompts", "4", ""],
        ["accuracy", "0.5", "0.250 to 0.750"],
    ]
