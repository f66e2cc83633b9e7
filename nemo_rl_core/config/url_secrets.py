"""Secrets in addresses, such as `https://user:password@host` and `?api_key=...`."""

import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s\"'<>\\]+")
_USER = re.compile(r"(?<=://)[^/?#@]*(?:@[^/?#@]*)*@")
_PARAMETER = re.compile(r"(?<=[?&;#])([^=&;#?]+)=([^&;#]+)")
_SECRET_NAME = re.compile(
    r"(?:x[-_](?:amz|goog)[-_])?"
    r"(?:(?:access|api|auth|bearer|client|ocp|apim|private|refresh|secret|security|session|shared"
    r"|subscription|user)[-_]?)*"
    r"(?:key|token|secret|password|passwd|pwd|sig|signature|sas|credentials?|auth|authorization"
    r"|jwt)",
    re.IGNORECASE,
)
_HIDDEN = "***"


def redacted(text: str) -> str:
    """Replaces the secrets in the addresses of a text by `***`.

    Example:
        >>> redacted("POST https://me:hunter2@host/v1?api_key=abc&n=1 failed")
        'POST https://***@host/v1?api_key=***&n=1 failed'
    """
    return _ADDRESS.sub(_without_secrets, text) if "://" in text else text


def secret_fields(values: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yields the path and the redacted text of each value with a secret in an address.

    Example:
        >>> list(secret_fields({"url": "https://me@host/v1", "model": "m"}))
        [('url', 'https://***@host/v1')]
    """
    if isinstance(values, str):
        if (hidden := redacted(values)) != values:
            yield path, hidden
    elif isinstance(values, dict):
        for key, value in values.items():
            yield from secret_fields(value, f"{path}.{key}" if path else str(key))
    elif isinstance(values, list | tuple):
        for number, value in enumerate(values):
            yield from secret_fields(value, f"{path}.{number}" if path else str(number))


def _without_secrets(match: re.Match[str]) -> str:
    return _PARAMETER.sub(_without_value, _USER.sub(f"{_HIDDEN}@", match[0]))


def _without_value(match: re.Match[str]) -> str:
    is_secret = _SECRET_NAME.fullmatch(unquote(match[1])) is not None
    return f"{match[1]}={_HIDDEN}" if is_secret else match[0]
