"""Resolves the inputs of a node from the outputs of others."""

from collections.abc import Iterable, Mapping
from typing import Any

import msgpack
from flyteidl.core import literals_pb2, types_pb2

Outputs = Mapping[str, literals_pb2.LiteralMap]
"""Outputs by node id. The graph's inputs are stored for the start node, under an empty id."""

START = "start-node"


def resolve(bindings: Iterable[literals_pb2.Binding], outputs: Outputs) -> literals_pb2.LiteralMap:
    """Returns the literals that a node is called with."""
    inputs = literals_pb2.LiteralMap()
    for binding in bindings:
        inputs.literals[binding.var].CopyFrom(_literal(binding.binding, outputs))
    return inputs


def _literal(binding: literals_pb2.BindingData, outputs: Outputs) -> literals_pb2.Literal:
    kind = binding.WhichOneof("value")
    if kind == "promise":
        return _promised(binding.promise, outputs)
    if kind == "collection":
        many = [_literal(each, outputs) for each in binding.collection.bindings]
        return literals_pb2.Literal(collection=literals_pb2.LiteralCollection(literals=many))
    if kind == "map":
        named = {key: _literal(each, outputs) for key, each in binding.map.bindings.items()}
        return literals_pb2.Literal(map=literals_pb2.LiteralMap(literals=named))
    if kind == "scalar":
        return literals_pb2.Literal(scalar=binding.scalar)
    raise ValueError(f"a binding of kind {kind!r} is not supported")


def _promised(promise: types_pb2.OutputReference, outputs: Outputs) -> literals_pb2.Literal:
    node = "" if promise.node_id == START else promise.node_id
    literal = outputs[node].literals[promise.var]
    for step in promise.attr_path:
        literal = _inside(literal, step)
    return literal


def _inside(literal: literals_pb2.Literal, step: types_pb2.PromiseAttribute) -> Any:
    if literal.WhichOneof("value") == "collection":
        return literal.collection.literals[step.int_value]
    if literal.WhichOneof("value") == "map":
        return literal.map.literals[step.string_value]
    record = msgpack.loads(literal.scalar.binary.value)
    key = step.string_value if step.WhichOneof("value") == "string_value" else step.int_value
    value = literals_pb2.Binary(value=msgpack.dumps(record[key]), tag="msgpack")
    return literals_pb2.Literal(scalar=literals_pb2.Scalar(binary=value))
