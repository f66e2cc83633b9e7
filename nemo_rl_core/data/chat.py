"""Text as token ids, through the tokenizer's chat template where it has one."""

from dataclasses import dataclass
from typing import Any

from nemo_rl_core.errors import DataError


@dataclass(frozen=True, slots=True)
class SupervisedExample:
    """A prompt and a completion as one sequence.

    Attributes:
        token_ids: `T` ids.
        loss_mask: For each token, whether it is trained on: the completion's, with the token that
            ends the turn.
    """

    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]


def prompt_token_ids(tokenizer: Any, text: str) -> list[int]:
    """What the model sees of a user's text, up to where its answer begins."""
    if tokenizer.chat_template is None:
        return _encode(tokenizer, text, add_special_tokens=True)
    return _render(tokenizer, [_turn("user", text)], add_generation_prompt=True)


def supervised_example(tokenizer: Any, prompt: str, completion: str) -> SupervisedExample:
    """The sequence to train on, its mask found by aligning rendered prefixes.

    The rendered prompt must be a prefix of the rendered conversation; what follows is the
    assistant's turn. Training ends with the last end-of-sequence token of that turn, which is added
    where the template has none, and leaves out white space that a template writes after it.

    Raises:
        DataError: If tokens merge across the border, or the completion is empty.
    """
    prefix = prompt_token_ids(tokenizer, prompt)
    if tokenizer.chat_template is None:
        whole = prefix + _encode(tokenizer, completion, add_special_tokens=False)
    else:
        whole = _render(tokenizer, [_turn("user", prompt), _turn("assistant", completion)])
    if whole[: len(prefix)] != prefix:
        raise DataError(
            "the prompt's tokens change when the completion is appended, so no mask can be made",
            got=f"prompt {prompt[:80]!r}, completion {completion[:80]!r}",
            fix="use a chat template that separates the turns",
        )
    answer = _ended(whole[len(prefix) :], tokenizer.eos_token_id)
    if len(answer) < 2:
        raise DataError(
            "a completion has no tokens to train on", got=f"prompt {prompt[:80]!r}", fix="fill it"
        )
    mask = (False,) * len(prefix) + (True,) * len(answer)
    return SupervisedExample(tuple(prefix + answer), mask)


def _ended(answer: list[int], eos: int | None) -> list[int]:
    """The turn up to and with its last end-of-sequence token."""
    if eos is None:
        return answer
    if eos not in answer:
        return [*answer, eos]
    return answer[: len(answer) - answer[::-1].index(eos)]


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _render(tokenizer: Any, turns: list[dict[str, str]], **options: Any) -> list[int]:
    ids = tokenizer.apply_chat_template(turns, tokenize=True, return_dict=True, **options)
    return list(ids["input_ids"])


def _encode(tokenizer: Any, text: str, *, add_special_tokens: bool) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=add_special_tokens))
