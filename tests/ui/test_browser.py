"""Every page in a real headless Chromium, on a real GRPO run and its cached rerun."""

import re
import time
from collections.abc import Iterator

import pytest
from playwright.sync_api import BrowserContext, Page, expect

from nemo_rl_core.history.inserts import as_value
from nemo_rl_core.history.queries import History
from nemo_rl_core.history.records import Execution, Node
from nemo_rl_core.history.writer import HistoryWriter, NewExecution, NodeEnd
from nemo_rl_core.store.manifest import Manifest, ParentRef
from nemo_rl_core.store.store import Store
from tests.ui.conftest import accessibility_faults

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("chromium")]

VIEWS = ("", "/graph", "/nodes", "/timeline", "/curves", "/log")


@pytest.fixture(scope="module")
def history(real_store: Store) -> Iterator[History]:
    with History(real_store) as history:
        yield history


@pytest.fixture(scope="module")
def runs(history: History) -> tuple[Execution, Execution]:
    """The first run and its rerun."""
    rerun, first = history.executions(workflow="grpo").items
    return first, rerun


@pytest.fixture(scope="module")
def nodes(history: History, runs) -> dict[str, Node]:
    """Nodes by name; of the two evaluations, the second."""
    return {node.name: node for node in history.nodes(runs[0].id)}


@pytest.fixture(scope="module")
def checkpoint(history: History, nodes: dict[str, Node]) -> str:
    """The last training artifact."""
    (output,) = [o for o in history.node(nodes["grpo_iteration 2"].id).outputs if o.artifact]
    return output.artifact


def every_page(
    runs, nodes: dict[str, Node], checkpoint: str, artifacts: dict[str, str]
) -> dict[str, str]:
    first, rerun = (run.id for run in runs)
    pages = {f"view {view or '/overview'}": f"/executions/{first}{view}" for view in VIEWS}
    return pages | {
        "executions": "/",
        "rerun": f"/executions/{rerun}/graph",
        "node": f"/nodes/{nodes['grpo_iteration 2'].id}",
        "artifact": f"/artifacts/{checkpoint}",
        "ancestry": f"/artifacts/{checkpoint}/ancestry",
        "completions": f"/artifacts/{checkpoint}/completions",
        "all steps": f"/artifacts/{checkpoint}/completions?step=all&text=1",
        "tokens": f"/artifacts/{checkpoint}/completions?row=0&tint=difference",
        "evaluation": f"/artifacts/{artifacts['evaluate']}",
        "two evaluations": f"/artifacts/{artifacts['evaluate']}/completions"
        f"?against={artifacts['evaluate before']}",
        "promotion": f"/artifacts/{artifacts['promote']}",
        "data": f"/artifacts/{artifacts['prepare_data train']}",
        "export": f"/artifacts/{artifacts['export']}",
        "models": "/models",
        "find": "/find?q=reward",
        "compare": f"/compare?run={first}&run={rerun}",
        "compare one": f"/compare?run={first}",
        "grouped": "/?group=recipe&sort=-reward&open=workflows.grpo.grpo%20",
        "not found": "/executions/none",
    }


@pytest.fixture(scope="module")
def artifacts(history: History, runs) -> dict[str, str]:
    """Ids of artifacts by stage; of the two evaluations also the first."""
    every = history.artifacts_of(runs[0].id)
    first = next(one.id for one in every if one.stage == "evaluate")
    return {one.stage: one.id for one in every} | {"evaluate before": first}


@pytest.fixture(scope="module")
def pages(runs, nodes, checkpoint, artifacts) -> dict[str, str]:
    return every_page(runs, nodes, checkpoint, artifacts)


PAGES = [*(f"view {view or '/overview'}" for view in VIEWS), "executions", "rerun", "node"]
PAGES += ["artifact", "ancestry", "completions", "all steps", "tokens", "evaluation"]
PAGES += ["two evaluations", "promotion", "data", "export", "models", "find", "compare"]
PAGES += ["compare one", "grouped", "not found"]


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_page_is_accessible_and_logs_no_errors(
    context: BrowserContext, address: str, pages: dict[str, str], name: str, scheme: str
) -> None:
    """Axe's rules (contrast, landmarks, names, tables, order of headings), in both themes."""
    page = context.new_page()
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    messages: list[str] = []
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.goto(address + pages[name])
    page.wait_for_timeout(300)

    broken = accessibility_faults(page)
    assert not broken, "\n".join(broken)
    assert [text for text in messages if "404" not in text] == []


@pytest.mark.parametrize("name", PAGES)
def test_a_page_fits_a_narrow_screen(
    context: BrowserContext, address: str, pages: dict[str, str], name: str
) -> None:
    page = context.new_page()
    page.set_viewport_size({"width": 400, "height": 800})
    page.goto(address + pages[name])
    page.wait_for_timeout(200)
    assert page.evaluate("document.documentElement.scrollWidth") <= 400


def test_no_request_leaves_the_machine(
    context: BrowserContext, address: str, pages: dict[str, str]
) -> None:
    requested: set[str] = set()
    page = context.new_page()
    page.on("request", lambda request: requested.add(request.url))
    for path in pages.values():
        page.goto(address + path)
        page.wait_for_load_state("networkidle")
    outside = [url for url in requested if not url.startswith((address + "/", "data:"))]
    assert len(requested) > len(pages)
    assert outside == []


def test_the_graph_shows_the_run_as_it_was(
    context: BrowserContext, address: str, history: History, runs, nodes: dict[str, Node]
) -> None:
    page = context.new_page()
    page.goto(f"{address}/executions/{runs[0].id}/graph")
    page.wait_for_selector("[data-drawn]")

    recorded = history.nodes(runs[0].id)
    drawn = page.locator(".graph a").evaluate_all("all => all.map(a => a.getAttribute('href'))")
    assert sorted(drawn) == sorted(f"/nodes/{node.id}" for node in recorded)

    kinds = {node.id: node.kind for node in recorded}
    artifacts = {(n.id, o.name) for n in recorded for o in history.node(n.id).outputs if o.artifact}
    made = {  # artifacts passed between tasks
        (edge.source, edge.target)
        for edge in history.edges(runs[0].id)
        if kinds[edge.source] == kinds[edge.target] == "task"
        and (edge.source, edge.source_output) in artifacts
    }
    edges = {tuple(map(int, edge.split())) for edge in _edges(page)}
    assert len(made) > 8
    assert made <= edges
    assert not {edge[::-1] for edge in made} & edges
    iterations = nodes["grpo_iteration 1"].id, nodes["grpo_iteration 2"].id
    assert iterations in edges

    plan = nodes["plan_grpo"].id
    assert not any(plan in edge for edge in edges)
    page.get_by_role("button", name="Values").click()
    more = {tuple(map(int, edge.split())) for edge in _edges(page)}
    assert more > edges
    assert (plan, iterations[0]) in more


def _edges(page: Page) -> list[str]:
    return page.locator("[data-edge]").evaluate_all("all => all.map(e => e.dataset.edge)")


def test_nodes_with_inner_nodes_can_be_closed_and_opened_by_keyboard(
    context: BrowserContext, address: str, runs, nodes: dict[str, Node]
) -> None:
    page = context.new_page()
    page.goto(f"{address}/executions/{runs[0].id}/graph")
    page.wait_for_selector("[data-drawn]")
    before = page.locator(".graph a").count()
    outer = nodes["grpo_iteration 1"].parent
    toggle = page.locator(f'[data-toggle="{outer}"]')

    toggle.focus()
    page.keyboard.press("Enter")
    expect(toggle).to_have_attribute("aria-expanded", "false")
    expect(toggle).to_be_focused()
    closed = page.locator(".graph a").count()
    num_inside = sum(node.parent == outer for node in nodes.values())
    assert closed == before - num_inside
    assert any(str(outer) in edge.split() for edge in _edges(page))

    page.keyboard.press(" ")
    expect(toggle).to_have_attribute("aria-expanded", "true")
    assert page.locator(".graph a").count() == before


def test_the_graph_moves_and_zooms_by_keyboard_and_buttons(
    context: BrowserContext, address: str, runs
) -> None:
    page = context.new_page()
    page.goto(f"{address}/executions/{runs[0].id}/graph")
    page.wait_for_selector("[data-drawn]")

    start = _view(page)
    page.locator(".graph > svg").focus()
    page.keyboard.press("+")
    assert _view(page)[2] == pytest.approx(start[2] * 1.25)
    page.keyboard.press("ArrowRight")
    page.keyboard.press("0")
    assert _view(page) == pytest.approx(start)
    page.get_by_role("button", name="Zoom out").click()
    assert _view(page)[2] == pytest.approx(start[2] * 0.8)
    page.get_by_role("button", name="Fit").click()
    assert _view(page) == pytest.approx(start)


def _view(page: Page) -> list[float]:
    """Returns the offset and the scale of the graph."""
    text = page.locator("[data-layer]").get_attribute("transform")
    return [float(number) for number in re.findall(r"-?[\d.]+", text)]


def test_a_growing_graph_stays_in_view_until_a_reader_moves_it(
    context: BrowserContext, address: str, real_store: Store
) -> None:
    writer = HistoryWriter(real_store, f"growing-{time.time_ns()}")
    log = real_store.runs / "growing" / "run.log"
    writer.begin(NewExecution("workflows.live.live", "", ["pyflyte"], {}, log))
    before = [writer.begin_node("stage 0", task="tasks.s.s", kind="task")]

    def grow(number: int) -> None:
        for k in range(number):
            node = writer.begin_node(f"stage {len(before)}", task="tasks.s.s", kind="task")
            output = as_value("o0", "CheckpointArtifact", "s", f"s-{k}")
            writer.end_node(before[-1], NodeEnd("succeeded", outputs=[output]))
            writer.connect(before[-1], "o0", node, "start")
            before.append(node)

    page = context.new_page()
    page.goto(f"{address}/executions/{writer._id}/graph")
    page.wait_for_selector("[data-drawn]")
    assert _view(page)[2] == 1
    page.locator(".graph a").focus()
    grow(6)
    expect(page.locator(".graph a")).to_have_count(7, timeout=120_000)
    assert _view(page)[2] < 1
    expect(page.locator(".graph a").first).to_be_focused()

    page.get_by_role("button", name="Zoom out").click()
    moved = _view(page)
    grow(3)
    expect(page.locator(".graph a")).to_have_count(10, timeout=120_000)
    assert _view(page) == pytest.approx(moved)
    writer.end("succeeded")


def test_the_rerun_is_all_cached_and_links_to_the_first_run(
    context: BrowserContext, address: str, history: History, runs
) -> None:
    first, rerun = runs
    again = [node for node in history.nodes(rerun.id) if node.state == "cached"]
    every_time = {"plan_grpo", "announce"}
    tasks = [node for node in history.nodes(first.id) if node.kind == "task"]
    before = [node for node in tasks if node.name not in every_time]
    assert [node.name for node in again] == [node.name for node in before]
    page = context.new_page()
    page.goto(f"{address}/executions/{rerun.id}/nodes")
    assert page.locator("tbody .state-cached").count() == len(again)

    for node, made in zip(again, before, strict=True):
        assert node.cached_from == made.id
        page.goto(f"{address}/nodes/{node.id}")
        source = page.locator(".card a").first
        expect(source).to_have_text(made.name)
        expect(source).to_have_attribute("href", f"/nodes/{made.id}")
        expect(page.locator(f'.card a[href="/executions/{first.id}"]')).to_be_visible()


def test_from_the_list_to_a_checkpoints_data_by_clicking(
    context: BrowserContext, address: str, history: History, runs, checkpoint: str
) -> None:
    page = context.new_page()
    page.goto(address)
    page.get_by_role("link", name=runs[0].id).click()
    page.get_by_role("link", name="Nodes").click()
    page.get_by_role("rowheader", name="grpo_iteration 2").get_by_role("link").click()
    page.locator(f'a[href="/artifacts/{checkpoint}"]').first.click()
    page.get_by_role("link", name="Ancestry").click()

    page.wait_for_selector("[data-drawn]")
    ancestors = history.ancestry(checkpoint)
    for one in ancestors.artifacts:
        row = page.locator(f'tr[id="{one.id}"]')
        expect(row).to_contain_text(one.content_hash[:16])
    stages = {one.artifact.stage.split()[0] for one in ancestors.artifacts}
    assert {"prepare_data", "train_sft", "grpo_iteration"} <= stages
    assert {tuple(edge.split()) for edge in _edges(page)} == {
        (link.parent, link.child) for link in ancestors.parentage
    }
    expect(page.get_by_role("heading", name="train_sft against prepare_model")).to_be_visible()
    same = page.locator("h3:text('Nothing differs') + p")
    expect(same).to_have_text("grpo_iteration 2 against grpo_iteration 1.")


def test_completions_of_a_step_are_read_and_filtered(
    context: BrowserContext, address: str, checkpoint: str
) -> None:
    page = context.new_page()
    page.goto(f"{address}/artifacts/{checkpoint}/completions")
    steps = page.locator("select[name=step]").locator("option").all_inner_texts()[1:]
    assert len(steps) >= 4
    page.locator("select[name=step]").select_option(steps[0])
    page.get_by_label("Order").select_option("best")
    page.get_by_role("button", name="Filter").click()
    expect(
        page.get_by_role("heading", name=f"16 of 16 completions of step {steps[0]}")
    ).to_be_visible()
    figures = page.locator(".answers .figures > span:first-child strong").all_inner_texts()
    assert len(figures) >= 4
    assert float(figures[0]) == max(float(figure) for figure in figures)

    page.get_by_label("Reward from").fill("2")
    page.get_by_role("button", name="Filter").click()
    expect(page.get_by_text("No completion passes the filter.")).to_be_visible()


def test_keys_lead_to_steps_and_to_the_search(
    context: BrowserContext, address: str, checkpoint: str
) -> None:
    page = context.new_page()
    page.goto(f"{address}/artifacts/{checkpoint}/completions")
    steps = page.locator("select[name=step] option").all_inner_texts()[1:]
    page.keyboard.press("[")
    expect(page.get_by_role("heading", name=f"completions of step {steps[-2]}")).to_be_visible()
    page.keyboard.press("]")
    expect(page.get_by_role("heading", name=f"completions of step {steps[-1]}")).to_be_visible()
    page.keyboard.press("/")
    page.keyboard.type("/[reward")
    expect(page.locator("#find")).to_have_value("/[reward")


def test_tokens_of_a_completion_join_to_its_text(
    context: BrowserContext, address: str, checkpoint: str
) -> None:
    page = context.new_page()
    page.goto(f"{address}/artifacts/{checkpoint}/completions?only=truncated")
    page.get_by_role("link", name="tokens").first.click()
    answer = page.locator(".answers .text").first.inner_text()
    assert page.locator(".tokens .token").all_inner_texts()
    assert "".join(page.locator(".tokens .token").all_inner_texts()) == answer


def test_a_deck_is_shown_in_its_frame(
    context: BrowserContext, address: str, nodes: dict[str, Node]
) -> None:
    page = context.new_page()
    page.goto(f"{address}/nodes/{nodes['grpo_iteration 2'].id}")
    page.locator("iframe").scroll_into_view_if_needed()
    deck = page.frame_locator("iframe")
    expect(deck.locator("svg").first).to_be_visible()
    expect(deck.get_by_text("completion", exact=True).first).to_be_visible()


def test_two_runs_are_chosen_in_the_list_and_compared(
    context: BrowserContext, address: str, runs
) -> None:
    page = context.new_page()
    page.goto(address)
    for run in runs:
        page.get_by_label(f"Compare {run.id}").check()
    page.get_by_role("button", name="Compare the chosen runs").click()
    expect(page.get_by_text("No setting differs.")).to_be_visible()
    expect(page.get_by_text("No difference shown at 95 % confidence").first).to_be_visible()
    chart = page.get_by_role("img", name=re.compile("grpo_iteration: reward over steps 1 to 24"))
    assert chart.locator("polyline").count() == 2


def test_the_list_is_sorted_and_grouped_by_links_and_has_local_times(
    context: BrowserContext, address: str, runs
) -> None:
    page = context.new_page()
    page.goto(address)
    row = page.get_by_role("row").filter(has_text=runs[0].id)
    # The evaluations are of 16 prompts; the last training has 2 iterations of 12 steps.
    expect(row.locator("[data-label=Accuracy]")).to_have_text(
        re.compile(r"^\d+\.\d → \d+\.\d % \[\d+\.\d, \d+\.\d\]$")
    )
    expect(row.locator("[data-label=Step]")).to_have_text("24 of 24")
    expect(row.locator(".spark polyline")).to_have_count(1)
    at = row.locator("time")
    expected = page.evaluate(
        "at => new Date(at).toLocaleTimeString('sv').slice(0, 5)", at.get_attribute("datetime")
    )
    expect(at.locator("span")).to_have_text(re.compile(f"{expected}$"))

    page.get_by_role("link", name="Reward", exact=True).click()
    assert "sort=-reward" in page.url
    expect(page.get_by_role("columnheader", name="Reward")).to_have_attribute(
        "aria-sort", "descending"
    )
    page.get_by_label("Group by").select_option("recipe")
    page.get_by_role("button", name="Apply").click()
    assert {"sort=-reward", "group=recipe"} <= set(page.url.partition("?")[2].split("&"))
    page.get_by_role("link", name="grpo", exact=False).first.click()
    expect(page.get_by_label(f"Compare {runs[0].id}")).to_be_visible()


def test_the_content_can_be_reached_by_keyboard_only(context: BrowserContext, address: str) -> None:
    page = context.new_page()
    page.goto(address)
    page.keyboard.press("Tab")
    expect(page.get_by_text("Skip to the content")).to_be_in_viewport()
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()
    page.keyboard.press("Tab")
    focused = page.evaluate("document.activeElement.name")
    assert focused == "state"
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineWidth")
    assert outline == "3px"


def test_a_running_run_is_shown_live(
    context: BrowserContext, address: str, real_store: Store
) -> None:
    """Nodes, curves and states appear without a reload, and requests end with the run."""
    writer = HistoryWriter(real_store, f"live-{time.time_ns()}")
    log = real_store.runs / "live" / "run.log"
    writer.begin(NewExecution("workflows.live.live", "", ["pyflyte"], {}, log))
    node = writer.begin_node("train_sft", task="tasks.train_sft.train_sft", kind="task")
    writer.log_metrics(node, 1, {"loss": 3.0})
    run = writer._id
    curves, graph = context.new_page(), context.new_page()
    curves.goto(f"{address}/executions/{run}/curves")
    graph.goto(f"{address}/executions/{run}/graph")
    expect(graph.locator(".graph a")).to_have_count(1)
    curves.evaluate("window.kept = true")

    writer.log_metrics(node, 2, {"loss": 1.5})
    output = as_value("o0", "CheckpointArtifact", "train_sft", "train_sft-0")
    writer.end_node(node, NodeEnd("succeeded", outputs=[output]))
    other = writer.begin_node("evaluate", task="tasks.evaluate.evaluate", kind="task")
    writer.connect(node, "o0", other, "model")
    expect(curves.get_by_text("last 1.5")).to_be_visible(timeout=120_000)
    expect(graph.locator(".graph a")).to_have_count(2, timeout=120_000)
    assert _edges(graph) == [f"{node} {other}"]

    writer.end("succeeded")
    expect(curves.locator("h1 + .state-succeeded")).to_be_visible(timeout=120_000)
    curves.wait_for_selector("html[data-live-ended]", state="attached", timeout=120_000)
    assert curves.evaluate("window.kept")  # it was never reloaded


def test_a_run_of_many_nodes_opens_as_a_few_boxes_and_can_be_opened(
    context: BrowserContext, address: str, real_store: Store
) -> None:
    writer = HistoryWriter(real_store, f"large-{time.time_ns()}")
    log = real_store.runs / "large" / "run.log"
    writer.begin(NewExecution("workflows.large.large", "", ["pyflyte"], {}, log))
    before = None
    for loop in range(10):
        holder = writer.begin_node(f"loop {loop}", task="tasks.loop.loop", kind="dynamic")
        for step in range(12):
            node = writer.begin_node(f"step {step}", task="tasks.s.s", kind="task", parent=holder)
            output = as_value("o0", "CheckpointArtifact", "s", f"s-{node}")
            writer.connect(before, "o0", node, "start")
            writer.end_node(node, NodeEnd("succeeded", outputs=[output]))
            before = node
        writer.end_node(holder, NodeEnd("succeeded"))
    writer.end("succeeded")

    page = context.new_page()
    page.goto(f"{address}/executions/{writer._id}/graph")
    page.wait_for_selector("[data-drawn]")
    assert page.locator(".graph a").count() == 10
    assert len(_edges(page)) == 9

    for _ in range(10):
        page.locator('[data-toggle][aria-expanded="false"]').first.press("Enter")
    assert page.locator(".graph a").count() == 130
    assert len(_edges(page)) == 119


def test_many_ancestors_of_a_stage_open_as_one_box_that_leads_to_the_table(
    context: BrowserContext, address: str, real_store: Store
) -> None:
    before: list[ParentRef] = []
    number, stamp = 16, time.time_ns()
    for k in range(1, number + 1):
        folder = real_store.artifacts / f"long_training-{stamp + k:x}"
        folder.mkdir()
        manifest = Manifest(
            kind="checkpoint",
            format="hf",
            stage=f"long_training {k}",
            content_hash=f"{stamp + k:064x}",
            parents=tuple(before),
        )
        manifest.write(folder)
        before = [manifest.ref(folder)]

    page = context.new_page()
    page.goto(f"{address}/artifacts/{folder.name}/ancestry")
    page.wait_for_selector("[data-drawn]")
    assert page.locator(".graph a").count() == 2
    assert len(_edges(page)) == 1
    page.get_by_role("link", name=re.compile("long_training 1 to 15")).press("Enter")
    expect(page.locator("tr:target")).to_be_in_viewport()

    page.locator('[data-toggle][aria-expanded="false"]').press("Enter")
    assert page.locator(".graph a").count() == number + 1
    assert len(_edges(page)) == number - 1
