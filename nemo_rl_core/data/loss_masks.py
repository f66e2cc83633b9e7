"""Token sequences with loss masks.

The tokens of a turn are located by rendering the conversation up to the turn and up to its end.
Both must be prefixes of the full conversation, as text and as tokens. Templates therefore need no
generation marks. If a template renders a turn differently when others follow (some drop reasoning),
the sequence is that of a rollout: each trained turn as it would be sampled, and then continued.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any

from nemo_rl_core.data.control import Rendered, encode_guarded, guarded_conversation, guarded_text
from nemo_rl_core.data.control_tokens import GUARD, control_tokens
from nemo_rl_core.data.renderer import MARK, Renderer, Tools, rendered_conversation, rewrites_past
from nemo_rl_core.data.turns import Turn, is_trained
from nemo_rl_core.data.unknown import (
    OTHER_MODELS,
    described_unknown,
    unknown_characters,
    unknown_token_id,
)
from nemo_rl_core.data.written import (
    END_OF_REASONING,
    START_OF_REASONING,
    opens_reasoning,
    reasoning_of,
    refuse_unwritten,
)
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


def answer_example(
    tokenizer: Any, prompt: list[Turn], answer: list[Turn], *, tools: Tools = ()
) -> SupervisedExample:
    """Tokenizes prompt and answer; trains only on the answer's assistant turns.

    A turn with `train: false` stays masked.
    """
    trained = [index for index, turn in enumerate(answer, start=len(prompt)) if is_trained(turn)]
    row = f"the pair with prompt {str(prompt[-1]['content'])[:80]!r}"
    return masked_example(tokenizer, [*prompt, *answer], trained=trained, tools=tools, row=row)


def masked_example(
    tokenizer: Any, turns: list[Turn], *, trained: Sequence[int], tools: Tools = (), row: str
) -> SupervisedExample:
    """Tokenizes a conversation and masks all turns except those at the indices `trained`."""
    require_eos(tokenizer)
    source = _Source(tokenizer, turns, tools, row)
    conversation = source.rendered(len(turns), is_open=False)
    refuse_unwritten(tokenizer, turns, trained=trained, tools=tools, row=row)
    try:
        ids, mask = _as_rendered(source, trained, conversation)
    except _RewritesPastError:
        ids, mask = _as_sampled(source, trained)
    unknown = unknown_token_id(tokenizer)
    if unknown is not None and unknown in compress(ids, mask):
        answers = "".join(str(turns[index]["content"]) for index in trained)
        raise DataError(
            f"{row} trains on characters that the tokenizer does not know",
            got=described_unknown(tokenizer, unknown_characters(tokenizer, answers)),
            fix=f"correct or remove the row, or {OTHER_MODELS}",
        )
    return SupervisedExample(token_ids=tuple(ids), loss_mask=tuple(mask))


class _RewritesPastError(Exception):
    """The template renders a turn differently when others follow, or than after its prompt."""


@dataclass(frozen=True)
class _Source:
    """A conversation and how to render it."""

    tokenizer: Any
    turns: list[Turn]
    tools: Tools
    row: str

    def rendered(self, num_turns: int, *, is_open: bool) -> Rendered:
        """Renders the first turns, and the start of the assistant's next if `is_open`."""
        return rendered_conversation(
            self.tokenizer,
            self.turns[:num_turns],
            self.row,
            add_generation_prompt=is_open,
            tools=self.tools,
        )

    def guarded(self, turns: list[Turn], *, is_open: bool = False) -> str:
        """Renders turns, with guards in contents that would spell control tokens."""
        tools = [*self.tools] or None
        options = {"add_generation_prompt": is_open, "tools": tools}
        return guarded_conversation(self.tokenizer, turns, row=self.row, **options)

    def last_answer(self, ids: list[int]) -> list[int]:
        """Returns the tokens of the last turn through the end of the sequence."""
        tokenizer, template = self.tokenizer, self.tokenizer.chat_template
        answer = _through_eos(tokenizer, ids)
        if self.turns[-1].get("tool_calls") and tokenizer.eos_token in str(template):
            ended = _through_end_of_turn(tokenizer, ids)  # calls may have another end
            answer = ended if control_tokens(tokenizer, template).among(ended[-1:]) else answer
        if len(answer) < 2:
            raise DataError(
                f"{self.row} has an empty completion",
                got=repr(self.turns[-1]["content"][:80]),
                fix="fill its column `completion`, or remove the row",
            )
        return answer


def _as_rendered(
    source: _Source, trained: Sequence[int], conversation: Rendered
) -> tuple[list[int], list[bool]]:
    """Returns the template's tokens of the conversation, and their mask."""
    tokenizer, turns, row = source.tokenizer, source.turns, source.row
    text, ids = conversation
    last = len(turns) - 1
    prompts = [source.rendered(index, is_open=True) for index in trained]
    if last in trained:
        ids = _after_prompt(source, prompts[-1], (text, ids))
    mask = [False] * len(ids)
    for index, before in zip(trained, prompts, strict=True):
        is_last = index == last
        if not is_last and _after_prompt(source, before, (text, ids)) is not ids:
            raise _RewritesPastError
        start = _prefix_length(before, (text, ids), row)
        if is_last:
            answer = source.last_answer(ids[start:])
            ids, mask = ids[:start] + answer, mask[:start] + [True] * len(answer)
        else:
            through = source.rendered(index + 1, is_open=False)
            end = _prefix_length(through, (text, ids), row)
            if turns[index + 1]["role"] != "assistant":
                end += _num_ends(tokenizer, ids[start:end], ids[end:])
            turn_ids = _through_end_of_turn(tokenizer, ids[start:end])
            mask[start : start + len(turn_ids)] = [True] * len(turn_ids)
    return ids, mask


def _as_sampled(source: _Source, trained: Sequence[int]) -> tuple[list[int], list[bool]]:
    """Returns the tokens of a rollout that samples the turns from the first trained one on."""
    tokenizer, turns = source.tokenizer, source.turns
    renderer = Renderer(tokenizer)
    rewrites_past(tokenizer, tokenizer.get_chat_template())  # logs it
    answers = [n for n, turn in enumerate(turns) if turn["role"] == "assistant" and n >= trained[0]]
    ids: list[int] = []
    mask: list[bool] = []
    for index, stop in zip(answers, [*answers[1:], len(turns)], strict=True):
        before, answer = _sampled_turn(source, index)
        if index == answers[0]:
            ids, mask = before, [False] * len(before)
        if stop == len(turns):
            answer = source.last_answer(answer)
            ids, mask = ids + answer, mask + [index in trained] * len(answer)
            break
        answer = _through_end_of_turn(tokenizer, answer)
        more = renderer.continuation(
            turns[: index + 1],
            turns[index + 1 : stop],
            tools=source.tools,
            last_token=answer[-1],
            row=source.row,
        )
        num_ends = _num_ends(tokenizer, answer, more) if stop > index + 1 else 0
        ids += answer + more
        mask += [index in trained] * (len(answer) + num_ends)
        mask += [False] * (len(more) - num_ends)
    return ids, mask


def _sampled_turn(source: _Source, index: int) -> tuple[list[int], list[int]]:
    """Returns the tokens before and of a turn that is the last one of its conversation."""
    tokenizer, turns = source.tokenizer, source.turns[: index + 1]
    before = source.rendered(index, is_open=True)
    text, ids = source.rendered(index + 1, is_open=False)
    if text.startswith(before[0]):
        ids = _after_prompt(replace(source, turns=turns), before, (text, ids))
        start = _prefix_length(before, (text, ids), source.row)
        return ids[:start], ids[start:]
    answer = _guarded_answer(source, turns)
    return before[1], encode_guarded(tokenizer, answer, add_special_tokens=False)


def _guarded_answer(source: _Source, turns: list[Turn]) -> str:
    """Returns the text of the last turn after a prompt that the template does not continue."""
    past = turns[:-1]
    prompt, full = source.guarded(past, is_open=True), source.guarded(turns)
    # The last answer may remove reasoning from earlier turns (GPT-OSS's).
    start = prompt.removeprefix(source.guarded(past))
    marked, short = (
        source.guarded([*before, {"role": "assistant", "content": MARK}]).partition(MARK)[0]
        for before in (past, [{"role": "user", "content": "0"}])
    )
    opening = "".join(marked.rpartition(start)[:2]) if start else marked
    is_last_turn = short.endswith(start + marked.removeprefix(opening))
    if opening and is_last_turn and full.startswith(opening):
        return full.removeprefix(opening)
    header = prompt.rstrip().removesuffix(START_OF_REASONING)
    if not opens_reasoning(source.tokenizer, turns) or not full.startswith(header):
        raise DataError(
            f"{source.row} cannot be split into its turns: the chat template renders an earlier "
            "turn differently when an answer follows, or another start of the answer",
            expected=f"text that starts with {prompt[-80:]!r}",
            got=repr(full[max(len(prompt) - 80, 0) : len(prompt) + 20]),
            fix="use a chat template that ends prompts with the start of an answer, or set the "
            "variable for rows with reasoning: model.chat_template_kwargs: {enable_thinking: true}",
        )
    # The prompt opens reasoning that the template does not write (DeepSeek's).
    written = full.removeprefix(header).removeprefix(START_OF_REASONING)
    reasoning = guarded_text(source.tokenizer, reasoning_of(turns[-1]))
    if not written.lstrip().startswith(END_OF_REASONING):
        return f"{reasoning}\n{END_OF_REASONING}\n\n{written.lstrip()}"
    return f"{reasoning}\n{written}" if reasoning else written


def _after_prompt(source: _Source, prompt: Rendered, conversation: Rendered) -> list[int]:
    """Encodes the answer separately from the prompt that sampling starts from, if necessary.

    A prompt that ends with a line break, and an answer that begins with one, would otherwise share
    a token that is never sampled.
    """
    tokenizer = source.tokenizer
    (prompt_text, prompt_ids), (text, ids) = prompt, conversation
    if ids[: len(prompt_ids)] == prompt_ids or not (
        tokenizer.chat_template and text.startswith(prompt_text)
    ):
        return ids
    guarded = source.guarded(source.turns)
    positions = [n for n, character in enumerate(guarded) if character != GUARD]
    rest = guarded[positions[len(prompt_text)] :] if len(positions) > len(prompt_text) else ""
    joined = [*prompt_ids, *encode_guarded(tokenizer, rest, add_special_tokens=False)]
    control = control_tokens(tokenizer, tokenizer.get_chat_template())
    is_same = control.among(joined) == control.among(ids)
    return joined if is_same and tokenizer.decode(joined) == tokenizer.decode(ids) else ids


def _prefix_length(prefix: Rendered, full: Rendered, row: str) -> int:
    """Checks that `prefix` is a prefix of `full` and returns its number of tokens."""
    (start_text, start), (text, ids) = prefix, full
    if not text.startswith(start_text):
        raise _RewritesPastError
    if ids[: len(start)] != start:
        raise DataError(
            f"{row} cannot be split into prompt and completion: "
            "its prompt is tokenized differently when the completion follows",
            expected=f"tokens that start with {start[-5:]} at position {max(len(start) - 5, 0)}",
            got=str(ids[max(len(start) - 5, 0) : len(start) + 1]),
            fix="end prompts where a token ends (without a trailing space), or use a "
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


def _num_ends(tokenizer: Any, turn: Sequence[int], following: Sequence[int]) -> int:
    """Returns 1 if a control token between turns is the end of this one, as GLM's; 0 otherwise."""
    if following[:1] == [tokenizer.eos_token_id]:
        return int(following[0] not in turn)
    control = control_tokens(tokenizer, tokenizer.get_chat_template())
    return int(bool(control.among(following[:1])) and not control.among(turn))


def _through_end_of_turn(tokenizer: Any, ids: list[int]) -> list[int]:
    """Cuts an earlier turn after the special token that ends it, if there is one."""
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    last = max((index for index, token in enumerate(ids) if token in special), default=len(ids) - 1)
    return ids if tokenizer.decode(ids[last + 1 :]).strip() else ids[: last + 1]
