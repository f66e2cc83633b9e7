"""A small store with a history, for the fast tests of the page."""

import json
import math
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import BrowserContext, Page, sync_playwright
from starlette.testclient import TestClient

from nemo_rl_core.evals.rows import save_eval_rows
from nemo_rl_core.history.inserts import as_value
from nemo_rl_core.history.writer import HistoryWriter, NewExecution, NodeEnd
from nemo_rl_core.rollouts.records import RolloutRecords
from nemo_rl_core.store.manifest import Cost, Manifest
from nemo_rl_core.store.store import Store
from nemo_rl_core.types import Completion, Prompt, Rollout
from nemo_rl_core.ui.app import create_app
from nemo_rl_core.ui.server import create_server
from tests.commands import RECIPE, Run, run

HOSTILE = (
    "<script>alert(1)</script><img src=x onerror=alert(2)>&amp;'\"{{ 7*7 }}"
    "\x1b[31mred\x00\x07\u202eevil\u2066\u2028 end"
)
FIRST, RERUN, LIVE, FAILED = (f"20260101T00000{n}Z-{c * 6}" for n, c in enumerate("abcd"))


@dataclass
class RecordedStore:
    """A store with a history, and the ids in it."""

    store: Store
    nodes: dict[str, int] = field(default_factory=dict)
    artifacts: dict[str, str] = field(default_factory=dict)
    writers: dict[str, HistoryWriter] = field(default_factory=dict)

    def begin(self, execution: str, **inputs: Any) -> HistoryWriter:
        log = self.store.runs / execution / "run.log"
        log.parent.mkdir(parents=True)
        log.write_text(f"2026-01-01 00:00:00,000 INFO {execution} began\n{HOSTILE}\nthe end\n")
        writer = self.writers[execution] = HistoryWriter(self.store, execution)
        writer.begin(
            NewExecution(
                workflow="workflows.grpo.grpo",
                recipe="grpo_ci",
                command=["pyflyte", "run", "--config", "a b"],
                inputs={"config": {"seed": 3, "grpo": {"num_iterations": 2}, **inputs}},
                log_path=log,
                git_commit="5e1f" * 10,
                git_dirty=True,
                packages={"torch": "2.13.0"},
            )
        )
        return writer

    def artifact(
        self, stage: str, digest: str, kind: str, *parents: Path, **config: Any
    ) -> tuple[Path, Manifest]:
        folder = self.store.artifacts / f"{stage.partition(' ')[0]}-{digest * 4}"
        folder.mkdir(parents=True, exist_ok=True)
        manifest = Manifest(
            kind=kind,
            format="hf",
            stage=stage,
            content_hash=digest * 16,
            step=4,
            config={"seed": 3, **config},
            git_commit="5e1f" * 10,
            parents=tuple(Manifest.read(parent).ref(parent) for parent in parents),
            cost=Cost(wall_seconds=2.0, tokens=10),
        )
        manifest.write(folder)
        (folder / "deck.html").write_text(f"<h1>Deck of {stage}</h1><script>alert(3)</script>")
        self.artifacts[stage] = folder.name
        return folder, manifest


def _rollout(reward: float | None, text: str, sample: int) -> Rollout:
    prompt = Prompt(id="p", text="2+2=", token_ids=(1, 2), answer="4", task="")
    error = "the reward function raised" if reward is None else None
    return Rollout(
        prompt, Completion((3,), (-0.1,), False), text, reward=reward, sample=sample, error=error
    )


def _first_run(made: RecordedStore) -> None:
    writer = made.begin(FIRST)

    def node(name: str, kind: Any = "task", parent: int | None = None, **inputs: str) -> int:
        values = [as_value("config", "Config", {"lr": 0.1, "note": HOSTILE})]
        values += [as_value(key, "Checkpoint", value, value) for key, value in inputs.items()]
        stage = name.partition(" ")[0]
        task = f"tasks.{stage}.{stage}"
        started = writer.begin_node(
            name, task=task, kind=kind, parent=parent, inputs=values, log_from=0
        )
        assert started is not None
        made.nodes[name] = started
        return started

    def end(name: str, folder: Path, manifest: Manifest, **rest: Any) -> None:
        writer.end_node(
            made.nodes[name],
            NodeEnd(
                "succeeded",
                outputs=[as_value("o0", "Checkpoint", folder.name, folder.name)],
                made=[(folder, manifest)],
                deck_path=str(folder / "deck.html"),
                cost=manifest.cost.model_dump(),
                log_to=80,
                **rest,
            ),
        )

    node("prepare_data")
    data = made.artifact("prepare_data", "d1a7", "dataset")
    end("prepare_data", *data, summary="64 rows")
    node("train_sft", dataset=data[0].name)
    sft = made.artifact("train_sft", "5f70", "checkpoint", data[0], lr=0.1)
    end("train_sft", *sft, summary="loss 3 → 1")
    writer.connect(made.nodes["prepare_data"], "o0", made.nodes["train_sft"], "dataset")
    loop = node("iterate", "dynamic", checkpoint=sft[0].name)
    writer.connect(made.nodes["train_sft"], "o0", loop, "checkpoint")
    before, source = sft, made.nodes["train_sft"]
    for k in (1, 2):
        name = f"grpo_iteration {k}"
        target = node(name, parent=loop, checkpoint=before[0].name)
        writer.connect(source, "o0", target, "checkpoint")
        for step in range(1, 5):
            values = {"reward": 0.1 * step * k, "loss": math.nan if step == 2 else 1 / step}
            writer.log_metrics(target, step, {"global_step": 4.0 * (k - 1) + step, **values})
        for second in (20 * k, 20 * k + 1):  # seconds of a run are not steps of a training
            sent = {"machine/network_sent_mib": 1000.0 + second, "machine/memory_total_gib": 8.0}
            writer.log_metrics(target, second, sent)
        after = made.artifact(name, f"6ad{k}", "checkpoint", before[0], data[0], lr=0.1 * k)
        records = RolloutRecords(after[0] / "rollouts")
        records.save(1, [_rollout(0.0, HOSTILE, 0), _rollout(1.0, "four", 1)])
        records.save(2, [_rollout(0.5, "x" * 1_000_000, 0), _rollout(None, "unscored", 1)])
        end(name, *after, summary="reward 0.1 → 0.4")
        before, source = after, target
    writer.end_node(
        loop, NodeEnd("succeeded", outputs=[as_value("o0", "Checkpoint", "x", before[0].name)])
    )
    node("evaluate", checkpoint=before[0].name)
    writer.connect(loop, "o0", made.nodes["evaluate"], "checkpoint")
    report = made.artifact("evaluate", "e7a1", "evaluation", before[0])
    _evaluation(report[0], right=12)
    end("evaluate", *report, summary="60 % right")
    writer.end("succeeded")


def _evaluation(folder: Path, *, right: int) -> None:
    save_eval_rows(
        [
            {
                "prompt_id": f"{n}+1",
                "mode": "greedy",
                "sample": 0,
                "category": "",
                "prompt": f"{n}+1=",
                "completion": str(n + 1),
                "answer": str(n + 1),
                "extracted": str(n + 1),
                "reward": float(n < right),
                "correct": n < right,
                "truncated": False,
                "error": None,
            }
            for n in range(20)
        ],
        folder / "rows.parquet",
    )


def _rerun(made: RecordedStore) -> None:
    """Everything is cached except the evaluation, which has better results."""
    writer = made.begin(RERUN, grpo={"num_iterations": 3})
    for stage in ("prepare_data", "train_sft", "grpo_iteration 1"):
        folder = made.store.artifacts / made.artifacts[stage]
        name = stage.split()[0]
        node = writer.begin_node(stage, task=f"tasks.{name}.{name}", kind="task")
        assert node is not None
        made.nodes[f"cached {stage}"] = node
        output = [as_value("o0", "Checkpoint", folder.name, folder.name)]
        writer.end_node(
            node, NodeEnd("cached", outputs=output, made=[(folder, Manifest.read(folder))])
        )
    node = writer.begin_node("evaluate", task="tasks.evaluate.evaluate", kind="task")
    assert node is not None
    model = made.store.artifacts / made.artifacts["grpo_iteration 2"]
    folder, manifest = made.artifact("evaluate", "e7a2", "evaluation", model)
    _evaluation(folder, right=19)
    output = [as_value("o0", "EvalReport", folder.name, folder.name)]
    writer.end_node(node, NodeEnd("succeeded", outputs=output, made=[(folder, manifest)]))
    writer.end("succeeded")


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RecordedStore]:
    """Four executions: a complete one, its rerun, a running one, and a failed one."""
    made = RecordedStore(Store(tmp_path_factory.mktemp("page") / "store"))
    _first_run(made)
    _rerun(made)
    live = made.begin(LIVE)
    node = live.begin_node("train_sft", task="tasks.train_sft.train_sft", kind="task")
    assert node is not None
    made.nodes["live"] = node
    live.log_metrics(node, 1, {"loss": 2.0})
    failed = made.begin(FAILED, prompt=json.loads('"\\ud800 half a pair"'))
    node = failed.begin_node("train_sft", task="tasks.train_sft.train_sft", kind="task")
    assert node is not None
    made.nodes["failed"] = node
    failed.resumed(node, 7)
    failed.end_node(node, NodeEnd("failed", error=HOSTILE))
    failed.end("failed", HOSTILE)
    yield made
    live.end("succeeded")


@pytest.fixture(scope="session")
def client(made: RecordedStore) -> TestClient:
    return TestClient(create_app(made.store), base_url="http://127.0.0.1:8321")


@contextmanager
def served(store: Store) -> Iterator[str]:
    """Serves a store on a free port with the server of the command."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = create_server(create_app(store))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        thread.join(20)


@pytest.fixture(scope="session")
def serve() -> Callable[[Store], AbstractContextManager[str]]:
    """Serves the page of any store."""
    return served


CHROMIUM = Path("/usr/bin/chromium")
_ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrowserContext]:
    """A browser with a separate profile. Its event loop runs in this thread until it is closed."""
    if not CHROMIUM.exists():
        pytest.fail("no /usr/bin/chromium: run `bash deployment/chromium.sh` as root")
    with sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            tmp_path_factory.mktemp("profile"),
            executable_path=CHROMIUM,
            args=_ARGUMENTS,
            viewport={"width": 1280, "height": 900},
        )
        yield context
        context.close()


def accessibility_faults(page: Page) -> list[str]:
    """Returns elements that break axe's rules, by rule."""
    # Through DevTools, which the page's policy does not restrict.
    page.evaluate((Path(__file__).parent / "vendor" / "axe.min.js").read_text())
    report = page.evaluate("axe.run(document, {iframes: false})")
    return [
        f"{rule['id']}: {node['html'][:200]}"
        for rule in report["violations"]
        for node in rule["nodes"]
    ]


@pytest.fixture
def context(chromium: BrowserContext) -> Iterator[BrowserContext]:
    """The browser; pages that a test opens are closed after it."""
    yield chromium
    for page in chromium.pages[1:]:  # the last one closed would end the browser
        page.close()


@pytest.fixture(scope="package")
def real_store(first_run: Run) -> Iterator[Store]:
    """A pipeline of a few steps by the real command, and its rerun.

    What the tests of this folder add to the store is removed after them.
    """
    again = run(RECIPE, first_run.store)
    assert again.exit_code == 0, again.output[-3000:]
    store = Store(first_run.store)
    artifacts = set(store.artifacts.iterdir())
    yield store
    for added in set(store.artifacts.iterdir()) - artifacts:
        shutil.rmtree(added)


@pytest.fixture(scope="package")
def address(real_store: Store) -> Iterator[str]:
    """The address of the page of the real store."""
    with served(real_store) as address:
        yield address
