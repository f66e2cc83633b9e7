"""Token sequences with loss masks.

The tokens of a turn are located by rendering the conversation up to the turn and up to its end.
Both must be prefixes of the full conversation, as text and as tokens. Templates therefore need no
generation marks, and a template that renders a turn differently when others follow (some drop
reasoning) raises an error instead of training on wrong tokens. Tool definitions are not supported.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

from nemo_rl_core.data.control import Rendered
from nemo_rl_core.data.control_tokens import control_tokens
from nemo_rl_core.data.renderer import rendered_conversation
from nemo_rl_core.data.turns import Turn, is_trained
from nemo_rl_core.data.unknown import (
    OTHER_MODELS,
    described_unknown,
    unknown_characters,
    unknown_token_id,
)
from nemo_rl_core.data.written import refuse_unwritten
from nemo_rl_core.errors import DataError


@dataclass(frozen=True, slots=True)
class SupervisedExample:
    """Token ids of a prompt with its completion, and the loss mask.

    Attributes:
        token_ids: Tokens of prompt, completion and end of sequence, `[T]`.
        loss_mask: True on the completion and the end-of-sequence token, `[T]`.

    Example:
        >>> SupervisedExample(token_ids=(1, 5, 6, 2), loss_mask=(False, False, True, True))
        SupervisedExample(token_ids=(1, 5, 6, 2), loss_mask=(False, False, True, True))
    """

    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]

    @property
    def num_trained_tokens(self) -> int:
        """Number of tokens in the loss, without the first token, which is never predicted."""
        return sum(self.loss_mask[1:])

    def truncated(self, max_tokens: int | None) -> "SupervisedExample":
        """Returns the first `max_tokens` tokens; all tokens for None."""
        return SupervisedExample(self.token_ids[:max_tokens], self.loss_mask[:max_tokens])


def answer_example(tokenizer: Any, prompt: list[Turn], answer: list[Turn]) -> SupervisedExample:
    """Tokenizes prompt and answer; trains only on the answer's assistant turns.

    A turn with `train: false` stays masked.
    """
    trained = [index for index, turn in enumerate(answer, start=len(prompt)) if is_trained(turn)]
    row = f"the pair with prompt {str(prompt[-1]['content'])[:80]!r}"
    return masked_example(tokenizer, [*prompt, *answer], trained=trained, row=row)


def masked_example(
    tokenizer: Any, turns: list[Turn], *, trained: Sequence[int], row: str
) -> SupervisedExample:
    """Tokenizes a conversation and masks all turns except those at the indices `trained`."""
    require_eos(tokenizer)
    text, ids = rendered_conversation(tokenizer, turns, row, add_generation_prompt=False)
    refuse_unwritten(tokenizer, turns, trained=trained, row=row)
    last = len(turns) - 1
    prompts = [
        rendered_conversation(tokenizer, turns[:index], row, add_generation_prompt=True)
        for index in trained
    ]
    if last in trained:
        ids = _after_prompt(tokenizer, prompts[-1], (text, ids), turns[last])
    mask = [False] * len(ids)
    for index, before in zip(trained, prompts, strict=True):
        question = turns[index - 1]["content"] if index == last and index else None
        start = _prefix_length(before, (text, ids), row, question=question)
        if index == last:
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
            if ids[end : end + 1] == [tokenizer.eos_token_id] and ids[end] not in ids[start:end]:
                end += 1  # the template writes it only between turns
            turn_ids = _through_end_of_turn(tokenizer, ids[start:end])
            mask[start : start + len(turn_ids)] = [True] * len(turn_ids)
    unknown = unknown_token_id(tokenizer)
    if unknown is not None and unknown in compress(ids, mask):
        answers = "".join(str(turns[index]["content"]) for index in trained)
        raise DataError(
            f"{row} trains on characters that the tokenizer does not know",
            got=described_unknown(tokenizer, unknown_characters(tokenizer, answers)),
            fix=f"correct or remove the row, or {OTHER_MODELS}",
        )
    return SupervisedExample(token_ids=tuple(ids), loss_mask=tuple(mask))


def _after_prompt(
    tokenizer: Any, prompt: Rendered, conversation: Rendered, answer: Turn
) -> list[int]:
    """Encodes the answer separately from the prompt that sampling starts from, if necessary.

    The template of Qwen3-Thinking ends prompts with `<think>` and a line break, and writes another
    line break before `</think>` if the reasoning is empty. Encoded together, both would become one
    token that is never sampled.
    """
    (prompt_text, prompt_ids), (text, ids) = prompt, conversation
    rest = text.removeprefix(prompt_text)
    is_split_by_template = text.startswith(prompt_text) and not rest.startswith(answer["content"])
    if ids[: len(prompt_ids)] == prompt_ids or not (
        tokenizer.chat_template and is_split_by_template
    ):
        return ids
    joined = [*prompt_ids, *tokenizer.encode(rest, add_special_tokens=False)]
    control = control_tokens(tokenizer, tokenizer.get_chat_template())
    is_same = control.among(joined) == control.among(ids)
    return joined if is_same and tokenizer.decode(joined) == tokenizer.decode(ids) else ids


def _prefix_length(
    prefix: Rendered, full: Rendered, row: str, *, question: str | None = None
) -> int:
    """Checks that `prefix` is a prefix of `full` and returns its number of tokens."""
    (start_text, start), (text, ids) = prefix, full
    if not text.startswith(start_text):
        split = next(
            (n for n, (a, b) in enumerate(zip(start_text, text, strict=False)) if a != b), len(text)
        )
        if question is not None and question.strip() in text[:split]:
            raise DataError(
                f"{row} cannot be trained on: the chat template ends a prompt to sample from with "
                "text that it does not write before this answer",
                expected=f"a conversation that continues with {start_text[split : split + 40]!r}",
                got=repr(text[split : split + 40]),
                fix="use a chat template that starts the last answer in the same way as an answer "
                "to sample, such as with <think>, or one that leaves this text out of prompts",
            )
        raise DataError(
            f"{row} cannot be split into its turns: the chat template renders an earlier turn "
            "differently when others follow",
            expected=f"text that continues with {start_text[split : split + 40]!r}",
            got=repr(text[split : split + 40]),
            fix="train only on the last turn (mask: final_turn; for a pair, keep earlier answers "
            "in the prompt), or use a chat template that renders the last turn like any other",
        )
    if ids[: len(start)] != start:
        earlier = "" if question is not None else "train only on the last turn (mask: final_turn), "
        raise DataError(
            f"{row} cannot be split into prompt and completion: "
            "its prompt is tokenized differently when the completion follows",
            expected=f"tokens that start with {start[-5:]} at position {max(len(start) - 5, 0)}",
            got=str(ids[max(len(start) - 5, 0) : len(start) + 1]),
            fix=f"{earlier}end prompts where a token ends (without a trailing space), or use a "
            "chat template that ends turns with a separate token",
        )
    return len(start)


def require_eos(tokenizer: Any) -> None:
    """Raises a `DataError` if the tokenizer has no end-of-sequence token."""
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
