"""The reference of recipes: a page for each section, and an index of pipelines and sections."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pydantic import BaseModel

from generate.pipelines import Pipeline, pipelines
from tasks.cli.recipe.recipe_keys import Key, Table, keys_of, pretrained_defaults, tables

FOLDER = "reference/recipes"
Kinds = frozenset[type[BaseModel]]


@dataclass(frozen=True)
class Section:
    """A section of recipes that has a page.

    Attributes:
        name: The key at the top of a recipe.
        kinds: Its variants.
        tables: All keys below it, but those of other sections.
    """

    name: str
    kinds: tuple[type[BaseModel], ...]
    tables: tuple[Table, ...]


class Reference:
    """All keys of all recipes.

    Args:
        found: The pipelines.
    """

    def __init__(self, found: Sequence[Pipeline]) -> None:
        self.pipelines = found
        self.top = {
            pipeline.name: {key.path: key for key in keys_of(pipeline.recipe)} for pipeline in found
        }
        self._pages = self._choose_pages()
        self.sections = [
            Section(name, tuple(kinds), tuple(self._below(name, tuple(kinds))))
            for name, kinds in self._pages.items()
        ]

    def _choose_pages(self) -> dict[str, tuple[type[BaseModel], ...]]:
        """Sections by name; one whose variants another one has, too, has no page of its own."""
        recipes = {pipeline.recipe for pipeline in self.pipelines}
        pages: dict[str, tuple[type[BaseModel], ...]] = {}
        for key in sorted(self._all_top(), key=lambda key: -len(key.variants)):
            if not key.variants or recipes & set(key.variants):
                continue
            if not any(set(key.variants) <= set(kinds) for kinds in pages.values()):
                pages[key.path] = key.variants
        order = list(dict.fromkeys(key.path for key in self._all_top()))
        return {name: pages[name] for name in order if name in pages}

    def _all_top(self) -> Iterator[Key]:
        for keys in self.top.values():
            yield from keys.values()

    def page_of(self, key: Key) -> str | None:
        """The section whose page holds the variants of a key."""
        if key.variants:
            for name, kinds in self._pages.items():
                if set(key.variants) <= set(kinds):
                    return name
        return None

    def _below(self, path: str, kinds: tuple[type[BaseModel], ...]) -> Iterator[Table]:
        here = tables(path, kinds)
        yield from here
        seen: set[str] = set()
        for key in [key for table in here for key in table.keys]:
            if key.variants and self.page_of(key) is None and key.path not in seen:
                seen.add(key.path)
                yield from self._below(key.path + "[]" * ("list of" in key.type_name), key.variants)

    def all_keys(self) -> list[Key]:
        """Every key that has a meaning to say, each path once a variant."""
        below = [key for section in self.sections for table in section.tables for key in table.keys]
        return [*dict.fromkeys(self._all_top()), *below]

    def used_by(self, section: str) -> list[Pipeline]:
        """The pipelines whose recipes have a section."""
        return [pipeline for pipeline in self.pipelines if section in self.top[pipeline.name]]


def pages() -> dict[str, str]:
    """The Markdown of each page, by its path below `docs/`."""
    reference = Reference(pipelines())
    written = {f"{FOLDER}/index.md": _index(reference)}
    for section in reference.sections:
        written[f"{FOLDER}/{section.name}.md"] = _page(reference, section)
    return written


def _index(reference: Reference) -> str:
    lists = [set(keys) for name, keys in reference.top.items() if name != "sweep"]
    common = set.intersection(*lists)
    rows = []
    for pipeline in reference.pipelines:
        keys = reference.top[pipeline.name].values()
        separate_keys = ", ".join(_link(reference, key) for key in keys if key.path not in common)
        rows.append(
            f"| `{pipeline.name}` | {pipeline.stages} | `{pipeline.default}` | {separate_keys} |"
        )
    heads = ["| pipeline | stages | default recipe | keys of its own |", "|---|---|---|---|"]
    parts = [
        "# Recipes",
        "A recipe is a YAML file with only what differs from the defaults below. The key `recipe` "
        "names a base recipe: one of `workflows/recipes` by its name, or a file. An "
        "unknown key is refused. These pages are generated from the classes that read a recipe.",
        "A default of `{}` is a section with its own defaults; `{kind: NAME}` names the variant "
        "of the section that is the default. Where a "
        "[pretrained model](../../models.md#defaults-of-a-pretrained-model) has another default "
        "than the small models that are made from a config, both are listed.",
        "## Pipelines",
        "\n".join([*heads, *rows]),
        "## Keys at the top of a recipe",
        _table(reference, _usual(reference), here=""),
    ]
    return "\n\n".join(parts) + "\n"


def _usual(reference: Reference) -> list[Key]:
    """Each key at the top as most recipes have it: one makes `sft` or `training` narrower."""
    found: dict[str, Counter[Key]] = {}
    for keys in reference.top.values():
        for name, key in keys.items():
            found.setdefault(name, Counter())[key] += 1
    return [counted.most_common(1)[0][0] for counted in found.values()]


def _link(reference: Reference, key: Key) -> str:
    page = reference.page_of(key)
    return f"[`{key.path}`]({page}.md)" if page else f"`{key.path}`"


def _page(reference: Reference, section: Section) -> str:
    users = reference.used_by(section.name)
    everywhere = len(users) >= len(reference.pipelines) - 1
    named = "every pipeline" if everywhere else ", ".join(f"`{each.name}`" for each in users)
    parts = [f"# {section.name}", f"Read by {named}."]
    for table in section.tables:
        parts += _shown(reference, section, table)
    return _one_anchor_each("\n\n".join(parts) + "\n")


def _one_anchor_each(page: str) -> str:
    """Leaves the first anchor of each name: variants of a section have keys of the same path."""
    seen: set[str] = set(re.findall(r"{ #(\S+) }", page))

    def kept(found: re.Match[str]) -> str:
        new = found[1] not in seen
        seen.add(found[1])
        return found[0] if new else ""

    return re.sub(r"<span id='([^']*)'></span>", kept, page)


def _shown(reference: Reference, section: Section, table: Table) -> Iterator[str]:
    at_top = table.path == section.name
    if table.tag is not None:
        level = "##" if at_top else "###"
        yield f"{level} `{': '.join(table.tag)}` {{ #{_anchor(table.path)}-{table.tag[1]} }}"
    elif not at_top:
        yield f"## {table.path} {{ #{_anchor(table.path)} }}"
    if table.about:
        yield table.about
    if table.keys:
        yield _table(reference, table.keys, section.name)
    elif table.tag is not None:
        yield "It has no keys of its own."


def _table(reference: Reference, keys: Sequence[Key], here: str) -> str:
    pretrained = pretrained_defaults()
    lines = ["| key | type, unit | default | meaning |", "|---|---|---|---|"]
    for key in keys:
        # A section that stands below has its anchor there.
        below = here and key.variants and reference.page_of(key) is None
        place = "" if below else f"<span id='{_anchor(key.path)}'></span>"
        kind = _escaped(_type(reference, key, here)) + (f"; {key.unit}" if key.unit else "")
        default = _escaped(key.default)
        if key.path in pretrained:
            default += f"; of a pretrained model `{pretrained[key.path]}`"
        lines.append(
            f"| {place}`{key.path}` | {kind} | {default} | {_escaped(_as_yaml(key.meaning))} |"
        )
    return "\n".join(lines)


def _type(reference: Reference, key: Key, here: str) -> str:
    """The type, in which `section` links to where the keys of the section stand."""
    page = reference.page_of(key)
    if not key.variants or (page is None and not here):
        return key.type_name
    if page is None:
        target = f"#{_anchor(key.path + '[]' * ('list of' in key.type_name))}"
    elif page == here:
        target = f"#{page}"
    else:
        target = f"{page}.md"
    return key.type_name.replace("section", f"[section]({target})", 1)


def _anchor(path: str) -> str:
    return path.replace("[]", "")


def _escaped(text: str) -> str:
    """Text for a cell: a bar outside of code would end it."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(p if p.startswith("`") else re.sub(r"(?<!\\)\|", r"\\|", p) for p in parts)


def _as_yaml(text: str) -> str:
    """Python's None as a recipe writes it."""
    return re.sub(r"\bNone\b", "`null`", text)
