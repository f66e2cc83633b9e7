"""Keys and types that the pinned versions of Kubernetes, KubeRay, Kueue and Flyte accept, as trees.

`derive.py` wrote `kuberay.json`, `kueue.json` and `flyte.json` from the sources that they name.

| in a tree | meaning |
|---|---|
| `"string"`, `"integer"`, `"number"`, `"boolean"` | a value of that type; null leaves it out |
| `"quantity"` | `500m`, `1Gi` or a number |
| `"integer or string"`, `"any"` | an integer or a string; any value |
| `"a|b"` | one of these words |
| `"V1PodSpec"` | an object of the Kubernetes client, with its keys and types |
| `[tree]` | a list of such values |
| `{"*": tree}` | a map with any keys; Flyte also accepts a list of such maps |
| `{"key": tree, "other!": tree}` | an object with these keys, of which `other` is required |
"""

import json
import re
from collections.abc import Iterator
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel

ANY = "any"
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "quantity": (str, int, float),
    "integer or string": (int, str),
}
_OF_PYTHON = {str: "string", int: "integer", float: "number", bool: "boolean", datetime: "string"}


def schema(name: str) -> dict[str, Any]:
    """Loads the trees of a file by name.

    Args:
        name: Name of the file, `kuberay`, `kueue` or `flyte`.
    """
    trees: dict[str, Any] = json.loads(Path(__file__).with_name(f"{name}.json").read_text())
    return trees


def problems(value: Any, tree: Any, path: str = "") -> Iterator[str]:
    """Yields the parts of a value that a version would reject, each with its path.

    Args:
        value: Value from YAML.
        tree: Tree of keys and types.
        path: Path of the value.
    """
    if value is None or tree == ANY:
        return
    if isinstance(tree, dict):
        yield from _of_object(value, tree, path)
    elif isinstance(tree, list):
        yield from _of_list(value, tree[0], path)
    elif re.match(r"[A-Z]\w+$", tree):
        yield from _of_object(value, of_kubernetes(tree), path)
    elif tree in _TYPES:
        is_flag = isinstance(value, bool) and tree != "boolean"
        if is_flag or not isinstance(value, _TYPES[tree]):
            yield f"{path}: {value!r} is not of type {tree}"
    elif value not in tree.split("|"):
        yield f"{path}: {value!r} is none of {tree.replace('|', ', ')}"


def _of_list(value: Any, tree: Any, path: str) -> Iterator[str]:
    if not isinstance(value, list):
        yield f"{path}: {value!r} is not a list"
        return
    for number, item in enumerate(value):
        yield from problems(item, tree, f"{path}[{number}]")


def _of_object(value: Any, tree: dict[str, Any], path: str) -> Iterator[str]:
    if isinstance(value, list) and "*" in tree:
        yield from _of_list(value, tree, path)
        return
    if not isinstance(value, dict):
        yield f"{path}: {value!r} is not a map"
        return
    subtrees = {key.rstrip("!"): subtree for key, subtree in tree.items()}
    for key, item in value.items():
        item_path = f"{path}.{key}".lstrip(".")
        if key in subtrees or "*" in subtrees:
            yield from problems(item, subtrees.get(key, subtrees.get("*")), item_path)
        else:
            yield f"{item_path}: no such key"
    for key in tree:
        if key.endswith("!") and value.get(key.rstrip("!")) is None:
            yield f"{path}.{key.rstrip('!')}: is missing".lstrip(".")


@cache
def of_kubernetes(name: str) -> dict[str, Any]:
    """Returns the tree of an object from a model of the Kubernetes client, one level deep.

    It has only the serialized names, since Kubernetes does not accept the client's Python names.

    Args:
        name: Name of a model, such as `V1PodSpec`.
    """
    from kubernetes import client

    quantities = name in ("V1ResourceRequirements", "V1ResourceQuotaSpec")
    return {
        (field.serialization_alias or attribute) + "!" * field.is_required(): (
            {"*": "quantity"}
            if quantities and get_origin(_bare(field.annotation)) is dict
            else _type(field.annotation)
        )
        for attribute, field in getattr(client, name).model_fields.items()
    }


def _bare(annotation: Any) -> Any:
    """Removes None and the metadata of pydantic from an annotation."""
    if hasattr(annotation, "__metadata__"):
        return _bare(annotation.__origin__)
    kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
    if get_origin(annotation) is Union and len(kinds) == 1:
        return _bare(kinds[0])
    return annotation


def _type(annotation: Any) -> Any:
    bare = _bare(annotation)
    if get_origin(bare) is list:
        return [_type(get_args(bare)[0])]
    if get_origin(bare) is dict:
        return {"*": _type(get_args(bare)[1])}
    if get_origin(bare) is Union:
        return "integer or string"
    if isinstance(bare, type) and issubclass(bare, BaseModel):
        return bare.__name__
    return _OF_PYTHON.get(bare, ANY)
