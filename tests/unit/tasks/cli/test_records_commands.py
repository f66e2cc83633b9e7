"""`nemo-rl metrics`, `logs`, `rollouts` and `eval` on recorded runs, and completion of names."""

import csv
import io
import json
import threading
import time
from datetime import datetime, timedelta
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from nemo_rl_core.history.queries import History
from nemo_rl_core.history.results import run_rows
from nemo_rl_core.history.writer import HistoryWriter, NewExecution, NodeEnd
from nemo_rl_core.rollouts.records import save_rollouts
from nemo_rl_core.store.store import Store
from nemo_rl_core.types import Completion, Prompt, Rollout
from tasks.cli.records.metrics import metrics
from tasks.cli.records.names import artifact_folder, complete_runs
from tasks.cli.records.runs import DEFAULT_COLUMNS, runs_table
from workflows import cli

RUN, OTHER = "20260101T000000Z-aaaaaa", "20260102T000000Z-bbbbbb"


def invoked(*arguments: str) -> Result:
    return CliRunner().invoke(cli.group, arguments)


def record(run: str, *, ends: bool = True) -> HistoryWriter:
    """Records a run with three steps of one stage, and its log."""
    store = Store.default()
    store.create()
    log = store.runs / run / "run.log"
    log.parent.mkdir(parents=True)
    log.write_text("".join(f"line {number}\n" for number in range(50)))
    writer = HistoryWriter(store, run)
    writer.begin(NewExecution("workflows.grpo.grpo", "grpo_ci", [], {}, log))
    node = writer.begin_node("grpo_iteration 1", task="tasks.grpo_iteration", kind="task")
    for step, reward in enumerate((0.0, 0.25, 1.0), start=1):
        writer.log_metrics(node, step, {"reward": reward, "kl": 0.5})
    writer.end_node(node, NodeEnd("succeeded"))
    if ends:
        writer.end("succeeded")
    return writer


@pytest.fixture
def run(own_store: Path) -> str:
    record(RUN)
    return RUN


def test_metrics_of_a_run_are_a_table_csv_or_json(run: str) -> None:
    shown = invoked("metrics", run, "reward", "kl").output
    rows = [line.split() for line in shown.splitlines() if "grpo_iteration" in line]
    assert rows == [
        ["grpo_iteration", "1", "1", "0", "0.5"],
        ["grpo_iteration", "1", "2", "0.25", "0.5"],
        ["grpo_iteration", "1", "3", "1", "0.5"],
    ]
    assert "reward  ▁▃█  0 → 1\n" in shown
    listed = list(csv.DictReader(io.StringIO(invoked("metrics", run, "reward", "--csv").output)))
    assert [row["value"] for row in listed] == ["0.0", "0.25", "1.0"]
    assert json.loads(invoked("metrics", run, "reward", "--json").output)[1] == {
        "stage": "grpo_iteration 1", "step": 2, "metric": "reward", "value": 0.25,
    }  # fmt: skip


def test_all_metrics_are_listed_with_constant_ones_apart(run: str) -> None:
    shown = invoked("metrics").output  # the latest run
    (row,) = [line.split() for line in shown.splitlines() if line.split()[:1] == ["reward"]]
    assert row == ["reward", "0", "1", "0", "1", "▁▃█"]
    assert "constant: kl 0.5\n" in shown


def test_unknown_metrics_and_runs_are_named(run: str) -> None:
    misspelled = invoked("metrics", run, "rewrd")
    assert misspelled.exit_code == 2
    assert "did you mean 'reward'?" in misspelled.output
    assert "no record of 'zzz'" in invoked("metrics", "zzz").output
    record(OTHER)
    several = invoked("metrics", "2026010")
    assert f"got: {RUN}, {OTHER}" in several.output
    assert invoked("metrics", OTHER[:8], "kl").exit_code == 0


def test_a_store_without_runs_is_refused(own_store: Path) -> None:
    assert "has no record of any run" in invoked("logs").output


def test_the_end_of_a_log_has_no_escapes(run: str, own_store: Path) -> None:
    log = own_store / "runs" / run / "run.log"
    assert invoked("logs", "-n", "2").output == "line 48\nline 49\n"
    with log.open("a") as file:
        file.write("\x1b[31mred\x1b[0m\x07\n  10%\r100%\nnot yet")
    assert invoked("logs", run, "-n", "2").output == "red\n100%\n"
    assert invoked("logs", run, "--all", "--grep", "line 4$").output == "line 4\n"
    assert invoked("logs", run, "--grep", "(").exit_code == 2


def test_a_log_is_followed_until_the_run_ends(own_store: Path) -> None:
    writer = record(RUN, ends=False)
    log = own_store / "runs" / RUN / "run.log"

    def finish() -> None:
        with log.open("a") as file:
            file.write("the last line\n")
        writer.end("succeeded")

    timer = threading.Timer(0.3, finish)
    timer.start()
    assert invoked("logs", "-f", "-n", "1").output == "line 49\nthe last line\n"
    timer.join()


def rollout() -> Rollout:
    prompt = Prompt("7", "1+2=", (1,), "3", "arithmetic")
    return Rollout(prompt, Completion((2,), (-0.5,), False), "3", 1.0, 0.0)


def test_rollouts_are_listed_by_training_or_folder_and_refused_elsewhere(
    own_store: Path, tmp_path: Path
) -> None:
    training = own_store / "artifacts" / "grpo_iteration-abc"
    save_rollouts([rollout()], training / "rollouts" / "step_000003.parquet")
    for folder in (training, training / "rollouts"):
        assert invoked("rollouts", "list", str(folder)).output.splitlines()[1].split()[:2] == [
            "3", "1",
        ]  # fmt: skip
    for name in (str(tmp_path), "evaluate-123"):
        refused = invoked("rollouts", "list", name)
        assert refused.exit_code == 2
        assert f"{name!r} has no recorded rollouts" in refused.output


def test_an_evaluation_that_is_not_there_is_refused(run: str) -> None:
    refused = invoked("eval", "evaluate-nosuch")
    assert refused.exit_code == 2
    assert "Error: there is no evaluation in 'evaluate-nosuch'" in refused.output
    assert artifact_folder("evaluate-nosuch") == Path("evaluate-nosuch")


def test_ids_of_runs_are_completed(run: str) -> None:
    context = click.Context(metrics)
    items = complete_runs(context, metrics.params[0], "202601")
    assert [(item.value, item.help) for item in items] == [(RUN, "grpo_ci")]
    assert complete_runs(context, metrics.params[0], "x") == []


def test_runs_have_chosen_columns_in_order(run: str) -> None:
    store = Store.default()
    log = store.runs / run / "run.log"
    writer = HistoryWriter(store, OTHER)
    rate = {"config": {"grpo": {"learning_rate": 0.5}}}
    writer.begin(NewExecution("workflows.grpo.grpo", "grpo_ci", [], rate, log))
    writer.end("failed", "as it failed")
    columns = "run,state,reward,grpo.learning_rate"
    shown = invoked("runs", "--columns", columns, "--sort", "-reward").output
    rows = [line.split() for line in shown.splitlines() if line.lstrip().startswith("2026")]
    # The mean of 0, 0.25 and 1 is 0.417; a run without a reward is last.
    assert rows == [[RUN, "succeeded", "0.417", "▁▃█"], [OTHER, "failed", "0.5"]]
    assert "settings" in invoked("runs", "--columns", "+tokens").output
    refused = invoked("runs", "--columns", "rewrd")
    assert refused.exit_code == 2
    assert "did you mean 'reward'?" in refused.output
    page = json.loads(invoked("runs", "--json", "--where", "reward>0.4").output)
    assert [(row["id"], row["reward"], row["total"]) for row in [page["items"][0] | page]] == [
        (RUN, pytest.approx(1.25 / 3), 1)
    ]


def test_a_run_is_named_tagged_noted_and_pinned(run: str) -> None:
    record(OTHER)
    changes = ["--name", "baseline", "--tag", "paper", "--note", "as in table 2", "--pin"]
    assert invoked("runs", run[:8], *changes).exit_code == 0
    shown = invoked("runs", run).output
    assert all(line in shown for line in ("name: baseline\n", "tags: paper\n", "* 20260101"))
    ids = [row["id"] for row in json.loads(invoked("runs", "--json").output)["items"]]
    assert ids == [RUN, OTHER]  # pinned runs are first
    tagged = json.loads(invoked("runs", "--tag", "paper", "--json").output)["items"]
    assert [row["note"] for row in tagged] == ["as in table 2"]
    assert invoked("runs", run, "--unpin").exit_code == 0
    assert "* 2026" not in invoked("runs").output
    assert invoked("runs", "--name", "x").exit_code == 2


def test_the_table_fits_a_narrow_terminal(run: str) -> None:
    stream = io.StringIO()
    with History(Store.default()) as history:
        rows = run_rows(history).items
        table = runs_table(rows, DEFAULT_COLUMNS, history, width=80)
    Console(file=stream, width=80).print(table)
    lines = [line.rstrip() for line in stream.getvalue().splitlines() if line.strip()]
    assert lines[2].split()[:3] == [RUN, "grpo", "grpo_ci"]
    assert lines[3].split() == ["succeeded", "0:00"]


def test_a_log_shorter_than_the_number_of_lines_is_complete(run: str, own_store: Path) -> None:
    every = "".join(f"line {number}\n" for number in range(50))
    assert invoked("logs", run, "-n", "70").output == every
    matching = "".join(f"line {number}\n" for number in (4, *range(40, 50)))
    assert invoked("logs", run, "--grep", "line 4").output == matching
    assert invoked("logs", run, "-n", "0").output == ""
    with (own_store / "runs" / run / "run.log").open("a") as file:
        file.write("2026-01-01 00:00:00,000 INFO 7 flytekit: a dump\n  of a value\n")
        file.write("2026-01-01 00:00:00,000 INFO 7 nemo_rl_core.loop: step 1\n  more\n")
    shown = invoked("logs", run, "-n", "3")
    assert shown.stdout.splitlines()[0] == "line 49"
    assert shown.stdout.splitlines()[1].endswith("step 1") and "dump" not in shown.stdout
    assert shown.stderr == "2 lines of flytekit are not shown; --all prints them\n"
    assert len(invoked("logs", run, "--all").stdout.splitlines()) == 54


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["logs", RUN, "--all", "-n", "3"], "--number has no effect with --all"),
        (["metrics", RUN, "--json", "--csv"], "choose --json or --csv"),
        (["runs", RUN, "--sort", "x", "--limit", "3"], "--sort, --limit has no effect with a RUN"),
        (["runs", "--json", "--columns", "run"], "--columns has no effect with --json"),
        (["runs", "--columns", "run,grpo.lr"], "no run has the column 'grpo.lr'"),
    ],
)
def test_options_without_effect_are_refused(run: str, arguments: list, message: str) -> None:
    refused = invoked(*arguments)
    assert refused.exit_code == 2
    assert message in refused.output


def test_tags_are_cleared_and_names_stand_for_runs(run: str) -> None:
    def tags() -> list[str]:
        return json.loads(invoked("runs", "--json").output)["items"][0]["tags"]

    assert invoked("runs", run, "--tag", "paper", "--tag", "", "--name", "zebra").exit_code == 0
    assert tags() == ["paper"]
    assert invoked("runs", "zebra", "--note", "kept tags").exit_code == 0
    assert tags() == ["paper"]
    assert invoked("runs", run, "--tag", "").exit_code == 0
    assert tags() == []
    assert "reward,0.25" in invoked("metrics", "zebra", "reward", "--csv").output
    record(OTHER)
    assert invoked("runs", OTHER, "--name", "zebra").exit_code == 0
    assert f"got: {RUN}, {OTHER}" in invoked("runs", "zebra").output


def test_since_is_local_time(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Etc/GMT+12")  # UTC minus twelve hours
    time.tzset()
    try:
        now = datetime.now()
        for hours, total in ((-1, 1), (1, 0)):
            since = f"{now + timedelta(hours=hours):%Y-%m-%dT%H:%M}"
            listed = invoked("runs", "--json", "--since", since).output
            assert json.loads(listed)["total"] == total
    finally:
        monkeypatch.undo()
        time.tzset()
