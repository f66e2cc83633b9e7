"""Files of recipes: read whole or refused in a few lines, and laid over one another."""

import os
import stat
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import yaml
from yaml.constructor import SafeConstructor

from nemo_rl_core.algorithms.grpo.presets import PRESETS
from nemo_rl_core.config.names import closest_name
from nemo_rl_core.config.places import PlacedDict, PlacedList, overlaid, place_of, without_keys
from nemo_rl_core.config.sections import dotted
from nemo_rl_core.errors import ConfigError

RECIPES = Path(__file__).resolve().parents[2] / "workflows" / "recipes"

_MAX_BYTES: Final = 2**20
_MAX_NODES: Final = 100_000
"""With aliases counted as often as they stand: ten lines of them can mean billions."""
_MAX_DEPTH: Final = 64
_MAX_INTEGER: Final = 2**63
_UTF_16: Final = (b"\xff\xfe", b"\xfe\xff")


def read_recipe(path: Path) -> dict[str, Any]:
    """The mapping in a YAML or JSON file; an empty file is an empty mapping.

    Raises:
        ConfigError: If it is no regular file of at most 1 MiB with one UTF-8 document, a mapping
            without repeated keys, cycles and integers of more than 64 bits.
    """
    text = _text_of(path)
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is not None:
            _refuse_hostile(root, path)
        values = None if root is None else _Placing(path).construct_document(root)
    except yaml.MarkedYAMLError as error:
        raise _not_yaml(path, error) from error
    except yaml.YAMLError as error:  # a character that YAML does not allow
        raise ConfigError(f"{path} is no YAML", got=str(error).splitlines()[0]) from error
    except RecursionError as error:
        raise _too_deep(path) from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(
            f"{path} is no recipe",
            expected="a map of sections",
            got={"list": "a list", "str": "a text"}.get(kind := type(values).__name__, kind),
            fix="begin each line with the name of a section or setting, as in `seed: 1`",
        )
    refuse_unwritable(values)
    return values


def with_base(values: dict[str, Any], *, named: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The values laid over those of the recipe that they name, if they do.

    Args:
        values: Of a recipe.
        named: The recipes that led to it, each of which names the next.

    Raises:
        ConfigError: If there is no such recipe, it cannot be read, or it leads back to itself.
    """
    if "recipe" not in values:
        return values
    name = str(values["recipe"])
    path = Path(name) if name.endswith((".yaml", ".yml")) else RECIPES / f"{name}.yaml"
    if not os.path.isfile(path):  # noqa: PTH113  (takes names of any length)
        choices = sorted(recipe.stem for recipe in RECIPES.glob("*.yaml"))
        at = place_of(values, ("recipe",))
        meant = closest_name(name, choices)
        raise ConfigError(
            f"{at + ': ' if at else ''}there is no recipe {name[:200]!r}",
            expected=f"a .yaml file, or one of {', '.join(choices)}",
            got=f"{name[:200]}{_beside(path)}",
            fix=f"did you mean {meant!r}?" if meant else None,
        )
    if path.resolve() in named:
        raise ConfigError(
            "the recipes begin with each other",
            expected="a key `recipe` that leads to a recipe without one",
            got=" -> ".join(each.name for each in (*named, path)),
            fix=f"remove the key `recipe` from {path}, or name another",
        )
    base = with_base(read_recipe(path), named=(*named, path.resolve()))
    return _laid_over(base, without_keys(values, {"recipe"}))


def refuse_unwritable(values: Mapping[str, Any]) -> None:
    """Refuses what YAML and JSON can say and no record can hold, all of it at once.

    Args:
        values: Nested mappings and lists, as from a recipe.

    Raises:
        ConfigError: For integers of more than 64 bits, and halves of surrogate pairs in text.
    """
    wrong = list(_unwritable(values, (), values))
    if not wrong:
        return
    problem = "\n  ".join(wrong) if len(wrong) == 1 else "\n  ".join(["the recipe:", *wrong])
    raise ConfigError(
        problem,
        expected="integers of 64 bits, and text in Unicode",
        fix="correct the named values",
    )


def _beside(path: Path) -> str:
    """Where a relative name of a file was looked for."""
    return "" if path.is_absolute() else f", looked for in {Path.cwd()}"


def _laid_over(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Maps are merged; everything else is replaced, and so is a map of another `kind`.

    A preset stands for the fields that it sets: named in the changes, it wins over the base.
    """
    preset = PRESETS.get(str(changes.get("preset")), {})
    base = without_keys(base, {*preset})
    merged = overlaid(base, changes)
    for key, value in changes.items():
        old = base.get(key)
        if isinstance(old, dict) and isinstance(value, dict) and _same_kind(key, old, value):
            merged[key] = _laid_over(old, value)
    return merged


def _same_kind(key: str, old: dict[str, Any], new: dict[str, Any]) -> bool:
    """Whether changes without a kind are meant for what is there.

    `model: {name: ...}` alone is a pretrained model, so it replaces one of another kind; other
    fields without a kind are changes of the model that the base recipe has.
    """
    bare_name = key == "model" and "name" in new
    unsaid = "pretrained" if bare_name else old.get("kind")
    return bool(new.get("kind", unsaid) == old.get("kind", unsaid))


class _Placing(SafeConstructor):
    """Constructs mappings and lists that know the line of each value."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._name = _called(path)

    def construct_yaml_map(self, node: Any) -> Generator[dict[Any, Any], None, None]:
        placed = PlacedDict()
        yield placed
        placed.update(self.construct_mapping(node))
        for key, _ in node.value:
            # A merge (`<<`) has been replaced by the pairs that it stands for.
            placed.places[self.construct_object(key)] = self._at(key)

    def construct_yaml_seq(self, node: Any) -> Generator[list[Any], None, None]:
        placed = PlacedList()
        yield placed
        placed.extend(self.construct_sequence(node))
        placed.places = [self._at(item) for item in node.value]

    def _at(self, node: yaml.Node) -> str:
        return f"{self._name}:{node.start_mark.line + 1}"


_Placing.yaml_constructors = {
    **SafeConstructor.yaml_constructors,
    "tag:yaml.org,2002:map": _Placing.construct_yaml_map,
    "tag:yaml.org,2002:seq": _Placing.construct_yaml_seq,
}


def _called(path: Path) -> str:
    """The path as a user writes it: from the folder that he is in, where it lies in that."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _text_of(path: Path) -> str:
    expected = "a YAML file of at most 1 MiB"
    try:
        found = path.stat()
    except (OSError, ValueError) as error:
        got = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"{str(path)[:200]} cannot be read", expected=expected, got=got
        ) from error
    if not stat.S_ISREG(found.st_mode):
        got = "a folder" if stat.S_ISDIR(found.st_mode) else "a device, pipe or socket"
        raise ConfigError(f"{path} is no recipe", expected=expected, got=got)
    if found.st_size > _MAX_BYTES:
        raise ConfigError(f"{path} is no recipe", expected=expected, got=f"{found.st_size:,} bytes")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read", got=error.strerror or str(error)) from error
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{path}, line {line}: the file is not in UTF-8",
            expected="text in UTF-8",
            got="UTF-16" if data.startswith(_UTF_16) else f"the byte 0x{data[error.start]:02x}",
            fix="save it as UTF-8, as in `iconv -f ENCODING -t utf-8`",
        ) from error


def _refuse_hostile(root: yaml.Node, path: Path) -> None:
    """Refuses what would be read without an end, or of which a part would be lost."""
    num_nodes = 0
    # Entered nodes are those on the way from the root, and are left by the second entry.
    stack, entered = [(root, False)], set[int]()
    while stack:
        node, is_left = stack.pop()
        if is_left:
            entered.remove(id(node))
            continue
        num_nodes += 1
        if id(node) in entered or num_nodes > _MAX_NODES:
            got = "an alias to what it stands in" if id(node) in entered else "aliases of aliases"
            raise ConfigError(
                f"{path}, line {node.start_mark.line + 1}: the document has no end",
                expected=f"at most {_MAX_NODES:,} values, aliases written out",
                got=got,
                fix="write the values out instead of the alias",
            )
        if isinstance(node, yaml.ScalarNode):
            continue
        entered.add(id(node))
        if len(entered) > _MAX_DEPTH:
            raise _too_deep(path)
        stack.append((node, True))
        children = node.value
        if isinstance(node, yaml.MappingNode):
            _refuse_repeated(node, path)
            children = [part for pair in node.value for part in pair]
        stack.extend((child, False) for child in children)


def _refuse_repeated(node: yaml.MappingNode, path: Path) -> None:
    seen: dict[str, int] = {}
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            continue
        line = key.start_mark.line + 1
        if key.value in seen:
            raise ConfigError(
                f"{path}, line {line}: the key {key.value!r} stands twice in one section",
                expected="each key once",
                got=f"{key.value!r} in lines {seen[key.value]} and {line}",
                fix="remove one of them",
            )
        seen[key.value] = line


def _too_deep(path: Path) -> ConfigError:
    return ConfigError(
        f"{path} is nested too deeply", expected=f"at most {_MAX_DEPTH} levels", got="more"
    )


def _not_yaml(path: Path, error: yaml.MarkedYAMLError) -> ConfigError:
    mark = error.problem_mark or error.context_mark
    place = f"{path}, line {mark.line + 1}" if mark else str(path)
    problem = error.problem or str(error)
    fix = "correct this line, or the one before it"
    if "'\\t'" in problem:
        fix = "indent with spaces; YAML has no tabs"
    elif "another document" in problem:
        fix = "remove the line ---, or keep one document"
    elif "could not determine a constructor" in problem:
        fix = "remove the tag that begins with !"
    return ConfigError(f"{place}: this is no YAML", got=problem, fix=fix)


def _unwritable(value: Any, path: tuple[Any, ...], top: Any) -> Iterator[str]:
    if isinstance(value, Mapping | list):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _unwritable(item, (*path, key), top)
        return
    problem = None
    if isinstance(value, int) and not -_MAX_INTEGER <= value < _MAX_INTEGER:
        got = f"{float(value):.3g}" if abs(value) < 10**300 else "over 300 digits"
        problem = f"is too large (got {got})"
    elif isinstance(value, str) and any("\ud800" <= letter <= "\udfff" for letter in value):
        problem = f"holds half of a surrogate pair (got {value!r:.60})"
    if problem is not None:
        at = place_of(top, path)
        yield f"{at + ': ' if at else ''}{dotted(path)} {problem}"
