"""Hooks that mkdocs calls during a build.

It adds the generated pages, turns formulas into MathML, and warns of a page or style that would ask
another host for something; a strict build fails with a warning.
"""

import html
import logging
import re
from pathlib import Path
from typing import Any

from generate import api, commands, notebooks, recipes
from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

REPOSITORY = Path(__file__).resolve().parents[1]
SCREENSHOTS = "deployment/screenshots"

logger = logging.getLogger("mkdocs.hooks")

_FETCHED = re.compile(
    r"<(?:script|img|iframe|source|video|audio)\b[^>]*\bsrc=[\"']?((?:https?:)?//[^\"'\s>]+)"
    r"|<link\b[^>]*\bhref=[\"']?((?:https?:)?//[^\"'\s>]+)"
    r"|(?:url\(|@import\s+)[\"']?((?:https?:)?//[^\"')\s]+)"
)
_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fills the group `Reference` of the navigation."""
    config.nav = [
        {"Reference": _reference_nav()} if "Reference" in each else each
        for each in config.nav or []
    ]
    return config


def _reference_nav() -> list[Any]:
    sections = [path for path in recipes.pages() if not path.endswith("index.md")]
    return [
        {"Recipes": [f"{recipes.FOLDER}/index.md", *sections]},
        {"Commands": list(commands.pages())},
        {"Python": list(api.pages())},
    ]


def _generated() -> dict[str, str]:
    return {**recipes.pages(), **commands.pages(), **api.pages(), **notebooks.pages()}


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Adds the generated pages, the change log and the screenshots."""
    for path, text in _generated().items():
        files.append(File.generated(config, path, content=text))
    files.append(
        File.generated(config, "changelog.md", abs_src_path=str(REPOSITORY / "CHANGELOG.md"))
    )
    for picture in sorted((REPOSITORY / SCREENSHOTS).glob("*.png")):
        name = f"{SCREENSHOTS}/{picture.name}"
        files.append(File.generated(config, name, abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    """Points at the site's copies of screenshots, which are outside of `docs/` in the repository.

    The search shows hand-written pages above generated ones that match as well.
    """
    if page.file.src_uri.startswith("reference/"):
        page.meta["search"] = {"boost": 0.3 if "/api/" in page.file.src_uri else 0.7}
    up = "../" * page.file.src_uri.count("/")
    return re.sub(rf"\]\((\.\./)+{SCREENSHOTS}/", f"]({up}{SCREENSHOTS}/", markdown)


def on_page_content(content: str, **_: Any) -> str:
    """Replaces each formula that `pymdownx.arithmatex` found by MathML."""
    return _FORMULA.sub(_as_mathml, content)


def _as_mathml(found: re.Match[str]) -> str:
    display = "block" if found[1] == "div" else "inline"
    return str(convert(html.unescape(found[2]).strip(), display=display))


def on_post_build(config: MkDocsConfig, **_: Any) -> None:
    """Warns of what a browser would fetch from another host."""
    for path in sorted(Path(config.site_dir).rglob("*")):
        if path.suffix in (".css", ".html"):
            for address in fetched(path.read_text()):
                logger.warning("%s asks for %s", path.relative_to(config.site_dir), address)


def fetched(text: str) -> list[str]:
    """Addresses on other hosts that a page or style has a browser fetch; links are none."""
    return [next(filter(None, found)) for found in _FETCHED.findall(text)]
