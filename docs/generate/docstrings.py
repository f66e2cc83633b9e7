"""Teaches griffe, which reads docstrings for mkdocstrings, this project's style."""

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Reads the section `Example:` as `Examples:`, the only form that griffe shows as code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Renames the section in one docstring."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"(?m)^Example:$", "Examples:", obj.docstring.value)
