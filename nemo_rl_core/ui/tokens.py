"""Tokens of a completion, tinted by logprob, difference of logprobs, mask or weight version."""

import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

TINTS = {
    "logprob": "probability when sampled",
    "difference": "difference between engine and trainer",
    "mask": "trained on or not",
    "version": "weight version",
}
LEGENDS = {
    "logprob": ("Probability", "0.9 or more", "from 0.5", "from 0.1", "from 0.01", "below 0.01"),
    "difference": (
        "Difference of logprobs",
        "below 0.001",
        "from 0.001",
        "from 0.01",
        "from 0.1",
        "1 or more",
    ),
}
"""A title and five labels for each tint that has a scale."""
MAX_TOKENS = 4000
_LIKELY = (0.9, 0.5, 0.1, 0.01)
"""Probabilities at which the tint changes."""
_DIFFERENT = (0.001, 0.01, 0.1, 1.0)
"""Absolute differences of logprobs at which the tint changes."""
_NUM_VERSION_TINTS = 4


class Token(NamedTuple):
    """A token; `tint` is the name of a style, `label` describes it."""

    text: str
    tint: str
    label: str


class _Recorded(NamedTuple):
    logprob: float | None
    trainer_logprob: float | None
    is_generated: bool
    version: int | None

    @property
    def difference(self) -> float | None:
        if self.logprob is None or self.trainer_logprob is None:
            return None
        return self.trainer_logprob - self.logprob


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
    columns = [
        _filled(row[name], len(ids), default)
        for name, default in (
            ("logprobs", None),
            ("trainer_logprobs", None),
            ("generated", True),
            ("weight_versions", None),
        )
    ]
    recorded = [_Recorded(*values) for values in zip(*columns, strict=True)]
    first_version = min((one.version for one in recorded if one.version is not None), default=0)
    return [
        Token(text, _tint(tint, one, first_version), _label(number, one))
        for number, text, one in zip(ids, _texts(folder, ids), recorded, strict=True)
    ]


def _filled(values: Any, length: int, default: Any) -> list[Any]:
    """Returns the values; `default` for each token if the column is empty."""
    is_recorded = isinstance(values, list) and len(values) >= length
    return values[:length] if is_recorded else [default] * length


def _tint(tint: str, one: _Recorded, first_version: int) -> str:
    if tint == "mask":
        return "trained" if one.is_generated else "untrained"
    if tint == "version":
        version = one.version
        return (
            "" if version is None else f"version-{(version - first_version) % _NUM_VERSION_TINTS}"
        )
    value = one.difference if tint == "difference" else one.logprob
    if value is None or not one.is_generated:
        return ""
    if tint == "difference":
        return f"rare-{sum(abs(value) >= bound for bound in _DIFFERENT)}"
    return f"rare-{sum(math.exp(value) < bound for bound in _LIKELY)}"


def _label(number: int, one: _Recorded) -> str:
    parts = [f"token {number}"]
    if one.is_generated and one.logprob is not None:
        parts.append(f"probability {math.exp(one.logprob):.3g}, logprob {one.logprob:.4g}")
    if one.is_generated and one.difference is not None:
        parts.append(f"of the trainer {one.trainer_logprob:.4g}, difference {one.difference:.2g}")
    if not one.is_generated:
        parts.append("not trained on")
    if one.version is not None:
        parts.append(f"weights of step {one.version}")
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
