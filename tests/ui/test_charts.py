"""Interactive charts and live pages in Chromium, on a real GRPO run and on a running one."""

import math
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import BrowserContext, Page, expect

from nemo_rl_core.history.queries import History
from nemo_rl_core.history.writer import HistoryWriter, NewExecution
from nemo_rl_core.store.store import Store
from nemo_rl_core.types import StepReport

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("chromium")]
SECONDS = 60_000


@pytest.fixture(scope="module")
def curves(real_store: Store, address: str) -> str:
    """The address of the curves of the first run."""
    with History(real_store) as history:
        return f"{address}/executions/{history.executions(workflow='grpo').items[-1].id}/curves"


@pytest.fixture
def alarming(real_store: Store, address: str) -> Iterator[str]:
    """The address of a running run with alarms."""
    writer = HistoryWriter(real_store, f"alarming-{time.time_ns()}")
    log = real_store.runs / "alarming" / "run.log"
    writer.begin(NewExecution("workflows.live.live", "", ["nemo-rl"], {}, log))
    node = writer.begin_node("train 1", task="tasks.train.train", kind="task")
    for step in range(1, 40):
        values = {"reward": step / 40, "kl": step / 40, "loss": math.nan if step == 9 else 1 / step}
        values |= {"global_step": float(step), "num_valid_tokens": 10.0}
        writer.log_step(node, StepReport("train", step, 50, values))
    yield f"{address}/executions/{writer._id}"
    writer.end("succeeded")


def opened(context: BrowserContext, url: str) -> Page:
    page = context.new_page()
    page.goto(url)
    page.wait_for_selector("[data-drawn]", state="attached")
    return page


def chart(page: Page, name: str, stage: str = "grpo_iteration"):
    title = page.locator("figcaption > span:first-child", has_text=re.compile(f"^{name}$"))
    return page.locator(f"[data-stage={stage}] figure").filter(has=title)


def values(page: Page, name: str) -> str:
    return chart(page, name).locator(".values").inner_text()


def test_the_crosshair_shows_the_recorded_values_in_every_chart(
    context: BrowserContext, curves: str, real_store: Store
) -> None:
    page = opened(context, curves)
    plot = chart(page, "reward").locator(".u-over")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    page.mouse.move(box["x"] + box["width"] * (16 - 1) / 23, box["y"] + 50)
    with History(real_store) as history:
        run = history.executions(workflow="grpo").items[-1]
        node = next(n for n in history.nodes(run.id) if n.name == "grpo_iteration 2")
        recorded = history.metrics(node.id, names=["reward", "grad_norm", "kl"])
    for name, points in recorded.items():
        step, value = re.match(r"step (\d+)\s+(\S+)", values(page, name)).groups()
        assert step == "16"
        assert float(value) == pytest.approx(dict(points)[16], rel=1e-3)
    page.mouse.move(5, 5)
    expect(chart(page, "reward").locator(".values")).to_contain_text("last ")


def test_a_drag_zooms_every_chart_of_the_stage_and_the_address_keeps_it(
    context: BrowserContext, curves: str
) -> None:
    page = opened(context, curves)
    plot = chart(page, "reward").locator(".u-over")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.25, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 60, steps=4)
    page.mouse.up()
    expect(page.get_by_role("button", name="Full range")).to_be_visible()
    stage, first, last = re.search(r"zoom=(\w+)%3A(\d+)%3A(\d+)", page.url).groups()
    assert (stage, 5 <= int(first) <= 8, 13 <= int(last) <= 16) == ("grpo_iteration", True, True)
    label = re.compile(rf"over steps {first} to {last}:")
    for name in ("reward", "kl"):
        expect(chart(page, name).locator(".plot")).to_have_attribute("aria-label", label)
    expect(chart(page, "loss", "train_sft").locator(".plot")).to_have_attribute(
        "aria-label", re.compile("over steps 1 to 6:")
    )

    again = opened(context, page.url)
    expect(chart(again, "kl").locator(".plot")).to_have_attribute("aria-label", label)
    again.get_by_role("button", name="Full range").click()
    full_range = re.compile("over steps 1 to 24:")
    expect(chart(again, "kl").locator(".plot")).to_have_attribute("aria-label", full_range)
    assert "zoom" not in again.url


def test_controls_are_kept_in_the_address(context: BrowserContext, alarming: str) -> None:
    page = opened(context, f"{alarming}/curves")
    page.get_by_label("logarithmic").check()
    page.get_by_label("Smoothing").fill("0.5")
    page.locator("select[name=x]").select_option("tokens")
    label = re.compile("over tokens trained on 10 to 390:")
    expect(chart(page, "reward", "train").locator(".plot")).to_have_attribute("aria-label", label)
    page.locator("summary", has_text="Choose metrics").click()
    page.locator("input[name=show][value=kl]").uncheck()
    expect(chart(page, "kl", "train")).to_have_count(0)

    again = opened(context, page.url)
    assert again.get_by_label("logarithmic").is_checked()
    assert again.get_by_label("Smoothing").input_value() == "0.5"
    expect(chart(again, "reward", "train").locator(".plot")).to_have_attribute("aria-label", label)
    expect(chart(again, "kl", "train")).to_have_count(0)


def test_smoothing_is_the_debiased_exponential_mean(context: BrowserContext, alarming: str) -> None:
    page = opened(context, f"{alarming}/curves?smooth=0.5")
    plot = chart(page, "reward", "train").locator(".plot")
    plot.focus()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    text = chart(page, "reward", "train").locator(".values").inner_text()
    step = int(re.search(r"step (\d+)", text)[1])
    total = norm = 0.0
    for each in range(1, step + 1):
        total, norm = 0.5 * total + 0.5 * each / 40, 0.5 * norm + 0.5
    smoothed = float(re.search(r"smoothed (\S+)", text)[1])
    assert smoothed == pytest.approx(total / norm, rel=1e-3)


def test_a_chart_is_enlarged_and_read_by_keyboard(context: BrowserContext, curves: str) -> None:
    page = opened(context, curves)
    chart(page, "kl").get_by_role("button", name="Enlarge").press("Enter")
    dialog = page.get_by_role("dialog", name="kl")
    assert dialog.locator(".plot").bounding_box()["height"] > 500
    assert "full=kl" in page.url
    dialog.locator(".plot").focus()
    page.keyboard.press("ArrowLeft")
    expect(dialog.locator(".values")).to_contain_text("step 2")
    page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)
    expect(chart(page, "kl").get_by_role("button", name="Enlarge")).to_be_focused()
    assert "full" not in page.url


def test_a_chart_is_saved_as_csv_png_and_svg(
    context: BrowserContext, curves: str, tmp_path: Path
) -> None:
    page = opened(context, curves)
    files = {}
    for kind in ("CSV", "PNG", "SVG"):
        with page.expect_download() as download:
            chart(page, "reward").get_by_text(kind, exact=True).click()
        download.value.save_as(tmp_path / kind)
        files[kind] = (tmp_path / kind).read_bytes()
    assert len(files["CSV"].splitlines()) == 25
    assert files["PNG"].startswith(b"\x89PNG")
    svg = files["SVG"].decode()
    assert svg.startswith("<svg") and svg.count(",") > 24 and ">reward<" in svg


def test_without_scripts_the_server_draws(chromium: BrowserContext, curves: str) -> None:
    page = chromium.new_page()
    page.route("**/*.js*", lambda route: route.abort())
    page.goto(f"{curves}?show=reward&x=step")
    expect(page.locator("figure svg polyline").first).to_be_visible()
    expect(page.get_by_label("Smoothing")).to_be_hidden()
    page.locator("summary", has_text="Choose metrics").click()
    page.locator("input[name=show][value=kl]").check()
    page.get_by_role("button", name="Show").click()
    expect(page.get_by_role("img", name=re.compile("kl over steps 1 to 24"))).to_be_visible()
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1440, 390])
def test_alarms_and_charts_are_accessible_and_fit(
    context: BrowserContext, alarming: str, scheme: str, width: int
) -> None:
    page = context.new_page()
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    messages: list[str] = []
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    for view in ("", "/curves?smooth=0.6&log=1", "/curves?full=kl"):
        page.goto(alarming + view)
        page.wait_for_timeout(800)
        expect(page.locator(".badge")).to_have_text("1")  # the other one is over
        for summary in page.locator(".alarms summary, .chooser summary").all():
            if "full" not in view:
                summary.click()
        page.evaluate((Path(__file__).parent / "vendor" / "axe.min.js").read_text())
        report = page.evaluate("axe.run(document, {iframes: false})")
        assert [(rule["id"], rule["nodes"][0]["html"]) for rule in report["violations"]] == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert messages == []
    expect(chart(page, "loss", "train").locator(".alarm")).to_have_text(
        "▼ Not a number: is NaN or infinite, until 9"
    )


def test_a_step_appears_without_polling(
    context: BrowserContext, address: str, real_store: Store
) -> None:
    writer = HistoryWriter(real_store, f"quiet-{time.time_ns()}")
    log = real_store.runs / "quiet" / "run.log"
    writer.begin(NewExecution("workflows.live.live", "", ["nemo-rl"], {}, log))
    node = writer.begin_node("train 1", task="tasks.train.train", kind="task")
    for step in (1, 2):
        writer.log_step(node, StepReport("train", step, 9, {"reward": step / 10}))
    page = opened(context, f"{address}/executions/{writer._id}/curves")
    page.wait_for_timeout(4000)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.wait_for_timeout(5000)
    assert asked == []
    writer.log_step(node, StepReport("train", 3, 9, {"reward": 0.7}))
    expect(chart(page, "reward", "train").locator(".values")).to_have_text(
        "last 0.7", timeout=SECONDS
    )
    expect(page.locator(".now")).to_contain_text("3 of 9", timeout=SECONDS)
    other = writer.begin_node("evaluate", task="tasks.evaluate.evaluate", kind="task")
    for step in (1, 2):
        writer.log_step(other, StepReport("evaluate", step, 2, {"accuracy": step / 4}))
    expect(chart(page, "accuracy", "evaluate")).to_be_visible(timeout=SECONDS)
    writer.end("succeeded")
    page.wait_for_selector("html[data-live-ended]", state="attached", timeout=SECONDS)
    expect(page.locator("h1 + .state-succeeded")).to_be_visible()
