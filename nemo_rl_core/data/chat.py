"""Tokenization with the model's chat template: prompts, and rows of each kind."""

from collections.abc import Mapping, Sequence
from typing import Any

from nemo_rl_core.config.row_policy import MaskKind
from nemo_rl_core.data.control import (
    encode_text,
    spelled_control_tokens,
)
from nemo_rl_core.data.loss_masks import (
    SupervisedExample,
    answer_example,
    masked_example,
    rendered_conversation,
    require_eos,
)
from nemo_rl_core.data.turns import Turn, as_turns
from nemo_rl_core.errors import DataError


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
    ids = rendered_conversation(tokenizer, turns, row, add_generation_prompt=True)[1]
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
    return masked_example(tokenizer, turns, trained=[len(turns) - 1], row=row)


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
    return masked_example(tokenizer, turns, trained=trained, row=row)


def text_example(tokenizer: Any, text: str) -> SupervisedExample:
    """Plain text, trained on from its second token through the end-of-sequence token.

    The text may end with that token but may not contain other control tokens: a rendered
    conversation cannot be distinguished from a text about one.

    Raises:
        DataError: When there is no end-of-sequence token, or the text spells a control token.
    """
    require_eos(tokenizer)
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
        answer_example(tokenizer, prompt, as_turns(row[side], role="assistant")).truncated(
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
