"""Tokenization with the model's chat template, and loss masks.

The tokens of a turn are found by rendering the conversation up to the turn and up to its end. Both
must be prefixes of the whole, as text and as tokens. Templates therefore need no generation marks,
and a template that renders a turn differently once others follow (some drop reasoning) raises an
error instead of training on wrong tokens. Left out: templates that take tool definitions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_rl_core.config.data import MaskKind
from nemo_rl_core.data.control import (
    Rendered,
    encode_conversation,
    encode_text,
    spelled_control_tokens,
)
from nemo_rl_core.data.turns import Turn, as_turns
from nemo_rl_core.data.unknown import (
    OTHER_MODELS,
    described_unknown,
    unknown_characters,
    unknown_token_id,
)
from nemo_rl_core.errors import DataError


@dataclass(frozen=True, slots=True)
class SupervisedExample:
    """Token ids of a prompt with its completion, and the loss mask.

    Attributes:
        token_ids: `[T]`, prompt, completion and end-of-sequence token.
        loss_mask: `[T]`, True on the completion and the end-of-sequence token.

    Example:
        >>> SupervisedExample(token_ids=(1, 5, 6, 2), loss_mask=(False, False, True, True))
        SupervisedExample(token_ids=(1, 5, 6, 2), loss_mask=(False, False, True, True))
    """

    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]

    @property
    def num_trained_tokens(self) -> int:
        """Number of tokens in a loss. The first token is not predicted, so its mask is ignored."""
        return sum(self.loss_mask[1:])

    def truncated(self, max_tokens: int | None) -> "SupervisedExample":
        """The first `max_tokens` tokens; all of them for None."""
        return SupervisedExample(self.token_ids[:max_tokens], self.loss_mask[:max_tokens])


def prompt_token_ids(tokenizer: Any, prompt: str, *, row: str | None = None) -> list[int]:
    """Returns the token ids of a prompt to sample from.

    Args:
        tokenizer: A transformers tokenizer. With a chat template, the assistant's turn is opened;
            without one, the text is encoded as it stands.
        prompt: The user's text, or the JSON of a conversation that the assistant is to answer.
        row: Name of the row in error messages; the first characters of the prompt by default.

    Raises:
        DataError: For several turns and no chat template, for a prompt without tokens, and for text
            that cannot be distinguished from the template's control tokens.
    """
    turns = as_turns(prompt, role="user")
    row = row or f"the prompt {prompt[:80]!r}"
    ids = _rendered(tokenizer, turns, row, add_generation_prompt=True)[1]
    if not ids:
        raise DataError(
            f"{row} has no tokens",
            expected="at least one token to sample after",
            got="a chat template that writes nothing" if tokenizer.chat_template else "no text",
            fix="remove the row, or take another chat template",
        )
    return ids


def supervised_example(tokenizer: Any, prompt: str, completion: str) -> SupervisedExample:
    """Tokens of a prompt and its completion, trained on the completion through end-of-sequence.

    Template text after the end-of-sequence token (often a line break) is cut off, since sampling
    stops before it. A template that ends a turn without that token gets it appended.

    Args:
        tokenizer: A transformers tokenizer.
        prompt: The user's text, or the JSON of a conversation that the assistant is to answer.
        completion: The assistant's text.

    Raises:
        DataError: When the tokens of the prompt alone are not the first tokens of the whole, so
            that training and sampling would have different prompts; when the completion is empty;
            or when there is no end-of-sequence token.
    """
    turns = [*as_turns(prompt, role="user"), {"role": "assistant", "content": completion}]
    row = f"the row with prompt {prompt[:80]!r}"
    return _masked_example(tokenizer, turns, trained=[len(turns) - 1], row=row)


def conversation_example(
    tokenizer: Any, messages: Sequence[Turn], *, mask: MaskKind = "all_assistant_turns"
) -> SupervisedExample:
    """Tokens of a conversation, trained on the assistant's turns including their end tokens.

    System, user and tool turns are masked, with the template's text around them.

    Args:
        tokenizer: A transformers tokenizer, with a chat template unless there are two turns only.
        messages: Turns, the last of them the assistant's; see `turns.fault`.
        mask: Every turn of the assistant, or the last alone.

    Raises:
        DataError: When the template renders the beginning of the conversation differently once more
            follows, or a turn begins or ends inside a token.
    """
    turns = list(messages)
    assistant_turns = [index for index, turn in enumerate(turns) if turn["role"] == "assistant"]
    row = f"the conversation that begins with {str(turns[0].get('content'))[:80]!r}"
    if not assistant_turns or assistant_turns[-1] != len(turns) - 1:
        raise DataError(
            f"{row} does not end with an assistant turn",
            expected="an assistant turn at the end",
            got=f"the roles {', '.join(str(turn['role']) for turn in turns)[-80:]}",
            fix="remove the turns behind the assistant's last, or the row",
        )
    trained = assistant_turns if mask == "all_assistant_turns" else assistant_turns[-1:]
    return _masked_example(tokenizer, turns, trained=trained, row=row)


def text_example(tokenizer: Any, text: str) -> SupervisedExample:
    """Plain text, trained on from its second token through the end-of-sequence token.

    The text may end with that token but may not contain other control tokens: a rendered
    conversation cannot be distinguished from a text about one.

    Raises:
        DataError: When there is no end-of-sequence token, or the text spells a control token.
    """
    _require_eos(tokenizer)
    row = f"the text that begins with {text[:80]!r}"
    text = text.removesuffix(tokenizer.eos_token)
    if spelled := spelled_control_tokens(tokenizer, text):
        raise DataError(
            f"{row} spells a control token",
            expected=f"text without one, but for {tokenizer.eos_token} at its end",
            got=", ".join(spelled),
            fix="store conversations as messages, and let the chat template write such tokens; "
            "remove them from other texts",
        )
    ids = [*encode_text(tokenizer, text, row=row), tokenizer.eos_token_id]
    return SupervisedExample(tuple(ids), (False,) + (True,) * (len(ids) - 1))


def preference_example(
    tokenizer: Any, row: Mapping[str, Any]
) -> tuple[SupervisedExample, SupervisedExample]:
    """Tokenizes the chosen and the rejected completion of a prompt, with the prompt masked.

    Args:
        tokenizer: A transformers tokenizer.
        row: `prompt`, `chosen` and `rejected`, each a text, a list of turns, or its JSON; and
            optionally `max_tokens`, to which both are truncated.

    Raises:
        DataError: As for `conversation_example`.
    """
    prompt = as_turns(row["prompt"], role="user")
    chosen, rejected = (
        _answer_example(tokenizer, prompt, as_turns(row[side], role="assistant")).truncated(
            _limit(row)
        )
        for side in ("chosen", "rejected")
    )
    return chosen, rejected


def tokenize_row(tokenizer: Any, row: Mapping[str, Any]) -> dict[str, SupervisedExample]:
    """Tokenizes a row of any kind; the kind follows from its columns.

    Args:
        tokenizer: A transformers tokenizer.
        row: As `schemas.validate_rows` returns it.

    Returns:
        `chosen` and `rejected` of a preference pair, `row` of all other kinds.
    """
    if "chosen" in row:
        chosen, rejected = preference_example(tokenizer, row)
        return {"chosen": chosen, "rejected": rejected}
    if "messages" in row:
        turns = as_turns(row["messages"], role="user")
        example = conversation_example(tokenizer, turns, mask=row["mask"])
    elif "text" in row:
        example = text_example(tokenizer, row["text"])
    else:
        example = supervised_example(tokenizer, row["prompt"], row["completion"])
    return {"row": example.truncated(_limit(row))}


def _limit(row: Mapping[str, Any]) -> int | None:
    return int(row["max_tokens"]) if "max_tokens" in row else None


def _answer_example(tokenizer: Any, prompt: list[Turn], answer: list[Turn]) -> SupervisedExample:
    """Tokenizes prompt and answer; only the answer's assistant turns are trained on."""
    trained = [
        index for index, turn in enumerate(answer, start=len(prompt)) if turn["role"] == "assistant"
    ]
    row = f"the pair with prompt {str(prompt[-1]['content'])[:80]!r}"
    return _masked_example(tokenizer, [*prompt, *answer], trained=trained, row=row)


def _masked_example(
    tokenizer: Any, turns: list[Turn], *, trained: Sequence[int], row: str
) -> SupervisedExample:
    """Tokenizes a conversation and masks all turns but those at the indices `trained`."""
    _require_eos(tokenizer)
    text, ids = _rendered(tokenizer, turns, row, add_generation_prompt=False)
    mask = [False] * len(ids)
    for index in trained:
        before = _rendered(tokenizer, turns[:index], row, add_generation_prompt=True)
        start = _prefix_length(before, (text, ids), row)
        if index == len(turns) - 1:
            answer = _through_eos(tokenizer, ids[start:])
            if len(answer) < 2:
                raise DataError(
                    f"{row} has an empty completion",
                    got=repr(turns[-1]["content"][:80]),
                    fix="fill its column `completion`, or remove the row",
                )
            ids, mask = ids[:start] + answer, mask[:start] + [True] * len(answer)
        else:
            through = _rendered(tokenizer, turns[: index + 1], row, add_generation_prompt=False)
            end = _prefix_length(through, (text, ids), row)
            turn_ids = _through_end_of_turn(tokenizer, ids[start:end])
            mask[start : start + len(turn_ids)] = [True] * len(turn_ids)
    unknown = unknown_token_id(tokenizer)
    if unknown is not None and any(
        token == unknown and is_trained for token, is_trained in zip(ids, mask, strict=True)
    ):
        answers = "".join(str(turns[index]["content"]) for index in trained)
        raise DataError(
            f"{row} trains on characters that the tokenizer does not know",
            got=described_unknown(tokenizer, unknown_characters(tokenizer, answers)),
            fix=f"mend or remove the row, or {OTHER_MODELS}",
        )
    return SupervisedExample(token_ids=tuple(ids), loss_mask=tuple(mask))


def _rendered(
    tokenizer: Any, turns: list[Turn], row: str, *, add_generation_prompt: bool
) -> Rendered:
    if tokenizer.chat_template:
        return encode_conversation(
            tokenizer, turns, row=row, add_generation_prompt=add_generation_prompt
        )
    if [turn["role"] for turn in turns] not in (["user"], ["user", "assistant"]):
        raise DataError(
            f"{row} has several turns, and the tokenizer has no chat template to write them with",
            expected="one user turn and one assistant turn",
            got=", ".join(str(turn["role"]) for turn in turns)[:80],
            fix="take the tokenizer of a chat model, or set its chat_template",
        )
    text = "".join(turn["content"] for turn in turns)
    return text, encode_text(tokenizer, text, row=row)


def _prefix_length(beginning: Rendered, whole: Rendered, row: str) -> int:
    """Checks that `beginning` is a prefix of `whole` and returns its number of tokens."""
    (start_text, start), (text, ids) = beginning, whole
    if not text.startswith(start_text):
        agreed = next(
            (n for n, (a, b) in enumerate(zip(start_text, text, strict=False)) if a != b), len(text)
        )
        raise DataError(
            f"{row} cannot be split into its turns: the chat template renders an earlier turn "
            "differently when others follow",
            expected=f"text that goes on with {start_text[agreed : agreed + 40]!r}",
            got=repr(text[agreed : agreed + 40]),
            fix="train on the last turn alone (mask: final_turn), or use a chat template that "
            "renders a turn the same whether or not it is the last",
        )
    if ids[: len(start)] != start:
        raise DataError(
            f"{row} cannot be split into prompt and completion: "
            "its prompt is tokenized differently when the completion follows",
            expected=f"tokens that start with {start[-5:]} at position {max(len(start) - 5, 0)}",
            got=str(ids[max(len(start) - 5, 0) : len(start) + 1]),
            fix="end prompts where a token ends (without a trailing space), or use a chat template "
            "that ends turns with a token of its own",
        )
    return len(start)


def _require_eos(tokenizer: Any) -> None:
    if tokenizer.eos_token_id is None:
        raise DataError(
            "the tokenizer has no end-of-sequence token, so a model could not learn to stop",
            fix="set eos_token in the model's tokenizer_config.json",
        )


def _through_eos(tokenizer: Any, ids: list[int]) -> list[int]:
    """Cuts the last turn after its end-of-sequence token, or appends that token."""
    eos: int = tokenizer.eos_token_id
    if eos in ids:
        end = len(ids) - ids[::-1].index(eos)
        if not tokenizer.decode(ids[end:]).strip():
            return ids[:end]
    return [*ids, eos]


def _through_end_of_turn(tokenizer: Any, ids: list[int]) -> list[int]:
    """Cuts an earlier turn after the special token that ends it, if there is one."""
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    last = max((index for index, token in enumerate(ids) if token in special), default=len(ids) - 1)
    return ids if tokenizer.decode(ids[last + 1 :]).strip() else ids[: last + 1]
