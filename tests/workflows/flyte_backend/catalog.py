"""The cache of task outputs, keyed as Flyte's catalog keys them."""

import hashlib
import threading

from flyteidl.core import literals_pb2, tasks_pb2


class Catalog:
    """Outputs by task, version and inputs; a literal with a hash is identified by its hash."""

    def __init__(self) -> None:
        self._outputs: dict[str, literals_pb2.LiteralMap] = {}
        self._lock = threading.Lock()

    def get(
        self, task: tasks_pb2.TaskTemplate, inputs: literals_pb2.LiteralMap
    ) -> literals_pb2.LiteralMap | None:
        """Returns the cached outputs of a task for these inputs, or None."""
        if not task.metadata.discoverable:
            return None
        with self._lock:
            return self._outputs.get(_key(task, inputs))

    def put(
        self,
        task: tasks_pb2.TaskTemplate,
        inputs: literals_pb2.LiteralMap,
        outputs: literals_pb2.LiteralMap,
    ) -> None:
        """Stores the outputs of a cacheable task."""
        if task.metadata.discoverable:
            with self._lock:
                self._outputs[_key(task, inputs)] = outputs


def _key(task: tasks_pb2.TaskTemplate, inputs: literals_pb2.LiteralMap) -> str:
    digest = hashlib.sha256()
    identity = task.id
    digest.update(f"{identity.project}:{identity.domain}:{identity.name}".encode())
    digest.update(task.interface.SerializeToString(deterministic=True))
    digest.update(task.metadata.discovery_version.encode())
    ignored = set(task.metadata.cache_ignore_input_vars)
    for name in sorted(set(inputs.literals) - ignored):
        digest.update(name.encode() + _content(inputs.literals[name]))
    return digest.hexdigest()


def _content(literal: literals_pb2.Literal) -> bytes:
    if literal.hash:
        return literal.hash.encode()
    kind = literal.WhichOneof("value")
    if kind == "collection":
        return b"[" + b",".join(map(_content, literal.collection.literals)) + b"]"
    if kind == "map":
        named = literal.map.literals
        return b"{" + b",".join(key.encode() + _content(named[key]) for key in sorted(named)) + b"}"
    return literal.SerializeToString(deterministic=True)
