"""A character tokenizer for generated sums, so that a small model needs nothing from a hub."""

from typing import Any

_SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
_CHARACTERS = "0123456789+-*= "
# A prompt is rendered as bos and the user's text; an assistant's turn as its text and eos.
_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


def build_arithmetic_tokenizer() -> Any:
    """A transformers tokenizer of 19 tokens: four special ones, digits, `+ - * =` and space."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: place for place, token in enumerate([*_SPECIAL, *_CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        chat_template=_CHAT_TEMPLATE,
    )
