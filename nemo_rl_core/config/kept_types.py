"""Fields that refuse values of another type instead of converting them.

pydantic reads `true` as 1 and the text "3" as 3, which hides mistakes: `max_grad_norm: yes` would
be 1.0. An integer for a real number, and 2.0 for an integer, are allowed.
"""

from collections.abc import Mapping
from typing import Any

from pydantic_core import PydanticKnownError, core_schema


def fields_of(schema: Any) -> dict[str, Any]:
    """Returns the schemas of a config's fields by name.

    Args:
        schema: The core schema of a config class.
    """
    while schema["type"] not in {"model-fields", "definition-ref"}:
        schema = schema["schema"]
    return dict(schema.get("fields", {}))


def refuse_conversions(fields: Mapping[str, Any]) -> None:
    """Makes the numbers and booleans of a config's fields refuse values of another type.

    Args:
        fields: The schemas of the fields, which are modified.
    """
    for field in fields.values():
        _refuse_below(field["schema"])


def _refuse_below(schema: Any) -> None:
    kind = schema["type"]
    if kind in {"float", "bool"}:
        schema["strict"] = True
    elif kind == "int":
        # Strict integers would refuse 2.0, which a few formats write for 2.
        checked = core_schema.no_info_before_validator_function(_integer, {**schema})
        schema.clear()
        schema.update(checked)
    elif kind == "union":
        for choice in schema["choices"]:
            _refuse_below(choice[0] if isinstance(choice, tuple) else choice)
    elif kind == "tuple":
        for item in schema["items_schema"]:
            _refuse_below(item)
    # Another config has a schema that was already changed.
    elif kind != "model" and schema.get("function", {}).get("function") is not _integer:
        for key in ("schema", "items_schema", "keys_schema", "values_schema"):
            if key in schema:
                _refuse_below(schema[key])


def _integer(value: Any) -> Any:
    if isinstance(value, bool | str | bytes):
        raise PydanticKnownError("int_type")
    return value
