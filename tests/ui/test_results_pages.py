"""Pages that show results first, and the search, on a copy of the small store."""

import json
import re
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from starlette.testclient import TestClient

from nemo_rl_core.history.queries import History
from nemo_rl_core.store.aliases import Aliases
from nemo_rl_core.store.store import Store
from nemo_rl_core.ui.app import create_app
from nemo_rl_core.ui.results import results_of

FIRST, FAILED = "20260101T000000Z-aaaaaa", "20260101T000003Z-dddddd"
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
