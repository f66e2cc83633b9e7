"""What the pinned versions of Kubernetes, KubeRay, Kueue and Flyte know: trees of keys and types.

`derive.py` has written `kuberay.json`, `kueue.json` and `flyte.json` from the sources that they
name. In a tree

| | is |
|---|---|
| `"string"`, `"integer"`, `"number"`, `"boolean"` | a value of that type; null leaves it out |
| `"quantity"` | `500m`, `1Gi` or a number |
| `"integer or string"`, `"any"` | as it says |
| `"a|b"` | one of these words |
| `"V1PodSpec"` | an object of Kubernetes' client, with its keys and types |
| `[tree]` | a list of such |
| `{"*": tree}` | a map with any keys; Flyte takes a list of such, too |
| `{"key": tree, "other!": tree}` | an object with these keys, of which `other` must be there |
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
    """The trees of a file, by the names in it.

    Args:
        name: `kuberay`, `kueue` or `flyte`.
    """
    found: dict[str, Any] = json.loads(Path(__file__).with_name(f"{name}.json").read_text())
    return found


def problems(value: Any, tree: Any, path: str = "") -> Iterator[str]:
    """What a version would not take of a value, each with its path.

    Args:
        value: As YAML has it.
        tree: As above.
        path: Of the value.
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
            yield f"{path}: {value!r} is no {tree}"
    elif value not in tree.split("|"):
        yield f"{path}: {value!r} is none of {tree.replace('|', ', ')}"


def _of_list(value: Any, tree: Any, path: str) -> Iterator[str]:
    if not isinstance(value, list):
        yield f"{path}: {value!r} is no list"
        return
    for number, each in enumerate(value):
        yield from problems(each, tree, f"{path}[{number}]")


def _of_object(value: Any, tree: dict[str, Any], path: str) -> Iterator[str]:
    if isinstance(value, list) and "*" in tree:
        yield from _of_list(value, tree, path)
        return
    if not isinstance(value, dict):
        yield f"{path}: {value!r} is no map"
        return
    known = {key.rstrip("!"): each for key, each in tree.items()}
    for key, each in value.items():
        here = f"{path}.{key}".lstrip(".")
        if key in known or "*" in known:
            yield from problems(each, known.get(key, known.get("*")), here)
        else:
            yield f"{here}: no such key"
    for key in tree:
        if key.endswith("!") and value.get(key.rstrip("!")) is None:
            yield f"{path}.{key.rstrip('!')}: is missing".lstrip(".")


@cache
def of_kubernetes(name: str) -> dict[str, Any]:
    """The tree of an object by the models of Kubernetes' client, one level deep.

    The client's models take the names of Python, too, which Kubernetes does not.

    Args:
        name: Of a model, such as `V1PodSpec`.
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
    """Without the possibility of None, and without what pydantic adds."""
    if hasattr(annotation, "__metadata__"):
        return _bare(annotation.__origin__)
    kinds = [each for each in get_args(annotation) if each is not type(None)]
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
