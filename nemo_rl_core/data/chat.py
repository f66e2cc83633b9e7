"""Text as token ids, the way the model's own chat template wants it."""

from dataclasses import dataclass
from typing import Any

from nemo_rl_core.errors import DataError


@dataclass(frozen=True, slots=True)
class SupervisedExample:
    """A prompt with its completion, and which of the tokens are trained on.

    Attributes:
        token_ids: `[T]`, prompt, completion and end-of-sequence token.
        loss_mask: `[T]`, True on the completion and the end-of-sequence token.

    Example:
        >>> SupervisedExample(token_ids=(1, 5, 6, 2), loss_mask=(False, False, True, True))
        SupervisedExample(token_ids=(1, 5, 6, 2), loss_mask=(False, False, True, True))
    """

    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]


def prompt_token_ids(tokenizer: Any, text: str) -> list[int]:
    """The tokens that a completion is sampled after.

    Args:
        tokenizer: A transformers tokenizer. With a chat template, the text is a user's turn and the
            assistant's turn is opened; without one, the text is encoded as it stands.
        text: The user's text.
    """
    if tokenizer.chat_template:
        return _encode(tokenizer, _render(tokenizer, _user(text), add_generation_prompt=True))
    return list(tokenizer.encode(text))


def supervised_example(tokenizer: Any, prompt: str, completion: str) -> SupervisedExample:
    """Tokens of a prompt and its completion, trained on the completion through end-of-sequence.

    What a template puts behind the end-of-sequence token (often a line break) is cut off: a sampler
    stops before it. A template that ends a turn without that token gets it appended.

    Args:
        tokenizer: A transformers tokenizer.
        prompt: The user's text.
        completion: The assistant's text.

    Raises:
        DataError: When the tokens of the prompt alone are not the first tokens of the whole, so
            that training would see another prompt than sampling; when the completion is empty; or
            when there is no end-of-sequence token.
    """
    if tokenizer.eos_token_id is None:
        raise DataError(
            "the tokenizer has no end-of-sequence token, so a model could not learn to stop",
            fix="set eos_token in the model's tokenizer_config.json",
        )
    start = prompt_token_ids(tokenizer, prompt)
    whole = _whole_token_ids(tokenizer, prompt, completion)
    if whole[: len(start)] != start:
        raise DataError(
            f"the row with prompt {prompt[:80]!r} cannot be split into prompt and completion: "
            "its prompt is tokenized differently when the completion follows",
            expected=f"tokens that start with {start[-5:]} at position {max(len(start) - 5, 0)}",
            got=str(whole[max(len(start) - 5, 0) : len(start) + 1]),
            fix="end prompts where a token ends (without a trailing space), or use a chat template "
            "that renders a turn the same whether or not it is the last",
        )
    answer = _through_eos(tokenizer, whole[len(start) :])
    if len(answer) < 2:
        raise DataError(
            f"the row with prompt {prompt[:80]!r} has an empty completion",
            got=repr(completion[:80]),
            fix="fill its column `completion`, or remove the row",
        )
    return SupervisedExample(
        token_ids=(*start, *answer),
        loss_mask=(False,) * len(start) + (True,) * len(answer),
    )


def _whole_token_ids(tokenizer: Any, prompt: str, completion: str) -> list[int]:
    if not tokenizer.chat_template:
        return list(tokenizer.encode(prompt + completion))
    turns = [*_user(prompt), {"role": "assistant", "content": completion}]
    return _encode(tokenizer, _render(tokenizer, turns, add_generation_prompt=False))


def _through_eos(tokenizer: Any, ids: list[int]) -> list[int]:
    eos: int = tokenizer.eos_token_id
    if eos in ids:
        end = len(ids) - ids[::-1].index(eos)
        if not tokenizer.decode(ids[end:]).strip():
            return ids[:end]
    return [*ids, eos]


def _user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _render(tokenizer: Any, turns: list[dict[str, str]], *, add_generation_prompt: bool) -> str:
    text: str = tokenizer.apply_chat_template(
        turns, tokenize=False, add_generation_prompt=add_generation_prompt
    )
    return text


def _encode(tokenizer: Any, rendered: str) -> list[int]:
    # The template has already written the special tokens out.
    return list(tokenizer.encode(rendered, add_special_tokens=False))
