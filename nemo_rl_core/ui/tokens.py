"""Tokens of a completion, tinted by logprob, mask or weight version."""

import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

TINTS = {
    "logprob": "probability when sampled",
    "mask": "trained on or not",
    "version": "weight version",
}
MAX_TOKENS = 4000
_LIKELY = (0.9, 0.5, 0.1, 0.01)
"""Probabilities at which the tint changes."""
_NUM_VERSION_TINTS = 4


class Token(NamedTuple):
    """A token; `tint` is the name of a style, `label` describes it."""

    text: str
    tint: str
    label: str


def tokens(row: Mapping[str, Any], folder: Path, tint: str) -> list[Token]:
    """Returns the first `MAX_TOKENS` tokens of a row; empty if none are recorded.

    Args:
        row: A row of rollouts with the columns of tokens.
        folder: The artifact, whose tokenizer decodes them.
        tint: One of `TINTS`.
    """
    ids = row["completion_ids"]
    if not isinstance(ids, list):
        return []
    ids = ids[:MAX_TOKENS]
    logprobs = _filled(row["logprobs"], len(ids), None)
    generated = _filled(row["generated"], len(ids), True)
    versions = _filled(row["weight_versions"], len(ids), None)
    first_version = min((each for each in versions if each is not None), default=0)
    parts = zip(_texts(folder, ids), ids, logprobs, generated, versions, strict=True)
    return [
        Token(
            text,
            _tint(
                tint, logprob, is_generated, None if version is None else version - first_version
            ),
            _label(number, logprob, is_generated, version),
        )
        for text, number, logprob, is_generated, version in parts
    ]


def _filled(values: Any, length: int, default: Any) -> list[Any]:
    """Returns the values; `default` for each token if the column is empty."""
    is_recorded = isinstance(values, list) and len(values) >= length
    return values[:length] if is_recorded else [default] * length


def _tint(tint: str, logprob: float | None, is_generated: bool, version: int | None) -> str:
    if tint == "mask":
        return "trained" if is_generated else "untrained"
    if tint == "version":
        return "" if version is None else f"version-{version % _NUM_VERSION_TINTS}"
    if logprob is None or not is_generated:
        return ""
    return f"rare-{sum(math.exp(logprob) < bound for bound in _LIKELY)}"


def _label(number: int, logprob: float | None, is_generated: bool, version: int | None) -> str:
    parts = [f"token {number}"]
    if is_generated and logprob is not None:
        parts.append(f"probability {math.exp(logprob):.3g}, logprob {logprob:.4g}")
    if not is_generated:
        parts.append("not trained on")
    if version is not None:
        parts.append(f"weights of step {version}")
    return "; ".join(parts)


def _texts(folder: Path, ids: list[int]) -> list[str]:
    """Decodes token by token; a token that ends inside a character has an empty text."""
    from tokenizers.decoders import DecodeStream

    path = folder / "model" / "tokenizer.json"
    try:
        tokenizer = _tokenizer(path, path.stat().st_mtime_ns)
    except OSError:
        return [f"[{number}]" for number in ids]
    stream = DecodeStream(skip_special_tokens=False)
    return [stream.step(tokenizer, number) or "" for number in ids]


@functools.lru_cache(maxsize=4)
def _tokenizer(path: Path, _changed: int) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(path))
