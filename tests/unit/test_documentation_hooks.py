"""Changes that the documentation build makes to pages."""

from types import SimpleNamespace

import hooks
import pytest


def test_formulas_become_mathml() -> None:
    inline = hooks.on_page_content(r'<p><span class="arithmatex">\(a &lt; b^2\)</span></p>')
    assert inline.startswith(
        '<p><math xmlns="http://www.w3.org/1998/Math/MathML" display="inline">'
    )
    assert "<msup><mi>b</mi><mn>2</mn></msup>" in inline
    block = hooks.on_page_content('<div class="arithmatex">\\[\nx\n\\]</div>')
    assert 'display="block"' in block
    assert "arithmatex" not in inline + block


@pytest.mark.parametrize(
    ("page", "up"), [("index.md", ""), ("algorithms/grpo.md", "../"), ("a/b/c.md", "../../")]
)
def test_pictures_are_those_of_the_site(page: str, up: str) -> None:
    here = SimpleNamespace(file=SimpleNamespace(src_uri=page))
    text = f"![x](../{up}deployment/screenshots/graph.png) [y](../{up}README.md)"
    changed = hooks.on_page_markdown(text, page=here)  # type: ignore[arg-type]
    assert changed == f"![x]({up}deployment/screenshots/graph.png) [y](../{up}README.md)"


@pytest.mark.parametrize(
    ("text", "addresses"),
    [
        ('<script async src="https://a.b/c.js">', ["https://a.b/c.js"]),
        ("<link rel=stylesheet href=//a.b/c.css>", ["//a.b/c.css"]),
        (
            "@import 'https://a.b/c.css'; src: url(http://a.b/f.woff)",
            ["https://a.b/c.css", "http://a.b/f.woff"],
        ),
        ('<a href="https://a.b">x</a><script src="c.js"></script> url(data:x)', []),
    ],
)
def test_external_resources_are_detected(text: str, addresses: list[str]) -> None:
    assert hooks.fetched(text) == addresses
