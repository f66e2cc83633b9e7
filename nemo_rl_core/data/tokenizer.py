"""A character tokenizer for generated sums, for models that start from their config."""

from typing import Any

CHARACTERS = "0123456789+-*= "
"""Characters of sums; any other character becomes the unknown token."""

_PAD, _BOS, _EOS, _UNKNOWN = "<pad>", "<bos>", "<eos>", "<unk>"

# A user turn is only its text, so that the generation prompt of "12+34=" is `<bos>12+34=`; an
# assistant turn ends with one token, as in every chat template.
_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


def build_arithmetic_tokenizer() -> Any:
    """Builds a tokenizer with one token per character after a start token, and a chat template.

    `tokenizer(text)` gives the same tokens as the template, so that a model completes a prompt
    equally in transformers, in vLLM and in a chat.

    Returns:
        A `transformers.PreTrainedTokenizerFast` with `pad`, `bos`, `eos` and `unk` as ids 0 to 3
        and the 15 characters of `CHARACTERS` as ids 4 to 18. Saved twice, it gives the same bytes.

    Example:
        >>> build_arithmetic_tokenizer().encode("1+2=")
        [1, 5, 14, 6, 17]
    """
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        pre_tokenizers,
        processors,
    )
    from transformers import PreTrainedTokenizerFast

    vocabulary = {
        token: index for index, token in enumerate((_PAD, _BOS, _EOS, _UNKNOWN, *CHARACTERS))
    }
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=_UNKNOWN))
    # In Oniguruma, (?m) lets the dot match line breaks too.
    core.pre_tokenizer = pre_tokenizers.Split(Regex("(?m)."), behavior="isolated")
    core.decoder = decoders.Fuse()
    core.post_processor = processors.TemplateProcessing(
        single=f"{_BOS} $A", special_tokens=[(_BOS, vocabulary[_BOS])]
    )
    # With a Qwen2 config, `AutoTokenizer` reads every tokenizer.json as Qwen2's, whose
    # pre-tokenizer has no plain space. Added tokens are matched before pre-tokenization in both.
    core.add_tokens([AddedToken(" ", normalized=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=_PAD,
        bos_token=_BOS,
        eos_token=_EOS,
        unk_token=_UNKNOWN,
        chat_template=_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
