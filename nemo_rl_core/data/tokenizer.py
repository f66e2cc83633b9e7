"""Character and byte tokenizers for models that are initialized from a config."""

from typing import Any

from nemo_rl_core.config.model import SmallModel, TextModelFromConfig

CHARACTERS = "0123456789+-*= "
"""Characters of arithmetic problems; any other character becomes the unknown token."""

_PAD, _BOS, _EOS, _UNKNOWN = "<pad>", "<bos>", "<eos>", "<unk>"

_NEVER = "\u00ff"
"""The byte 0xff in GPT-2's alphabet, which no UTF-8 text has."""

# A user turn is only its text, so that the generation prompt of "12+34=" is `<bos>12+34=`; an
# assistant turn ends with one token, as in other chat templates.
_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)

# Without tools, equal to the template above. Calls have the syntax of Hermes and Qwen.
_TOOL_TEMPLATE = (
    "{{ bos_token }}{% for tool in tools or [] %}{{ tool.function.name }}"
    "({{ ((tool.function.parameters or {}).properties or {}) | join(', ') }})\n{% endfor %}"
    "{% for message in messages %}{% if message.role == 'tool' %}<tool_response>"
    "{{ message.content or '' }}</tool_response>{% else %}{{ message.content or '' }}{% endif %}"
    '{% for call in message.tool_calls or [] %}<tool_call>\n{"name": '
    '{{ call.function.name | tojson }}, "arguments": {% if call.function.arguments is string %}'
    "{{ call.function.arguments }}{% else %}{{ (call.function.arguments or {}) | tojson }}"
    "{% endif %}}\n</tool_call>{% endfor %}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)

_OPTIONS: dict[str, Any] = {
    "pad_token": _PAD,
    "bos_token": _BOS,
    "eos_token": _EOS,
    "clean_up_tokenization_spaces": False,
}


def build_arithmetic_tokenizer() -> Any:
    """Builds a tokenizer with one token per character after a start token, and a chat template.

    `tokenizer(text)` gives the same tokens as the template, so that a model gets the same prompt in
    transformers, in vLLM and in a chat.

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
    # In Oniguruma, (?m) makes the dot match line breaks.
    core.pre_tokenizer = pre_tokenizers.Split(Regex("(?m)."), behavior="isolated")
    core.decoder = decoders.Fuse()
    core.post_processor = processors.TemplateProcessing(
        single=f"{_BOS} $A", special_tokens=[(_BOS, vocabulary[_BOS])]
    )
    # With a Qwen2 config, `AutoTokenizer` uses the pre-tokenizer of Qwen2 for every tokenizer.json,
    # which has no plain space. Added tokens are matched before pre-tokenization in both.
    core.add_tokens([AddedToken(" ", normalized=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token=_UNKNOWN, chat_template=_CHAT_TEMPLATE, **_OPTIONS
    )


def build_byte_tokenizer() -> Any:
    """Builds a tokenizer with one token per byte of UTF-8 after a start token.

    Decoding restores any encoded text. `tokenizer(text)` gives the same tokens as the chat
    template, which is that of `build_arithmetic_tokenizer` and also writes tools and their calls.

    Returns:
        A `transformers.PreTrainedTokenizerFast` with `pad`, `bos` and `eos` as ids 0 to 2 and the
        256 bytes, in the order of GPT-2's alphabet, as ids 3 to 258. There is no unknown token. Id
        259 is a pair of bytes that never occurs, since GGUF needs at least one merge.

    Example:
        >>> tokenizer = build_byte_tokenizer()
        >>> tokenizer.decode(tokenizer.encode("naïve 蛇"), skip_special_tokens=True)
        'naïve 蛇'
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    # GPT-2's alphabet of visible characters for bytes: byte-level BPE without learned merges.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = (_PAD, _BOS, _EOS, *alphabet, 2 * _NEVER)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    core = Tokenizer(models.BPE(vocabulary, [(_NEVER, _NEVER)]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.post_processor = processors.TemplateProcessing(
        single=f"{_BOS} $A", special_tokens=[(_BOS, vocabulary[_BOS])]
    )
    # Without an unknown token, the tokenizer of Qwen2 would add another token to the vocabulary.
    return PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token=_PAD, chat_template=_TOOL_TEMPLATE, **_OPTIONS
    )


def build_tokenizer(model: SmallModel) -> Any:
    """Builds the tokenizer of a model that is initialized from a config."""
    is_text = isinstance(model, TextModelFromConfig)
    return build_byte_tokenizer() if is_text else build_arithmetic_tokenizer()
