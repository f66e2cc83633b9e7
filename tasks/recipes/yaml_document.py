"""One YAML document: its text, its bounds, and the line of each value."""

import re
import stat
from collections.abc import Generator
from pathlib import Path
from typing import Any, Final

import yaml
from yaml.constructor import ConstructorError, SafeConstructor

from nemo_rl_core.config.places import PlacedDict, PlacedList
from nemo_rl_core.errors import ConfigError

_MAX_BYTES: Final = 2**20
_MAX_NODES: Final = 100_000
"""Maximum number of values, with aliases expanded: ten lines of aliases can mean billions."""
_MAX_DEPTH: Final = 64
_UTF_16: Final = (b"\xff\xfe", b"\xfe\xff")
_INT, _FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"


class RecipeLoader(yaml.SafeLoader):
    """Reads numbers as YAML 1.2 does, unlike PyYAML, which follows YAML 1.1.

    `1e-5` is a number. `1:30:00` and `0777` are text, and not 5400 and 511.
    """

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Returns the next node; stops at a depth that takes PyYAML seconds to read (quadratic)."""
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise RecursionError
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        return node

    yaml_implicit_resolvers = {  # noqa: RUF012  (PyYAML's)
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in (_INT, _FLOAT)]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


def _integer(constructor: Any, node: yaml.ScalarNode) -> int:
    try:
        return int(constructor.construct_yaml_int(node))
    except ValueError as error:  # Python reads no more than 4,300 digits
        problem = f"an integer of {len(node.value):,} digits"
        raise ConstructorError(None, None, problem, node.start_mark) from error


RecipeLoader.add_implicit_resolver(
    _INT,
    re.compile(r"^[-+]?(?:0|[1-9][0-9_]*|0b[01_]+|0x[0-9a-fA-F_]+)$"),
    list("-+0123456789"),
)
RecipeLoader.add_implicit_resolver(
    _FLOAT,
    re.compile(
        r"""^[-+]?(?:(?:0|[1-9][0-9_]*)(?:\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[eE][-+]?[0-9]+)
            |\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?
            |\.(?:inf|Inf|INF))$
            |^\.(?:nan|NaN|NAN)$""",
        re.VERBOSE,
    ),
    list("-+0123456789."),
)
RecipeLoader.add_constructor(_INT, _integer)


class Placing(SafeConstructor):
    """Constructs mappings and lists that know the line of each value."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._name = _shown_path(path)

    def construct_yaml_map(self, node: Any) -> Generator[dict[Any, Any], None, None]:
        """Yields a mapping with the location of each key."""
        placed = PlacedDict()
        yield placed
        placed.update(self.construct_mapping(node))
        for key, _ in node.value:
            # A merge (`<<`) has been replaced by its pairs.
            placed.places[self.construct_object(key)] = self._at(key)

    def construct_yaml_seq(self, node: Any) -> Generator[list[Any], None, None]:
        """Yields a list with the location of each item."""
        placed = PlacedList()
        yield placed
        placed.extend(self.construct_sequence(node))
        placed.places = [self._at(item) for item in node.value]

    def _at(self, node: yaml.Node) -> str:
        return f"{self._name}:{node.start_mark.line + 1}"


Placing.yaml_constructors = {
    **SafeConstructor.yaml_constructors,
    "tag:yaml.org,2002:map": Placing.construct_yaml_map,
    "tag:yaml.org,2002:seq": Placing.construct_yaml_seq,
    _INT: _integer,
}


def _shown_path(path: Path) -> str:
    current = Path.cwd()
    return str(path.relative_to(current) if path.is_relative_to(current) else path)


def text_of(path: Path) -> str:
    """Returns the text of a regular file of at most 1 MiB in UTF-8."""
    expected = "a YAML file of at most 1 MiB"
    try:
        status = path.stat()
    except (OSError, ValueError) as error:
        got = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"{str(path)[:200]} cannot be read", expected=expected, got=got
        ) from error
    if not stat.S_ISREG(status.st_mode):
        got = "a folder" if stat.S_ISDIR(status.st_mode) else "a device, pipe or socket"
        raise ConfigError(f"{path} is not a recipe", expected=expected, got=got)
    if status.st_size > _MAX_BYTES:
        raise ConfigError(
            f"{path} is not a recipe", expected=expected, got=f"{status.st_size:,} bytes"
        )
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


def refuse_hostile(root: yaml.Node, path: Path) -> None:
    """Refuses documents that never end, or of which a part would be lost."""
    num_nodes = 0
    # Entered nodes are those on the path from the root; the second entry leaves a node.
    stack, entered = [(root, False)], set[int]()
    while stack:
        node, is_left = stack.pop()
        if is_left:
            entered.remove(id(node))
            continue
        num_nodes += 1
        if id(node) in entered or num_nodes > _MAX_NODES:
            got = (
                "an alias to a node that contains it"
                if id(node) in entered
                else "aliases of aliases"
            )
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
            raise too_deep(path)
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
                f"{path}, line {line}: the key {key.value!r} appears twice in one section",
                expected="each key once",
                got=f"{key.value!r} in lines {seen[key.value]} and {line}",
                fix="remove one of them",
            )
        seen[key.value] = line


def too_deep(path: Path) -> ConfigError:
    """Returns the error for a document with too many levels."""
    return ConfigError(
        f"{path} is nested too deeply", expected=f"at most {_MAX_DEPTH} levels", got="more"
    )


def not_yaml(path: Path, error: yaml.MarkedYAMLError) -> ConfigError:
    """Returns the error for text that is not YAML, with its line and the fix."""
    mark = error.problem_mark or error.context_mark
    location = f"{path}, line {mark.line + 1}" if mark else str(path)
    problem = error.problem or str(error)
    fix = "correct this line, or the one before it"
    if "'\\t'" in problem:
        fix = "indent with spaces; YAML has no tabs"
    elif "another document" in problem:
        fix = "remove the line ---, or keep one document"
    elif "an integer of" in problem:
        fix = "write a smaller number, or put it into quotes if it is a text"
    elif "could not determine a constructor" in problem:
        fix = "remove the tag that begins with !"
    return ConfigError(f"{location}: this is not YAML", got=problem, fix=fix)
