"""Renewals of a page while something runs, in Chromium, on a small store."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from playwright.sync_api import BrowserContext, expect

from nemo_rl_core.history.writer import HistoryWriter, NewExecution
from nemo_rl_core.store.store import Store

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("chromium")]


def begin(store: Store, name: str) -> HistoryWriter:
    writer = HistoryWriter(store, name)
    log = store.runs / name / "run.log"
    writer.begin(NewExecution("workflows.grpo.grpo", "demo", ["nemo-rl"], {}, log))
    return writer


def test_ticked_runs_stay_ticked_and_focused_while_the_list_is_renewed(
    context: BrowserContext,
    serve: Callable[[Store], AbstractContextManager[str]],
    tmp_path: Path,
) -> None:
    store = Store(tmp_path / "store")
    for name in ("first", "second"):
        begin(store, name).end("succeeded")
    running = begin(store, "third")
    with serve(store) as address:
        page = context.new_page()
        page.goto(address)
        for name in ("first", "second"):
            page.get_by_label(f"Compare {name}").check()
        page.evaluate("document.querySelector('[data-live] table').kept = true")
        begin(store, "fourth").end("failed")
        expect(page.get_by_label("Compare fourth")).to_be_visible(timeout=60_000)
        assert not page.evaluate("document.querySelector('[data-live] table').kept ?? false")
        ticked = page.locator("[name=run]:checked")
        assert sorted(one.input_value() for one in ticked.all()) == ["first", "second"]
        expect(page.get_by_label("Compare second")).to_be_focused()
        running.end("succeeded")


def test_a_part_that_has_not_changed_is_left_as_it_is(
    context: BrowserContext,
    serve: Callable[[Store], AbstractContextManager[str]],
    tmp_path: Path,
) -> None:
    """Times are rewritten in the zone of the browser, so the page differs from the answer."""
    store = Store(tmp_path / "store")
    with serve(store) as address:
        running = begin(store, "run")
        page = context.new_page()
        page.goto(address)
        part = "document.querySelector('[data-live=executions]')"
        html = "<table><caption>one run</caption></table>"
        page.route(f"{address}/", lambda route: route.fulfill(body=_page(html)))
        count = "addEventListener('renewed', () => { document.title = 'renewed'; })"
        page.evaluate(f"document.{count}")

        def renew() -> None:
            page.evaluate("document.title = ''")
            running.begin_node("train", task="t.train", kind="task")
            expect(page).to_have_title("renewed", timeout=20_000)

        renew()
        expect(page.locator("[data-live] caption")).to_have_text("one run")
        page.evaluate(f"{part}.firstChild.kept = true")
        page.evaluate(f"{part}.querySelector('caption').textContent = 'in another zone'")
        page.wait_for_timeout(2500)
        renew()
        assert page.evaluate(f"{part}.firstChild.kept")
        running.end("succeeded")


def _page(part: str) -> str:
    return f'<html data-live-seconds="2"><div data-live="executions">{part}</div></html>'
