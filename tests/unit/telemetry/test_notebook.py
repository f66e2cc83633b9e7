"""The display in a notebook, checked by the messages of IPython to the browser."""

from collections.abc import Iterator
from typing import Any

import pytest
from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.interactiveshell import InteractiveShell

from nemo_rl_core.telemetry.display_lines import summary_table
from nemo_rl_core.telemetry.events import StageRecord
from nemo_rl_core.telemetry.python_output import NotebookDisplay, in_notebook
from nemo_rl_core.types import StepReport


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[list[dict[str, Any]]]:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    shell = InteractiveShell.instance()
    publisher = CapturingDisplayPublisher()
    monkeypatch.setattr(shell, "display_pub", publisher)
    yield publisher.outputs
    InteractiveShell.clear_instance()


def step(number: int) -> StepReport:
    return StepReport("grpo", number, 4, {"reward": number / 4}, {})


def test_one_output_is_updated_and_ends_as_a_table(sent: list[dict[str, Any]]) -> None:
    assert not in_notebook()  # no kernel
    display = NotebookDisplay()
    display.stage_started("grpo")
    display.step(step(1))
    display.note("a <warning>")
    shown = sent[-1]["data"]["text/html"]
    assert '<progress value="1" max="4"></progress> grpo 1/4  reward 0.250' in shown
    assert "a &lt;warning&gt;" in shown
    record = StageRecord("grpo", "ran", 2.0, note="reward 0.250 → 1.000")
    display.stage_finished(record)
    assert "grpo  ran  2.0 s  reward 0.250 → 1.000" in sent[-1]["data"]["text/html"]
    display.close()
    display.show_table(summary_table([record]), ["model: here"])
    shown = sent[-1]["data"]["text/html"]
    assert "<td>grpo</td><td>ran</td><td>2.0</td>" in shown
    assert "<div>model: here</div>" in shown
    assert "a &lt;warning&gt;" in shown
    assert "<progress" not in shown
    # One output and its updates.
    assert [each.get("update", False) for each in sent] == [False] + [True] * (len(sent) - 1)
    assert len({each["transient"]["display_id"] for each in sent}) == 1


def test_steps_update_the_output_at_most_four_times_per_second(sent: list[dict[str, Any]]) -> None:
    display = NotebookDisplay()
    for number in range(200):
        display.step(step(number))
    assert len(sent) < 10
