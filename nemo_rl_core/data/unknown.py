"""Text for which a tokenizer has no tokens: which characters, and what to do about them."""

from collections.abc import Collection
from typing import Any, Final

_SHOWN: Final = 12
_SMALL: Final = 64

OTHER_MODELS: Final = (
    "take a model that reads any text: model: {kind: text_from_config} or a pretrained one, "
    "model: {name: FOLDER}"
)
"""The way on that leaves the text as it is."""


def unknown_token_id(tokenizer: Any) -> int | None:
    """The id of the token for unknown text; None if there is none.

    Some tokenizers use one id for unknown text and, for example, end-of-text. It is no sign of
    unknown text then.
    """
    unknown: int | None = tokenizer.unk_token_id
    doubles = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
    return None if unknown in doubles else unknown


def unknown_characters(tokenizer: Any, text: str) -> list[str]:
    """The characters for which a tokenizer has no token, each once, in the order of the text."""
    unknown = unknown_token_id(tokenizer)
    if unknown is None:
        return []
    found = dict.fromkeys(text)
    return [
        each for each in found if unknown in tokenizer(each, add_special_tokens=False)["input_ids"]
    ]


def described_unknown(tokenizer: Any, characters: Collection[str]) -> str:
    """Names unknown characters and the tokenizer, as in `'a', 'b'; the tokenizer knows only ...`.

    Args:
        tokenizer: Of a model.
        characters: That it does not know.
    """
    shown = [repr(each) for each in [*characters][:_SHOWN]]
    more = len(characters) - len(shown)
    listed = ", ".join(shown) + (f" and {more} more" if more > 0 else "")
    if len(tokenizer) > _SMALL:
        return f"{listed}; the model's tokenizer has {len(tokenizer):,} tokens, none of them these"
    special = {*tokenizer.all_special_tokens}
    known = "".join(token for token in tokenizer.get_vocab() if token not in special)
    return f"{listed}; the model's tokenizer knows only {''.join(sorted(known))!r}"
