"""Token sequences with the mask of what is trained on.

The tokens of a turn are found by rendering the conversation up to the turn and up to its end. Both
must be prefixes of the whole, as text and as tokens. Templates therefore need no generation marks,
and a template that renders a turn differently once others follow (some drop reasoning) raises an
error instead of training on wrong tokens. Left out: templates that take tool definitions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nemo_rl_core.data.control import (
    Rendered,
    encode_conversation,
    encode_text,
)
from nemo_rl_core.data.turns import Turn
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


def answer_example(tokenizer: Any, prompt: list[Turn], answer: list[Turn]) -> SupervisedExample:
    """Tokenizes prompt and answer; only the answer's assistant turns are trained on."""
    trained = [
        index for index, turn in enumerate(answer, start=len(prompt)) if turn["role"] == "assistant"
    ]
    row = f"the pair with prompt {str(prompt[-1]['content'])[:80]!r}"
    return masked_example(tokenizer, [*prompt, *answer], trained=trained, row=row)


def masked_example(
    tokenizer: Any, turns: list[Turn], *, trained: Sequence[int], row: str
) -> SupervisedExample:
    """Tokenizes a conversation and masks all turns but those at the indices `trained`."""
    require_eos(tokenizer)
    text, ids = rendered_conversation(tokenizer, turns, row, add_generation_prompt=False)
    mask = [False] * len(ids)
    for index in trained:
        before = rendered_conversation(tokenizer, turns[:index], row, add_generation_prompt=True)
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
            through = rendered_conversation(
                tokenizer, turns[: index + 1], row, add_generation_prompt=False
            )
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


def rendered_conversation(
    tokenizer: Any, turns: list[Turn], row: str, *, add_generation_prompt: bool
) -> Rendered:
    """The text and the token ids of a conversation, or of a prompt alone without a template.

    Raises:
        DataError: For several turns without a chat template.
    """
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


def require_eos(tokenizer: Any) -> None:
    """Refuses a tokenizer without an end-of-sequence token.

    Raises:
        DataError: If it has none.
    """
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
