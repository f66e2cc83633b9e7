"""Byte tokenizers with published chat templates."""

from functools import cache
from pathlib import Path
from typing import Any

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_ADDED = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)


@cache
def qwen3_tokenizer() -> Any:
    """Returns a tokenizer with one token per byte, and Qwen3's tokens and template."""
    import trl
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*_SPECIAL, *alphabet])}
    core = Tokenizer(models.BPE(vocabulary, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(_SPECIAL))
    core.add_tokens([AddedToken(each, normalized=False) for each in _ADDED])
    template = Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja"
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=template.read_text(),
    )
