"""The search of the built documentation answers the questions of a newcomer."""

import functools
import http.server
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import BrowserContext, Page

from tests.commands import REPOSITORY

pytestmark = pytest.mark.thorough

NUM_SHOWN = 4
"""Results that a reader looks at."""

ANSWERS = {
    "own dataset": "data.html",
    "keys of grpo": "reference/recipes/grpo.html",
    "8 GPUs": "gpus.html",
    "resume": "runs.html",
    "beta": "algorithms/grpo.html",
    "wandb": "metrics.html",
    "add a tool": "environments.html",
    "evaluate GSM8K": "evaluation.html",
    "serve": "tutorials/serve.html",
    "LoRA": "models.html",
    "out of memory": "troubleshooting.html",
    "stop strings": "environments.html",
    "export GGUF": "models.html",
    "DPO data": "algorithms/dpo.html",
    "custom reward": "rewards.html",
    "sweep": "sweeps.html",
    "Docker": "docker.html",
    "Slurm": "slurm.html",
    "compare runs": "runs.html",
    "cost": "lineage.html",
    "learning rate schedule": "algorithms/sft.html",
    "push to hub": "models.html",
    "KL too high": "metrics.html",
}
"""The page with the answer, by what a newcomer types."""


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None: ...


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of the documentation, built from this checkout."""
    folder = tmp_path_factory.mktemp("site")
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", folder],
        cwd=REPOSITORY,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        check=True,
    )
    handler = functools.partial(_Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def test_questions_are_answered_among_the_first_results(context: BrowserContext, site: str) -> None:
    page = context.new_page()
    results = {question: pages_found(page, site, question) for question in ANSWERS}
    missed = {
        question: paths[:NUM_SHOWN]
        for question, paths in results.items()
        if ANSWERS[question] not in paths[:NUM_SHOWN]
    }
    assert missed == {}


def pages_found(page: Page, site: str, question: str) -> list[str]:
    """Returns the pages that the search shows, best first."""
    page.goto(f"{site}index.html?q={question}")
    page.locator(".md-search-result__item").first.wait_for(state="attached")
    links = page.locator(".md-search-result__item > .md-search-result__link:first-child")
    paths = [link.get_attribute("href") or "" for link in links.all()]
    return [
        Path(path.partition("?")[0].partition("#")[0].removeprefix(site)).as_posix()
        for path in paths
    ]
