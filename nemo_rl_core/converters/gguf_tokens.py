"""A tokenizer as the lists that a GGUF file has of it.

GGUF names the rule by which text is split before its merges (`tokenizer.ggml.pre`); only rules that
have such a name are written.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from nemo_rl_core.errors import ModelError

_SPLITS: Final = {
    "gpt-2": [{"type": "ByteLevel", "use_regex": True}],
    "smollm": [
        {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", "use_regex": True},
    ],
    "qwen2": [
        {
            "type": "Split",
            "pattern": {
                "Regex": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
                r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            },
        },
        {"type": "ByteLevel", "use_regex": False},
    ],
}
"""GGUF's names of ways to split text, with what says so in tokenizer.json."""
_READ: Final = {"type", "individual_digits", "pattern", "use_regex"}

_NO_TEXT: Final = "\u00ff"
"""The byte 0xff in GPT-2's alphabet, which no UTF-8 text has."""

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5


@dataclass
class GGUFTokens:
    """Tokens in the order of their ids, and how text becomes them.

    Attributes:
        texts: In GPT-2's alphabet of bytes, but for control tokens.
        types: GGUF's `TokenType` of each.
        merges: Pairs of tokens, the earliest learnt first.
        pre_tokenizer: GGUF's name of the way in which text is split.
        special: Ids of `bos`, `eos`, `pad` and `unk`, where there are such.
        adds_bos: Whether encoded text begins with the start token.
        chat_template: None where there is none.
    """

    texts: list[str]
    types: list[int]
    merges: list[str]
    pre_tokenizer: str
    special: dict[str, int]
    adds_bos: bool
    chat_template: str | None

    def pad(self, num_rows: int) -> None:
        """Adds tokens without a use, up to the rows of the model."""
        for row in range(len(self.texts), num_rows):
            self.texts.append(f"[PAD{row}]")
            self.types.append(_UNUSED)


def read_tokens(folder: Path, tokenizer: Any) -> GGUFTokens:
    """Reads a tokenizer.

    Args:
        folder: The model's, for error messages.
        tokenizer: Of transformers; byte-level BPE.

    Raises:
        ModelError: If it is of another kind.
    """
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    special = {
        name: getattr(tokenizer, f"{name}_token_id")
        for name in ("bos", "eos", "pad", "unk")
        if getattr(tokenizer, f"{name}_token_id") is not None
    }
    pre_tokenizer = _pre_tokenizer(folder, state)
    texts, types = _listed(tokenizer, state)
    merges = state["model"].get("merges") or []
    return GGUFTokens(
        texts=texts,
        types=types,
        merges=[pair if isinstance(pair, str) else " ".join(pair) for pair in merges],
        pre_tokenizer=pre_tokenizer,
        special=special,
        adds_bos=tokenizer("1")["input_ids"][:1] == [tokenizer.bos_token_id],
        chat_template=tokenizer.chat_template,
    )


def _listed(tokenizer: Any, state: dict[str, Any]) -> tuple[list[str], list[int]]:
    by_id = {token_id: text for text, token_id in tokenizer.get_vocab().items()}
    added = {each["id"]: each for each in state["added_tokens"]}
    special = {*tokenizer.all_special_ids}
    texts, types = [], []
    for token_id in range(max(by_id) + 1):
        text = by_id.get(token_id)
        if text is None:
            texts.append(f"[PAD{token_id}]")
            types.append(_UNUSED)
        elif token_id in special or added.get(token_id, {}).get("special"):
            texts.append(text)
            types.append(_CONTROL)
        else:
            texts.append(text)
            types.append(_USER_DEFINED if token_id in added else _NORMAL)
    return texts, types


def _pre_tokenizer(folder: Path, state: dict[str, Any]) -> str:
    model, before = state["model"], state["pre_tokenizer"] or {}
    steps = before.get("pretokenizers") or [before]
    is_byte_level = any(each.get("type") == "ByteLevel" for each in steps)
    is_byte_level = is_byte_level and model["type"] == "BPE" and bool(model["merges"])
    if is_byte_level and {*"".join("".join(pair) for pair in model["merges"])} == {_NO_TEXT}:
        return "gpt-2"  # nothing is ever merged, so that splits make no difference
    read = [{key: value for key, value in step.items() if key in _READ} for step in steps]
    found = next((name for name, known in _SPLITS.items() if known == read), None)
    if is_byte_level and found is not None:
        return found
    raise ModelError(
        f"the tokenizer of {folder.name!r} is not written to GGUF here",
        expected=f"byte-level BPE that splits text as {', '.join(_SPLITS)} do, in "
        f"{folder / 'tokenizer.json'}",
        got=f"{model['type']}, {' and '.join(str(each.get('type')) for each in steps)}",
        fix="convert the folder with llama.cpp's convert_hf_to_gguf.py; for the small model, train "
        "model: {kind: text_from_config}, whose tokenizer is of this kind",
    )
