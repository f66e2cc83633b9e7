"""Pages that show results first, and the search, on a copy of the small store."""

import json
import re
import shutil
from pathlib import Path
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from starlette.testclient import TestClient

from nemo_rl_core.history.labels import LABELS, set_labels
from nemo_rl_core.history.queries import History
from nemo_rl_core.store.aliases import Aliases
from nemo_rl_core.store.store import Store
from nemo_rl_core.ui.app import create_app
from nemo_rl_core.ui.compared import _greedy, confidence_of_each, paired
from nemo_rl_core.ui.results import results_of

FIRST, RERUN, FAILED = (f"20260101T00000{n}Z-{c * 6}" for n, c in ((0, "a"), (1, "b"), (3, "d")))
DECISION = {
    "promoted": True,
    "num_prompts": 20,
    "before": 0.6,
    "after": 0.95,
    "difference": 0.35,
    "low": 0.028,
    "high": 0.592,
    "gained": 7,
    "lost": 0,
    "p_value": 0.0156,
    "detectable": 0.4,
    "confidence": 0.95,
}
CARD = """---
license: mit
---
# Title

| a | b |
|---|--:|
| 1 | 2 |

<script>alert(1)</script> [bad](javascript:alert(2)) [good](https://example.org)
"""


@pytest.fixture(scope="module")
def client(made, tmp_path_factory: pytest.TempPathFactory) -> TestClient:
    store = Store(tmp_path_factory.mktemp("results") / "store")
    shutil.copytree(made.store.root, store.root)
    names = made.artifacts
    (store.artifacts / names["train_sft"] / "decision.json").write_text(json.dumps(DECISION))
    evaluation = store.artifacts / names["evaluate"]
    metrics = {"num_prompts": 20.0, "greedy_accuracy": 0.6}
    metrics |= {"greedy_accuracy_low": 0.36, "greedy_accuracy_high": 0.81}
    (evaluation / "metrics.json").write_text(json.dumps(metrics))
    (evaluation / "categories.json").write_text(json.dumps({"add": metrics, "subtract": metrics}))
    model = store.artifacts / names["grpo_iteration 2"]
    (model / "model").mkdir()
    (model / "model" / "README.md").write_text(CARD)
    (model / "model" / "config.json").write_text("{}")
    Aliases(store).move("production", names["grpo_iteration 2"])
    return TestClient(create_app(store), base_url="http://localhost", follow_redirects=False)


def text(client: TestClient, path: str) -> str:
    answer = client.get(path)
    assert answer.status_code == 200, path
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", answer.text))


def test_an_evaluation_shows_figures_categories_and_wrong_prompts_first(client, made) -> None:
    # The rerun made another evaluation whose folder has the id of the same stage name.
    page = text(client, f"/artifacts/{made.artifacts['evaluate']}")
    assert "greedy accuracy 0.6 0.36 to 0.81" in page
    assert re.search(r"add 20 greedy accuracy 0\.6 0\.36 to 0\.81", page)
    assert page.index("greedy accuracy") < page.index("Content hash")
    # 19 of 20 are right.
    assert re.search(r"All of them .* 19\+1= 20 20 Record", page)


def test_a_promotion_shows_its_verdict(client: TestClient, made) -> None:
    page = text(client, f"/artifacts/{made.artifacts['train_sft']}")
    assert "Promoted Before 60.0 % right After 95.0 % right" in page
    assert "+35.0 points, +2.8 to +59.2 at 95 % confidence" in page
    assert "20: 7 gained, 0 lost; McNemar's p 0.0156" in page


def test_a_card_is_rendered_without_its_markup(client: TestClient, made) -> None:
    page = client.get(f"/artifacts/{made.artifacts['grpo_iteration 2']}").text
    card = page[page.index('<div class="card markdown">') :]
    assert "<h3>Title</h3>" in card
    assert "&lt;script&gt;alert(1)" in card and "<script>alert" not in page
    assert 'href="javascript:' not in card and '<a href="https://example.org">good</a>' in card
    assert "style=" not in card
    assert "license: mit</pre>" in card


def test_a_data_set_shows_its_first_rows_and_lengths(tmp_path: Path) -> None:
    prompts = ["1+1=", "12+34=", "five"]
    rows = pa.table({"id": ["a", "b", "c"], "prompt": prompts})
    pq.write_table(rows, tmp_path / "rows.parquet")
    results = results_of("x", tmp_path)
    assert results.num_rows == 3
    assert [row["prompt"] for row in results.rows] == prompts
    (length,) = results.lengths
    assert (length.column, length.shortest, length.median, length.longest) == ("prompt", 4, 4, 6)


def test_damaged_results_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "metrics.json").write_text("[1]")
    (tmp_path / "decision.json").write_text('{"promoted": true, "low": "x"}')
    (tmp_path / "rows.parquet").write_text("no table")
    results = results_of("x", tmp_path)
    assert (results.figures, results.decision, results.rows) == ([], {}, [])


def test_models_have_names_and_their_evaluation(client: TestClient, made) -> None:
    page = text(client, "/models")
    assert re.search(r"production " + made.artifacts["grpo_iteration 2"] + r" 0\.6 greedy", page)


@pytest.mark.parametrize(
    ("query", "where"),
    [
        (FIRST, f"/executions/{FIRST}"),
        (FIRST[:-2], f"/executions/{FIRST}"),
        ("production", "/models#production"),
        ("5f705f70", "/artifacts/train_sft-5f705f705f705f70"),
    ],
)
def test_an_id_a_name_or_a_hash_leads_to_its_page(client, query: str, where: str) -> None:
    assert client.get("/find", params={"q": query}).headers["location"] == where


@pytest.mark.parametrize(
    ("query", "section", "hit"),
    [
        ("prod", "Names", "/models#production"),
        ("num_iterations", "Runs", "config.grpo.num_iterations = 2"),
        ("grpo_iter", "Artifacts", "grpo_iteration-6ad2"),
        ("REWARD", "Metrics", "curves?metric=reward"),
        ("four", "Completions", "completions?step=1&amp;text=four"),
        ("19+1", "Completions", "prompt 19+1"),
    ],
)
def test_the_search_covers_everything(client, query: str, section: str, hit: str) -> None:
    page = client.get("/find", params={"q": query}).text
    assert hit in page[page.index(f">{section}</h2>") :]


def test_a_failed_stage_is_on_the_page_of_its_run(client: TestClient, made) -> None:
    page = client.get(f"/executions/{FAILED}").text
    failed = page[page.index("Failed stages</h2>") :]
    assert f'<a href="/nodes/{made.nodes["failed"]}">train_sft</a>' in failed


def test_a_deck_has_the_colors_of_the_page(client: TestClient, made) -> None:
    deck = client.get(f"/nodes/{made.nodes['train_sft']}/deck").text
    assert deck.startswith("<!doctype html>")
    assert "prefers-color-scheme: dark" in deck and "<h1>Deck of train_sft</h1>" in deck


def test_two_evaluations_are_read_side_by_side(client: TestClient, made) -> None:
    with History(client.app.state.source.store) as history:
        before, after = sorted(
            (history.find_artifact(f"evaluate-e7a{n}").id for n in (1, 2)),
        )
    base = f"/artifacts/{after}/completions?against={before}"
    # 12 and 19 of 20 prompts are right.
    assert "7 of 20 completions" in text(client, f"{base}&only=gained")
    assert "0 of 20 completions" in text(client, f"{base}&only=lost")
    page = text(client, f"{base}&prompt=12%2B1")
    assert re.search(r"Before \(greedy\) 13 · wrong reward 1 greedy correct", page)


def test_wrong_prompts_are_those_of_greedy_completions(tmp_path: Path) -> None:
    texts = dict.fromkeys(("completion", "answer", "prompt"), "1")
    rows = [
        {"prompt_id": prompt, "mode": mode, "correct": correct, "reward": float(correct), **texts}
        for prompt, mode, correct in (
            ("a", "greedy", True), ("a", "sampled", False),
            ("b", "sampled", True), ("b", "greedy", False),
        )
    ]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    (tmp_path / "metrics.json").write_text('{"greedy_accuracy": 0.5}')
    wrong = results_of("x", tmp_path).wrong
    assert [[(row["prompt_id"], row["mode"]) for row in card.rows] for card in wrong] == [
        [("b", "greedy")]
    ]
    assert {key: row["correct"] for key, row in _greedy(str(tmp_path), "").items()} == {
        "a": True,
        "b": False,
    }


def test_lengths_are_of_all_batches_of_a_data_set(tmp_path: Path) -> None:
    rows = pa.table({"prompt": ["a"] * 70_000 + ["abc"] * 10_000 + ["abcdef"]})
    pq.write_table(rows, tmp_path / "rows.parquet")
    (length,) = results_of("x", tmp_path).lengths
    # Row 72,000 of 80,001 is the 90th percentile.
    assert (length.shortest, length.median, length.long, length.longest) == (1, 1, 3, 6)


def test_addresses_without_an_answer_are_refused_and_not_errors(client, made) -> None:
    store, names = client.app.state.source.store, made.artifacts
    base = f"/artifacts/{names['evaluate']}/completions"
    assert client.get(f"{base}?step={'9' * 5000}").status_code == 200
    data = store.artifacts / names["prepare_data"]
    pq.write_table(pa.table({"prompt": ["a"]}), data / "rows.parquet")
    page = text(client, f"{base}?against={names['prepare_data']}&only=lost")
    assert "Gained and lost need another evaluation" in page
    # Rows without completions, such as those of an evaluation of preference pairs.
    assert client.get(f"/artifacts/{data.name}/completions").status_code == 404


def test_damaged_rows_are_a_sentence_of_the_verdict(made, tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    shutil.copytree(made.store.root, store.root)
    with History(store) as history:
        evaluations = [history.find_artifact(f"evaluate-e7a{n}") for n in (1, 2)]
    model = made.artifacts["grpo_iteration 2"]
    (store.artifacts / model / "model").mkdir()
    (store.artifacts / model / "model" / "config.json").write_text("{}")
    for name in ("before", "after"):
        Aliases(store).move(name, model)
    (Path(evaluations[1].path) / "rows.parquet").write_text("no table")
    with TestClient(create_app(store), base_url="http://localhost") as client:
        reason = "The rows of one of them cannot be read"
        assert f"before against after : {reason}" in text(client, "/models")
        page = text(client, f"/compare?run={FIRST}&run={RERUN}")
    assert reason in page
    assert str(paired(*evaluations, confidence=0.95)).startswith(reason)
    assert [confidence_of_each(n) for n in (0, 1)] == [0.95, 0.95]
    assert confidence_of_each(5) == pytest.approx(0.99)


def test_runs_are_found_by_labels_and_dotted_settings(client: TestClient) -> None:
    store = client.app.state.source.store
    set_labels(store, FIRST, name="zebra", tags=["paper"], note="as in table 2")
    try:
        where = client.get("/find", params={"q": "zebra"}).headers["location"]
        assert where == f"/executions/{FIRST}"
        for query in ("zebr", "paper", "TABLE 2"):
            page = client.get("/find", params={"q": query}).text
            assert FIRST in page[page.index(">Runs</h2>") :]
    finally:
        (store.root / LABELS).unlink()
    for query in ("grpo.num_iterations", "num_iterations=2", "grpo.num_iterations = 2"):
        page = text(client, f"/find?q={quote(query)}")
        assert f"{FIRST} grpo, grpo_ci, succeeded config.grpo.num_iterations = 2" in page
        assert ("config.grpo.num_iterations = 3" in page) is ("2" not in query)  # of the rerun


def test_groups_that_no_run_has_are_refused_and_times_are_not_said_to_be_utc(client) -> None:
    page = text(client, "/?group=nope")
    assert "This filter is invalid. no run has the column &#39;nope&#39;" in page
    assert "Since (UTC)" in page and "Times are UTC" not in page
    assert "Times are UTC" in text(client, "/models")
