"""A damaged or hostile history.db: every page answers, commands explain, nothing else is read."""

import html
import re
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner
from starlette.testclient import TestClient

from nemo_rl_core.history.inserts import as_value
from nemo_rl_core.history.writer import HistoryWriter, NewExecution, NodeEnd
from nemo_rl_core.store.manifest import Cost, Manifest
from nemo_rl_core.store.store import Store
from nemo_rl_core.ui.app import create_app
from workflows.cli import group

RUN, SOUND = "20260101T000000Z-aaaaaa", "20260102T000000Z-bbbbbb"
SECRET = "root:x:0:0"
HEADERS = {"content-security-policy", "x-content-type-options", "referrer-policy"}

JSON = ["{", "[1", "null", "5", '"x"', "[]", "{}", "\0", "[" * 900 + "]" * 900, "[" * 10**5]
JSON += ["1" * 5000, b"\xff\xfe", '{"cost": 5}', '{"parents": 3}', '{"config": []}']
JSON += ['{"wall_seconds": "x"}', '{"tokens": 1e999}', '{"tokens": 1' + "0" * 400 + "}"]
TIMES = ["abc", "2026-01-01", 1e300, -1e300, 1e999, b"\xff", "\0", -1, 10**18]
PATHS = ["/etc/passwd", "/etc", "/", "../../../../../../etc/passwd", "runs/../../../../etc/passwd"]
PATHS += ["a\0b", "/etc/passwd\0", "runs//etc/passwd", ".", "..", "~/x", "x" * 5000, b"\xff", 7]
TEXTS = ["", "exploded", "\0", "x" * 10**5, b"\xff\xfe", 5, "../../x", "\x1b[31m"]
NUMBERS = ["abc", -(2**62), 1e300, "\0", b"\xff"]

CASES = {
    **{("executions", name): JSON for name in ("command", "inputs", "packages", "machine")},
    **{("executions", name): TIMES for name in ("started_at", "ended_at")},
    **{("executions", name): TEXTS for name in ("state", "workflow", "recipe", "error", "folder")},
    ("executions", "id"): TEXTS,
    ("executions", "log_path"): PATHS,
    ("executions", "git_dirty"): NUMBERS,
    ("nodes", "cost"): JSON,
    **{("nodes", name): TIMES for name in ("started_at", "ended_at")},
    **{("nodes", name): TEXTS for name in ("state", "kind", "task", "name", "summary", "error")},
    **{("nodes", name): NUMBERS for name in ("log_from", "log_to", "parent", "cached_from")},
    ("nodes", "deck_path"): PATHS,
    ("attempts", "started_at"): TIMES,
    **{("attempts", name): TEXTS for name in ("state", "error")},
    ("attempts", "number"): NUMBERS,
    ("artifacts", "manifest"): JSON,
    ("artifacts", "path"): PATHS,
    **{("artifacts", name): TEXTS for name in ("id", "kind", "stage", "format", "created_at")},
    ("artifacts", "content_hash"): TEXTS,
    ("artifacts", "step"): NUMBERS,
    ("artifact_parents", "parent_id"): [*PATHS, *TEXTS],
    **{("node_inputs", name): TEXTS for name in ("name", "type", "value", "artifact")},
    **{("node_outputs", name): TEXTS for name in ("name", "type", "value", "artifact")},
    **{("edges", name): TEXTS for name in ("source_output", "target_input")},
    **{("edges", name): NUMBERS for name in ("source", "target")},
    **{("metrics", name): NUMBERS for name in ("value", "step")},
    ("metrics", "name"): TEXTS,
}
FIRST = [("executions", "inputs"), ("executions", "started_at"), ("executions", "log_path")]
FIRST += [("nodes", "deck_path"), ("artifacts", "path"), ("artifacts", "manifest")]
COMMANDS = [
    ["runs"],
    ["runs", RUN],
    ["runs", "--json"],
    ["usage"],
    ["gc", "--dry-run", "--keep-runs", "1", "--older-than", "0d"],
    ["card", f"train_sft-{RUN[-6:]}{'a' * 10}"],
    ["verify"],
]


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Store:
    store = Store(tmp_path_factory.mktemp("intact") / "store")
    for run in (RUN, SOUND):
        log = store.runs / run / "run.log"
        log.parent.mkdir(parents=True)
        log.write_text("the log\n")
        writer = HistoryWriter(store, run)
        writer.begin(NewExecution("w.grpo", "r", ["nemo-rl"], {"config": {"seed": 1}}, log))
        above: tuple[Path, ...] = ()
        nodes: list[int | None] = []
        for stage in ("prepare_data", "train_sft"):
            folder = store.artifacts / f"{stage}-{run[-6:]}{'a' * 10}"
            folder.mkdir(parents=True)
            manifest = Manifest(
                kind="checkpoint",
                format="hf",
                stage=stage,
                name=folder.name,
                content_hash="ab" * 32,
                parents=tuple(Manifest.read(each).ref(each, "data") for each in above),
                cost=Cost(wall_seconds=2.0, tokens=10, device="NVIDIA H100"),
            )
            manifest.write(folder)
            (folder / "deck.html").write_text("<h1>deck</h1>")
            values = [as_value("x", "int", 1), *(as_value("m", "C", "", p.name) for p in above)]
            task = f"t.{stage}"
            node = writer.begin_node(stage, task=task, kind="task", inputs=values, log_from=0)
            writer.connect(nodes[-1] if nodes else None, "o0", node, "m")
            writer.log_metrics(node, 1, {"loss": 1.0})
            nodes.append(node)
            end = NodeEnd(
                "succeeded",
                outputs=[as_value("o0", "C", "", folder.name)],
                made=[(folder, manifest)],
                deck_path=str(folder / "deck.html"),
                cost=manifest.cost.model_dump(),
                log_to=4,
            )
            writer.end_node(node, end)
            above = (folder,)
        writer.end("succeeded")
    return store


def damaged(intact: Store, folder: Path, table: str, column: str, value: object) -> Store:
    """Copies the store and damages one column of the rows of the first run."""
    shutil.copytree(intact.root, folder)
    store = Store(folder)
    with closing(sqlite3.connect(store.root / "history.db")) as database:
        first = f"SELECT min(rowid) FROM {table}"
        rows = database.execute(f"PRAGMA table_info({table})").fetchall()
        keys = [row[1] for row in rows if row[5]]
        if "id" in keys or table.startswith("node_"):
            where = f"rowid = ({first})"
        else:  # tables without rowid
            named = ", ".join(keys)
            where = f"({named}) = (SELECT {named} FROM {table} ORDER BY {named} LIMIT 1)"
        database.execute(f"UPDATE {table} SET {column} = ? WHERE {where}", (value,))
        database.commit()
    return store


def every_answer(store: Store) -> Iterator[tuple[str, int, str, set[str]]]:
    """Yields address, status, text and header names of every linked page."""
    client = TestClient(create_app(store), base_url="http://localhost")
    first = f"train_sft-{RUN[-6:]}{'a' * 10}"
    todo = ["/", "/nodes/1", "/nodes/2/deck", f"/compare?run={RUN}&run={SOUND}"]
    todo += [f"/artifacts/{first}", f"/artifacts/{first}/files/passwd", "/nodes/2"]
    todo += [f"/artifacts/{first}/files/etc/passwd", f"/artifacts/{first}/completions"]
    todo += [f"/executions/{RUN}/{view}" for view in ("log", "graph", "timeline", "curves")]
    seen: set[str] = set()
    while todo:
        address = todo.pop()
        if address in seen or address.startswith("/static/"):
            continue
        seen.add(address)
        answer = client.get(address)
        yield address, answer.status_code, answer.text, set(answer.headers)
        links = re.findall(r'(?:href|src)="(/[^"#]*)"', answer.text)
        todo += [html.unescape(link) for link in links if len(link) < 60_000]


def problems_of(
    intact: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    column_of: tuple[str, str],
    most: int,
) -> list[str]:
    """Returns answers and exceptions that a damaged row must not cause, for up to `most` values."""
    table, column = column_of
    problems: list[str] = []
    for number, value in enumerate(CASES[column_of][:most]):
        store = damaged(intact, tmp_path / str(number), table, column, value)
        case = f"{value!r:.40}"
        for address, status, text, headers in every_answer(store):
            if status not in (200, 400, 404, 503):
                problems.append(f"{case}: {address} answers {status}")
            if not headers >= HEADERS:
                problems.append(f"{case}: {address} lacks headers")
            if SECRET in text or ">shadow</a>" in text:
                problems.append(f"{case}: {address} shows another file")
            if status == 503 and f"the table {table} " not in text and "cannot be read" not in text:
                problems.append(f"{case}: {address} does not name the row")
        monkeypatch.setenv("NEMO_RL_HOME", str(store.root))
        for words in COMMANDS:
            done = CliRunner().invoke(group, words)
            if done.exception is not None and not isinstance(done.exception, SystemExit):
                problems.append(f"{case}: {words[0]} raises {done.exception!r:.200}")
            if SECRET in done.output:
                problems.append(f"{case}: {words[0]} shows another file")
    return problems


@pytest.mark.slow
@pytest.mark.parametrize("column_of", FIRST, ids=map(".".join, FIRST))
def test_a_damaged_row_is_named_and_no_other_file_is_read(
    intact: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, column_of: tuple[str, str]
) -> None:
    assert problems_of(intact, tmp_path, monkeypatch, column_of, most=2) == []


@pytest.mark.thorough
@pytest.mark.parametrize("column_of", CASES, ids=map(".".join, CASES))
def test_every_damage_of_every_column_is_named(
    intact: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, column_of: tuple[str, str]
) -> None:
    assert problems_of(intact, tmp_path, monkeypatch, column_of, most=100) == []


def test_one_damaged_run_does_not_hide_the_others(
    intact: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = damaged(intact, tmp_path / "store", "executions", "inputs", "{")
    page = TestClient(create_app(store), base_url="http://localhost").get("/").text
    assert f"/executions/{SOUND}" in page
    assert f"the row &#39;{RUN}&#39; of the table executions in history.db is damaged" in page
    monkeypatch.setenv("NEMO_RL_HOME", str(store.root))
    done = CliRunner().invoke(group, ["runs"])
    assert SOUND in done.stdout
    assert f"not shown: the row '{RUN}' of the table executions" in done.stderr
    assert "inputs: not JSON" in done.stderr


def test_gc_removes_nothing_while_a_row_is_damaged(
    intact: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The artifacts that its run needs are unknown."""
    store = damaged(intact, tmp_path / "store", "executions", "inputs", "{")
    before = sorted(store.artifacts.iterdir())
    monkeypatch.setenv("NEMO_RL_HOME", str(store.root))
    done = CliRunner().invoke(group, ["gc", "--yes", "--keep-runs", "0", "--older-than", "0d"])
    assert "is damaged" in done.output
    assert sorted(store.artifacts.iterdir()) == before


@pytest.mark.parametrize("kind", ["log", "deck", "artifact"])
def test_a_link_in_the_store_is_not_followed_out_of_it(
    intact: Store, tmp_path: Path, kind: str
) -> None:
    shutil.copytree(intact.root, tmp_path / "store")
    store = Store(tmp_path / "store")
    artifact = store.artifacts / f"train_sft-{RUN[-6:]}{'a' * 10}"
    path = {
        "log": store.runs / RUN / "run.log",
        "deck": artifact / "deck.html",
        "artifact": artifact,
    }[kind]
    shutil.move(path, tmp_path / "moved")
    path.symlink_to("/etc" if kind == "artifact" else "/etc/passwd")
    answers = list(every_answer(store))
    assert all(status in (200, 404, 503) for _, status, _, _ in answers)
    assert not [address for address, _, text, _ in answers if SECRET in text]


@pytest.mark.parametrize("part", ["%00", "a%00b", "%ff", "..%2f..", "%2e%2e", "a" * 3000, "%0a"])
def test_odd_addresses_have_the_headers(intact: Store, part: str) -> None:
    client = TestClient(create_app(intact), base_url="http://localhost")
    artifact = f"/artifacts/train_sft-{RUN[-6:]}{'a' * 10}"
    for address in (
        f"/{part}",
        f"/executions/{part}",
        f"/executions/{part}/log",
        f"/nodes/{part}",
        f"/artifacts/{part}",
        f"/artifacts/{part}/files/{part}",
        f"{artifact}/files/{part}",
        f"{artifact}/files/model/{part}",
        f"{artifact}/completions?step={part}&low={part}",
        f"/static/{part}",
        f"/find?q={part}",
        f"/compare?run={part}&run={part}",
        f"/?state={part}&workflow={part}&text={part}&since={part}&offset={part}",
    ):
        answer = client.get(address, follow_redirects=False)
        assert answer.status_code in (200, 303, 307, 400, 404), address
        assert set(answer.headers) >= HEADERS, address
