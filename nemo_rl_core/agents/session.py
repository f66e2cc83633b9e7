"""The calls of one agent as a tree of sampled turns, each with its tokens as the engine has them.

A call continues the longest sampled path that its messages begin with: by the tokens of the path,
with only the messages after it rendered. A call that continues no path starts at the root. An agent
that rewrites its history (compaction, sub-agents) therefore makes a branch, and each branch is a
training sample of the episode.
"""

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np

from nemo_rl_core.agents.calls import (
    CallOptions,
    ChatResult,
    RefusedError,
    SampledChoice,
    agreement,
    digest,
    ended,
    extended,
    prefix_digests,
)
from nemo_rl_core.data.renderer import Renderer
from nemo_rl_core.data.sampled_turns import TurnReader
from nemo_rl_core.data.turns import Turn, as_turns
from nemo_rl_core.distributed.batched_data_dict import InProcess, RemoteRow, RemoteRows
from nemo_rl_core.errors import NemoRLError
from nemo_rl_core.rollouts.engine import (
    Complete,
    CompletionRequest,
    CompletionResult,
    RemoteTokens,
    RolloutIndex,
    request_seed,
)
from nemo_rl_core.rollouts.episode import Bounds
from nemo_rl_core.types import Prompt

logger = logging.getLogger(__name__)

Tools = Sequence[Mapping[str, Any]]

_TURNS = 1 << 32
"""Larger than any number of turns; it separates the seeds of a context's further draws."""
_LONG = 100_000
"""Number of characters of a conversation that another thread renders, as the loop serves all."""


@dataclass(eq=False)
class _Context:
    """A conversation that the policy continues; equal conversations share it.

    Attributes:
        parent: Last sampled turn of the conversation.
        new_ids: Tokens after the parent; at the root, all tokens.
        turns_digest: Last of `prefix_digests`.
        seed_offset: Separates the seeds of conversations that begin differently; 0 for the row's.
        is_ambiguous: Whether paths with different tokens match, here or at an earlier turn.
        num_turns: Number of sampled turns.
        num_opening_tokens: Number of tokens before the first sampled turn.
        calls: Calls by the options that their results depend on.
    """

    parent: "_Node | None"
    turns: tuple[Turn, ...]
    tools: Tools
    new_ids: tuple[int, ...]
    digest: bytes
    turns_digest: bytes
    is_ambiguous: bool
    seed_offset: int = 0
    num_turns: int = 0
    num_opening_tokens: int = 0
    num_tokens: int = 0
    num_draws: int = 0
    calls: dict[tuple[Any, ...], list["_Call"]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.num_opening_tokens = self.num_tokens = len(self.new_ids)


@dataclass(eq=False)
class _Call:
    """A call and its repetitions.

    Attributes:
        first_draw: Index of its first choice among the draws of its context.
        num_answered_before: Number of calls that were answered when it came, without doubt.
        num_waiting: Number of clients that wait for the result.
        is_answered: Whether a client got the result.
    """

    context: _Context
    options: CallOptions
    first_draw: int
    num_answered_before: int
    task: "asyncio.Task[ChatResult] | None" = None
    num_waiting: int = 0
    is_answered: bool = False


@dataclass(eq=False)
class _Node:
    """A sampled turn.

    Attributes:
        columns: Arrays of the turn's tokens: ids, logprobs and, if recorded, weight versions.
        tokens_digest: Equal for paths with the same tokens.
        num_unread_tokens: Number of tokens of a next message that had no room.
    """

    context: _Context
    call: _Call
    result: CompletionResult
    columns: dict[str, Any]
    choice: SampledChoice
    digest: bytes
    tokens_digest: bytes
    is_cut: bool
    num_unread_tokens: int = 0

    @property
    def path(self) -> "Iterator[_Node]":
        """The sampled turns up to this one, last first."""
        node: _Node | None = self
        while node is not None:
            yield node
            node = node.context.parent

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The conversation up to this turn."""
        return *self.context.turns, self.choice.turn


@dataclass(frozen=True, slots=True)
class AgentSample:
    """A path of a session, as one training sample.

    Attributes:
        sequence: All tokens. Tokens that an earlier sample of the session trains on are masked.
        opening_ids: Tokens before the first sampled turn.
        turns: The conversation, with the policy's turns as they were read.
        texts: Texts of the policy's turns.
        truncated: Whether a limit ended the last turn or refused the next one.
        num_written: Number of sampled tokens, without masked ones.
    """

    sequence: RemoteTokens
    opening_ids: tuple[int, ...]
    turns: tuple[Turn, ...]
    texts: tuple[str, ...]
    truncated: bool
    num_written: int
    num_unread_tokens: int


class Session:
    """Calls of one agent: a tree of sampled turns, each with its tokens as the engine has them.

    Turns match if they are equal after normalization (`prefix_digests`). If several paths with
    different tokens match, the call is answered, but its sample is left out and counted.

    A repeated call is answered from the record: a call with the `Idempotency-Key` of an earlier
    one; one that the client names as a retry (`x-stainless-retry-count`, which the clients of
    OpenAI and Anthropic send); or one like an earlier call whose client left before the answer.
    All other equal calls sample again.

    The seed of a call depends on the first messages and their tools unless the messages are the
    row's, on the number of sampled turns before it, and on how many equal calls came before: a
    linear agent draws what a multi-turn environment draws, and concurrent calls draw the same in
    any order.

    Args:
        complete: Function that samples a completion.
        sampling: The run's temperature and other settings; calls with others are refused.
        max_opening_tokens: Maximum number of tokens before the first sampled turn.
    """

    def __init__(
        self,
        tokenizer: Any,
        index: RolloutIndex,
        *,
        complete: Complete,
        bounds: Bounds,
        prompt: Prompt,
        sampling: Mapping[str, float] | None = None,
        max_opening_tokens: int | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self._renderer, self._reader = _renderer_and_reader(tokenizer)
        self._index, self._bounds, self._prompt = index, bounds, prompt
        self._row_digest = prefix_digests(as_turns(prompt.text, role="user"), ())[-1]
        self._complete = complete
        self._sampling = sampling or {}
        self._max_opening_tokens = max_opening_tokens
        self._contexts: dict[bytes, _Context] = {}
        self._nodes: dict[bytes, list[_Node]] = {}
        self._calls: list[_Call] = []
        self._by_id: dict[str, _Node] = {}
        self._num_answered = 0  # calls, without ambiguous ones
        self._is_closed = False

    @property
    def num_ambiguous(self) -> int:
        """Number of turns that were sampled after an ambiguous path."""
        return sum(node.context.is_ambiguous for node in self._by_id.values())

    @property
    def num_unanswered(self) -> int:
        """Number of turns that were sampled, but that no client got."""
        return sum(not node.call.is_answered for node in self._by_id.values())

    async def chat(
        self, turns: Sequence[Turn], *, tools: Tools = (), options: CallOptions | None = None
    ) -> ChatResult:
        """Samples the next turn of a conversation, or several alternatives.

        If the caller is cancelled, sampling continues, and a repetition gets the result.

        Raises:
            RefusedError: If the call is refused.
        """
        options = options or CallOptions()
        self._refuse_if_closed()
        options.refuse_other_sampling(self._sampling)
        if tools and options.reads_calls:
            with _refused("tools"):
                self._reader.require_calls()
        context = await self._ready_context(turns, tools, options.previous)
        self._refuse_if_closed()
        call = self._call(context, options)
        if call.task is None or (call.task.done() and _has_failed(call.task)):
            call.task = asyncio.create_task(self._sample(call))
            call.task.add_done_callback(_has_failed)  # reads an error that no client waits for
        call.num_waiting += 1
        try:
            result = await asyncio.shield(call.task)
        except asyncio.CancelledError:
            self._refuse_if_closed()
            raise
        except NemoRLError as error:
            logger.warning("a completion for an agent failed: %s", error.in_one_line)
            raise RefusedError(error.in_one_line, status=500, code="server_error") from error
        finally:
            call.num_waiting -= 1
        self._num_answered += not (call.is_answered or call.context.is_ambiguous)
        call.is_answered = True
        return result

    async def count(self, turns: Sequence[Turn], tools: Tools = ()) -> int:
        """Returns the number of tokens of a conversation."""
        self._refuse_if_closed()
        return (await self._ready_context(turns, tools, None)).num_tokens

    def close(self) -> None:
        """Ends the session: calls in progress and later ones are refused."""
        self._is_closed = True
        for call in self._calls:
            if call.task is not None and not call.task.done():
                call.task.cancel()

    def samples(self) -> list[AgentSample]:
        """Returns the leaf paths, last the one of the call that came after all other answers.

        The order of others, and of all if the last calls were concurrent, does not depend on time.
        Left out are turns after an ambiguous path and turns that no client got. A turn of several
        paths is trained on in the first.
        """
        answered = (each for each in self._by_id.values() if each.call.is_answered)
        nodes = [each for each in answered if not each.context.is_ambiguous]
        inner = {id(node.context.parent) for node in nodes}
        num_others = len({id(node.call) for node in nodes}) - 1
        leaves = [node for node in nodes if id(node) not in inner]
        leaves.sort(key=lambda node: (node.call.num_answered_before == num_others, node.digest))
        trained: set[int] = set()
        samples = []
        for leaf in leaves:
            path = [*leaf.path][::-1]
            new = [node for node in path if id(node) not in trained]
            trained.update(map(id, new))
            samples.append(
                AgentSample(
                    leaf.result.sequence if new == path else _sequence(path, new),
                    path[0].context.new_ids,
                    leaf.turns,
                    tuple(node.result.text for node in path),
                    leaf.is_cut,
                    sum(node.result.num_tokens for node in new),
                    leaf.num_unread_tokens,
                )
            )
        return samples

    def _refuse_if_closed(self) -> None:
        if self._is_closed:
            raise ended()

    async def _ready_context(
        self, turns: Sequence[Turn], tools: Tools, previous: str | None
    ) -> _Context:
        if sum(len(turn["content"]) for turn in turns) < _LONG:
            return self._context(turns, tools, previous)
        return await asyncio.to_thread(self._context, turns, tools, previous)

    def _context(self, turns: Sequence[Turn], tools: Tools, previous: str | None) -> _Context:
        before: _Node | None = None
        if previous is not None:
            before = self._by_id.get(previous.rpartition("_")[2])
            if before is None:
                text = f"this episode has no response {previous!r}"
                raise RefusedError(text, status=404, code="not_found", param="previous")
            # Instructions are not those of the earlier response, as in OpenAI's API.
            earlier = before.turns[before.turns[0]["role"] == "system" :]
            num_system = bool(turns) and turns[0]["role"] == "system"
            turns = [*turns[:num_system], *earlier, *turns[num_system:]]
        if not turns or turns[-1]["role"] == "assistant":
            text = "messages must end with a turn that the model answers, not the assistant's"
            raise RefusedError(text, param="messages")
        digests = prefix_digests(turns, tools)
        parent, is_ambiguous = self._longest(digests, turns, before)
        key = digest(digests[-1], parent.digest if parent else "", is_ambiguous)
        if key not in self._contexts:
            if parent is not None:  # stores each turn once
                turns = [*parent.turns, *turns[len(parent.turns) :]]
                tools = parent.context.tools
            new_ids = self._rendered(turns, tools, parent)
            context = _Context(parent, tuple(turns), tools, new_ids, key, digests[-1], is_ambiguous)
            if parent is None:
                is_row = prefix_digests(turns, ())[-1] == self._row_digest
                context.seed_offset = 0 if is_row else int.from_bytes(key[:8]) * _TURNS**2
            else:
                context.seed_offset = parent.context.seed_offset
                context.is_ambiguous |= parent.context.is_ambiguous
                context.num_turns = parent.context.num_turns + 1
                context.num_opening_tokens = parent.context.num_opening_tokens
                context.num_tokens = parent.result.sequence.length + len(new_ids)
            self._refuse_over_bounds(context)
            self._contexts.setdefault(key, context)  # another thread may have rendered it, too
        return self._contexts[key]

    def _longest(
        self, digests: Sequence[bytes], turns: Sequence[Turn], before: _Node | None
    ) -> tuple[_Node | None, bool]:
        """Returns the end of the longest sampled path, and whether others have other tokens."""
        for length in range(len(turns) - 1, 0, -1):
            nodes: dict[int, list[_Node]] = {}
            for node in self._nodes.get(digests[length], ()):
                path = ((turns[len(each.context.turns)], each.choice.turn) for each in node.path)
                agreements = [agreement(*pair) for pair in path]
                if node.call.is_answered and None not in agreements:
                    nodes.setdefault(sum(filter(None, agreements)), []).append(node)
            if nodes:
                best = nodes[max(nodes)]
                if before in best:
                    return before, False
                # The agent may have got any of these turns if it got one after an ambiguous path.
                is_doubtful = any(each.context.is_ambiguous for each in chain(*nodes.values()))
                best.sort(key=lambda node: node.digest)
                return best[0], is_doubtful or len({node.tokens_digest for node in best}) > 1
        return None, False

    def _rendered(
        self, turns: Sequence[Turn], tools: Tools, parent: _Node | None
    ) -> tuple[int, ...]:
        row = f"the {turns[-1]['role']} turn that begins with {turns[-1]['content'][:80]!r}"
        with _refused("messages"):
            if parent is None:
                ids = tuple(self._renderer.opening(turns, tools=tools, row=row))
            else:
                past, last_token = parent.turns, parent.result.last_token
                options: dict[str, Any] = {"tools": tools, "last_token": last_token, "row": row}
                ids = tuple(self._renderer.continuation(past, turns[len(past) :], **options))
        # Samples of a prompt share its tuple, which requests store once.
        return self._prompt.token_ids if ids == self._prompt.token_ids else ids

    def _refuse_over_bounds(self, context: _Context) -> None:
        parent, bounds, most = context.parent, self._bounds, self._max_opening_tokens
        if context.num_turns >= bounds.max_turns:
            limit = f"{bounds.max_turns} turns"
        elif context.num_tokens - context.num_opening_tokens >= bounds.max_tokens:
            limit = f"{bounds.max_tokens} tokens after its first message"
            if parent is not None:
                parent.num_unread_tokens = len(context.new_ids)
        elif most is not None and context.num_opening_tokens > most:
            limit = f"{most} tokens before the first answer"
        else:
            return
        if parent is not None:
            parent.is_cut = True
        raise RefusedError(
            f"prompt is too long: this episode's maximum context length is {limit}; "
            f"the conversation has {context.num_turns} answers and {context.num_tokens} tokens",
            code="context_length_exceeded",
            param="messages",
        )

    def _call(self, context: _Context, options: CallOptions) -> _Call:
        """Returns the earlier call that this one repeats, or a new one."""
        calls = context.calls.setdefault(options.of_result, [])
        key = options.idempotency_key
        if key is not None:
            repeated = [call for call in calls if call.options.idempotency_key == key]
        else:
            repeated = [call for call in calls if not (call.is_answered or call.num_waiting)]
            repeated += calls if options.is_retry else []
        if repeated:
            return repeated[0]
        call = _Call(context, options, context.num_draws, self._num_answered)
        context.num_draws += options.num_choices
        calls.append(call)
        self._calls.append(call)
        return call

    async def _sample(self, call: _Call) -> ChatResult:
        draws = range(call.first_draw, call.first_draw + call.options.num_choices)
        results = await asyncio.gather(
            *(self._complete(self._request(call, draw)) for draw in draws)
        )
        columns = await asyncio.gather(*map(_columns, results))
        nodes = [self._node(call, *each) for each in zip(draws, results, columns, strict=True)]
        for node in nodes:
            turns_digest = extended(call.context.turns_digest, node.choice.turn)
            self._nodes.setdefault(turns_digest, []).append(node)
            self._by_id[node.choice.id] = node
        return ChatResult(call.context.num_tokens, tuple(node.choice for node in nodes))

    def _request(self, call: _Call, draw: int) -> CompletionRequest:
        context, options, index = call.context, call.options, self._index
        num_left = self._bounds.max_tokens + context.num_opening_tokens - context.num_tokens
        limits = num_left, self._bounds.max_new_tokens, options.max_new_tokens or num_left
        turn = context.seed_offset + draw * _TURNS + context.num_turns
        return CompletionRequest(
            context.new_ids,
            request_seed(index.seed, index.step, index.group, index.sample, turn),
            options.stop_strings,
            min(limits),
            None if context.parent is None else context.parent.result.sequence,
        )

    def _node(
        self, call: _Call, draw: int, result: CompletionResult, columns: dict[str, Any]
    ) -> _Node:
        context, parent = call.context, call.context.parent
        token_ids = columns["input_ids"]
        node_digest = digest(context.digest, draw)
        turn, stop_string = self._read(call, token_ids)
        reason = "length" if result.truncated else "tool_calls" if "tool_calls" in turn else "stop"
        choice = SampledChoice(
            node_digest.hex(),
            turn,
            reason,
            stop_string,
            token_ids,
            columns["generation_logprobs"],
        )
        new_ids = np.array(context.new_ids, np.int64)
        before = parent.tokens_digest if parent else ""
        return _Node(
            context,
            call,
            result,
            columns,
            choice,
            node_digest,
            digest(before, new_ids.tobytes(), token_ids.tobytes()),
            result.truncated,
        )

    def _read(self, call: _Call, token_ids: Any) -> tuple[Turn, str | None]:
        """Returns the turn without its stop string, and the stop string."""
        options, tools = call.options, call.context.tools
        read = self._reader.read(token_ids, tools=tools if options.reads_calls else ())
        turn = {**read.turn, "content": read.turn.get("content") or ""}
        ends = (stop for stop in options.stop_strings if turn["content"].endswith(stop))
        stop_string = next(ends, None)
        if stop_string is not None:
            turn["content"] = turn["content"].removesuffix(stop_string)
        if "tool_calls" in turn and not options.has_parallel_calls:
            turn["tool_calls"] = turn["tool_calls"][:1]
        return turn, stop_string


@contextmanager
def _refused(param: str) -> Iterator[None]:
    """Turns a user's error into a refusal of the call."""
    try:
        yield
    except NemoRLError as error:
        raise RefusedError(error.in_one_line, param=param) from error


@lru_cache(maxsize=4)
def _renderer_and_reader(tokenizer: Any) -> tuple[Renderer, TurnReader]:
    return Renderer(tokenizer), TurnReader(tokenizer)


def _has_failed(task: "asyncio.Task[ChatResult]") -> bool:
    return task.cancelled() or task.exception() is not None


async def _columns(result: CompletionResult) -> dict[str, Any]:
    """Returns the values of a completion's tokens as arrays."""
    sequence = result.sequence
    read = RemoteRows.of_each([sequence.row]).fetched
    # Ray's store may make the caller wait.
    is_local = isinstance(sequence.row.reference, InProcess)
    columns = read() if is_local else await asyncio.to_thread(read)
    start, end = sequence.length - result.num_tokens, sequence.length
    shifts = {name: name != "input_ids" for name in columns}  # the first token has no prediction
    return {
        name: values[0, start - shifts[name] : end - shifts[name]].numpy().copy()
        for name, values in columns.items()
    }


def _sequence(path: Sequence[_Node], new: Sequence[_Node]) -> RemoteTokens:
    """Returns the tokens of a path with only some turns to train on."""
    length = path[-1].result.sequence.length
    block = {
        name: np.zeros((1, length - (name != "input_ids")), values.dtype)
        for name, values in path[-1].columns.items()
    }
    for node in path:
        end = node.result.sequence.length
        start = end - node.result.num_tokens
        before = start - len(node.context.new_ids)
        block["input_ids"][0, before:start] = node.context.new_ids
        block["input_ids"][0, start:end] = node.columns["input_ids"]
        if node in new:
            for name in block.keys() - {"input_ids"}:
                block[name][0, start - 1 : end - 1] = node.columns[name]
    return RemoteTokens(RemoteRow(InProcess(block), 0), length)
