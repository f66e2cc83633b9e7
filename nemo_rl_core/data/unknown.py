"""Characters for which a tokenizer has no token, and the fix for them."""

from collections.abc import Collection
from typing import Any, Final

_SHOWN: Final = 12
_SMALL: Final = 64

OTHER_MODELS: Final = (
    "use a model that reads any text: model: {kind: text_from_config} or a pretrained one, "
    "model: {name: FOLDER}"
)
"""Fix that does not change the text."""


def unknown_token_id(tokenizer: Any) -> int | None:
    """Returns the id of the token for unknown text; None if there is none.

    None also if, for example, end-of-text has the same id, which then does not indicate unknown
    text.
    """
    unknown: int | None = tokenizer.unk_token_id
    doubles = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
    return None if unknown in doubles else unknown


def unknown_characters(tokenizer: Any, text: str) -> list[str]:
    """Returns the distinct characters without a token, in the order of the text."""
    unknown = unknown_token_id(tokenizer)
    if unknown is None:
        return []
    return [
        character
        for character in dict.fromkeys(text)
        if unknown in tokenizer(character, add_special_tokens=False)["input_ids"]
    ]


def described_unknown(tokenizer: Any, characters: Collection[str]) -> str:
    """Lists unknown characters and the vocabulary: `'a', 'b'; the tokenizer knows only ...`."""
    shown = [repr(character) for character in [*characters][:_SHOWN]]
    more = len(characters) - len(shown)
    listed = ", ".join(shown) + (f" and {more} more" if more > 0 else "")
    if len(tokenizer) > _SMALL:
        return f"{listed}; none of the {len(tokenizer):,} tokens of the model's tokenizer has them"
    special = {*tokenizer.all_special_tokens}
    vocabulary = "".join(token for token in tokenizer.get_vocab() if token not in special)
    return f"{listed}; the model's tokenizer knows only {''.join(sorted(vocabulary))!r}"
