"""A run or a comparison as one HTML file, which needs no server and makes no requests."""

import base64
import hashlib
import re
from html import escape
from pathlib import Path
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response

from nemo_rl_core.ui import completions
from nemo_rl_core.ui.completions import Card, Filter
from nemo_rl_core.ui.pages import compare, curves, executions
from nemo_rl_core.ui.pages.parameters import history_of
from nemo_rl_core.ui.reading import readings
from nemo_rl_core.ui.templating import STATIC, render

_PROMPTS, _ROWS = 5, 8
_STYLE = re.compile(r'<link rel="stylesheet" href="/static/([^"?]+)[^"]*">')
_SCRIPT = re.compile(r'<script src="/static/([^"?]+)[^"]*" defer></script>')
_LINK = re.compile(r'<a [^>]*href="[/?][^"]*"[^>]*>(.*?)</a>', re.DOTALL)


def run(request: Request) -> Response:
    """Returns a run: facts, first curves of each stage, and completions of its last step."""
    history = history_of(request)
    one = history.execution(request.path_params["execution"])
    cards = _cards(request, one.id)
    page = render(
        request,
        "shared_run.html",
        shared=True,
        run=one,
        tab="run",
        charts_data=curves.chart_data(request, one),
        readings=readings(cards),
        numbers=(),
        searched=bool(cards) and cards[0].source.step is not None,
        tokens={},
        is_single=False,
        **executions.overview_content(request, one) | curves.content(request, one),
    )
    return _file(request, page, one.id)


def comparison(request: Request) -> Response:
    """Returns a comparison of the runs that the address names."""
    return _file(request, compare.compare(request, shared=True), "comparison")


def _cards(request: Request, execution: str) -> list[Card]:
    """Returns the first prompts of the last step of training, or else of the last evaluation."""
    files = [
        source
        for one in reversed(history_of(request).artifacts_of(execution))
        if completions.has_completions(Path(one.path))
        for source in completions.sources(one.id, Path(one.path))
    ]
    files.sort(key=lambda each: each.step is None)
    cards = completions.scan(files, Filter(), limit=_PROMPTS).cards
    return [card._replace(rows=card.rows[:_ROWS]) for card in cards]


def _file(request: Request, page: Response, name: str) -> Response:
    """Returns a page with its styles and scripts inside; links into the store become text."""
    html = _without_folders(bytes(page.body).decode(), request.app.state.source.store.root)
    scripts = [(STATIC / path).read_text() for path in _SCRIPT.findall(html)]
    hashes = [base64.b64encode(hashlib.sha256(each.encode()).digest()) for each in scripts]
    sources = " ".join(f"'sha256-{each.decode()}'" for each in hashes)
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src {sources}"
    tag = f'<meta http-equiv="content-security-policy" content="{policy}">'
    html = _LINK.sub(r"<span>\1</span>", _SCRIPT.sub("", html))
    html = _STYLE.sub(lambda link: f"<style>{(STATIC / link[1]).read_text()}</style>", html)
    head, _, tail = html.replace("<head>", f"<head>\n  {tag}", 1).rpartition("</body>")
    return Response(
        "".join([head, *(f"<script>{each}</script>" for each in scripts), "</body>", tail]),
        media_type="text/html; charset=utf-8",
        headers={"content-disposition": f'attachment; filename="{quote(name, safe="")}.html"'},
    )


def _without_folders(html: str, store: Path) -> str:
    """Replaces the store and the home folder, whose path names the user."""
    for folder, shown in ((store, "STORE"), (Path.home(), "~")):
        if folder != Path(folder.anchor):
            html = re.sub(rf"(?<![\w./~-]){re.escape(escape(str(folder)))}(?![\w.-])", shown, html)
    return html
