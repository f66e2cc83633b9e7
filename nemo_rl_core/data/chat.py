"""Tokenization with the model's chat template: prompts, and rows of each kind."""

from collections.abc import Mapping, Sequence
from typing import Any

from nemo_rl_core.config.row_policy import MaskKind
from nemo_rl_core.data.control import encode_text, spelled_control_tokens
from nemo_rl_core.data.loss_masks import (
    SupervisedExample,
    answer_example,
    masked_example,
    require_eos,
)
from nemo_rl_core.data.renderer import Renderer, Tools
from nemo_rl_core.data.tools import ToolsByTask, shown_tools, tools_of
from nemo_rl_core.data.turns import Turn, as_turns, is_trained
from nemo_rl_core.errors import DataError


def prompt_token_ids(
    tokenizer: Any, prompt: str, *, tools: Tools = (), row: str | None = None
) -> list[int]:
    """Returns the token ids of a prompt to sample from.

    Args:
        tokenizer: A transformers tokenizer. With a chat template, the prompt ends with the start
            of the assistant's turn; without one, the text is encoded unchanged.
        prompt: The user's text, or the JSON of a conversation that the assistant answers next.
    """
    turns = as_turns(prompt, role="user")
    row = row or f"the prompt {prompt[:80]!r}"
    return Renderer(tokenizer).opening(turns, tools=tools, row=row)


def supervised_example(
    tokenizer: Any, prompt: str, completion: str, *, tools: Tools = ()
) -> SupervisedExample:
    """Tokenizes a prompt and its completion; the mask selects the completion and its final EOS.

    Template text after the end-of-sequence token (often a line break) is cut off, since sampling
    stops before it. If the template ends a turn without that token, it is appended.

    Args:
        prompt: The user's text, or the JSON of a conversation that the assistant answers next.
    """
    turns = [*as_turns(prompt, role="user"), {"role": "assistant", "content": completion}]
    row = f"the row with prompt {prompt[:80]!r}"
    return masked_example(tokenizer, turns, trained=[len(turns) - 1], tools=tools, row=row)


def conversation_example(
    tokenizer: Any,
    messages: Sequence[Turn],
    *,
    mask: MaskKind = "all_assistant_turns",
    tools: Tools = (),
) -> SupervisedExample:
    """Tokenizes a conversation; the mask selects assistant turns including their end tokens.

    System, user and tool turns are masked together with the template's text around them, and so
    are turns whose key `train` is false.

    Args:
        messages: Turns; those after the assistant's last one are left out.
    """
    turns = list(messages)
    assistant_turns = [index for index, turn in enumerate(turns) if turn["role"] == "assistant"]
    row = f"the conversation that begins with {str(turns[0].get('content'))[:80]!r}"
    if not assistant_turns:
        raise DataError(
            f"{row} has no assistant turn",
            got=f"the roles {', '.join(str(turn['role']) for turn in turns)[-80:]}",
            fix="remove the row",
        )
    turns = turns[: assistant_turns[-1] + 1]  # nothing is learned from later turns
    chosen = assistant_turns if mask == "all_assistant_turns" else assistant_turns[-1:]
    trained = [index for index in chosen if is_trained(turns[index])]
    return masked_example(tokenizer, turns, trained=trained, tools=tools, row=row)


def text_example(tokenizer: Any, text: str) -> SupervisedExample:
    """Tokenizes plain text; trains on its second token through the end-of-sequence token.

    The text may end with that token but may not contain other control tokens: a rendered
    conversation cannot be distinguished from a text about one.
    """
    require_eos(tokenizer)
    row = f"the text that begins with {text[:80]!r}"
    text = text.removesuffix(tokenizer.eos_token)
    if spelled := spelled_control_tokens(tokenizer, text):
        raise DataError(
            f"{row} spells a control token",
            expected=f"text without control tokens, except {tokenizer.eos_token} at its end",
            got=", ".join(spelled),
            fix="store conversations as messages, so that the chat template writes such tokens; "
            "remove them from other texts",
        )
    ids = [*encode_text(tokenizer, text, row=row), tokenizer.eos_token_id]
    return SupervisedExample(tuple(ids), (False,) + (True,) * (len(ids) - 1))


def preference_example(
    tokenizer: Any, row: Mapping[str, Any]
) -> tuple[SupervisedExample, SupervisedExample]:
    """Tokenizes the chosen and the rejected completion of a prompt, with the prompt masked.

    Args:
        row: `prompt`, `chosen` and `rejected`, each a text, a list of turns, or its JSON; and
            optionally `max_tokens`, to which both are truncated.
    """
    prompt = as_turns(row["prompt"], role="user")
    chosen, rejected = (
        answer_example(
            tokenizer, prompt, as_turns(row[side], role="assistant"), tools=tools_of(row)
        ).truncated(_limit(row))
        for side in ("chosen", "rejected")
    )
    return chosen, rejected


def tokenize_row(
    tokenizer: Any, row: Mapping[str, Any], offered: ToolsByTask | None = None
) -> dict[str, SupervisedExample]:
    """Tokenizes a row of any kind; the kind follows from its columns.

    Args:
        offered: Tools of the environment, which a prompt shows; see `shown_tools`.

    Returns:
        `chosen` and `rejected` of a preference pair, `row` of all other kinds.
    """
    if "chosen" in row:
        chosen, rejected = preference_example(tokenizer, row)
        return {"chosen": chosen, "rejected": rejected}
    if "messages" in row:
        turns = as_turns(row["messages"], role="user")
        tools = tools_of(row)
        example = conversation_example(tokenizer, turns, mask=row["mask"], tools=tools)
    elif "text" in row:
        example = text_example(tokenizer, row["text"])
    else:
        tools = shown_tools(offered or {}, row)
        example = supervised_example(tokenizer, row["prompt"], row["completion"], tools=tools)
    return {"row": example.truncated(_limit(row))}


def _limit(row: Mapping[str, Any]) -> int | None:
    return int(row["max_tokens"]) if "max_tokens" in row else None
