"""A session continues sampled tokens, makes branches, repeats calls and leaves out doubt."""

import asyncio
import copy
import threading

import pytest

from nemo_rl_core.agents.calls import CallOptions, RefusedError
from nemo_rl_core.rollouts.engine import request_seed
from nemo_rl_core.rollouts.episode import Bounds
from tests.unit.agents.conftest import ADD, CALL, RecordedEngine, session_of

HI = {"role": "user", "content": "Hi"}
NEXT = {"role": "user", "content": "And then?"}
RETRY = CallOptions(is_retry=True)


def mask_and_ids(sample):
    block = sample.sequence.row.reference.block
    number, length = sample.sequence.row.number, sample.sequence.length
    return (
        [False, *block["token_mask"][number].tolist()][:length],
        block["input_ids"][number].tolist()[:length],
    )


def trained(sample):
    """The ids that a sample trains on, by turn."""
    turns, before = [], False
    for is_trained, token in zip(*mask_and_ids(sample), strict=True):
        if is_trained and not before:
            turns.append([])
        if is_trained:
            turns[-1].append(token)
        before = is_trained
    return [tuple(turn) for turn in turns]


async def say(session, *turns, **options):
    result = await session.chat([*turns], options=CallOptions(**options))
    return result.choices[0].turn


def test_a_linear_agent_draws_what_a_multi_turn_environment_draws(engine):
    session = session_of(engine, number=4)

    async def agent():
        first = await say(session, HI)
        second = await say(session, HI, first, NEXT)
        await say(session, HI, first, NEXT, second, NEXT)

    asyncio.run(agent())
    seeds = [request_seed(7, 3, 2, 4, turn) for turn in range(3)]
    assert [each.seed for each in engine.requests] == seeds
    (sample,) = session.samples()
    # Each prompt of the engine begins with all tokens of the call before.
    (prompt, new), (second_prompt, second), (third_prompt, third) = engine.completions
    assert second_prompt[: len(prompt) + len(new)] == prompt + new
    assert third_prompt[: len(second_prompt) + len(second)] == second_prompt + second
    assert trained(sample) == [new, second, third]
    assert mask_and_ids(sample)[1] == [*third_prompt, *third]
    assert sample.opening_ids == prompt
    assert sample.num_written == len(new) + len(second) + len(third)
    # The suffix is what the chat template writes after a turn.
    suffix = engine.tokenizer.decode(second_prompt[len(prompt) + len(new) :])
    assert suffix == "\n<|im_start|>user\nAnd then?<|im_end|>\n<|im_start|>assistant\n"


def test_a_branch_trains_on_a_shared_turn_once(engine):
    session = session_of(engine)

    async def agent():
        first = await say(session, HI)
        await say(session, HI, first, NEXT)
        await say(session, HI, first, {"role": "user", "content": "Or else?"})
        await say(session, {"role": "user", "content": "A summary."})

    asyncio.run(agent())
    samples = session.samples()
    assert sorted(len(sample.texts) for sample in samples) == [1, 2, 2]
    new = sorted(tokens for _, tokens in engine.completions)
    assert sorted(turn for sample in samples for turn in trained(sample)) == new
    pair = [sample for sample in samples if len(sample.texts) == 2]
    counts = [sample.num_written for sample in pair]
    first, branches = engine.completions[0][1], [each for _, each in engine.completions[1:3]]
    assert sum(counts) == len(first) + sum(map(len, branches))
    # Logprobs and weight versions of the branch are the engine's.
    masked = next(sample for sample in pair if len(trained(sample)) == 1)
    block = masked.sequence.row.reference.block
    ids = block["input_ids"][0].tolist()
    number = next(n for n, (p, t) in enumerate(engine.completions) if [*p, *t] == ids)
    size = len(engine.completions[number][1])
    assert block["weight_versions"][0].tolist()[-size:] == [number + 1] * size
    assert (block["generation_logprobs"][0][-size:] < 0).all()
    assert (block["generation_logprobs"][0][:-size] == 0).all()


def test_equal_histories_of_a_client_continue_the_same_tokens(chat_tokenizer):
    engine = RecordedEngine(chat_tokenizer, lambda request: CALL)
    session = session_of(engine)
    system = {"role": "system", "content": "Be brief."}

    async def agent():
        result = await session.chat([system, HI], tools=[ADD])
        turn = result.choices[0].turn
        assert turn["content"] == "Wait."
        (call,) = turn["tool_calls"]
        assert call["function"] == {"name": "add", "arguments": {"a": 1.0, "b": "x"}}
        changed = copy.deepcopy(turn)
        changed["content"] = "\n Wait.  "
        changed["tool_calls"][0]["id"] = "invented"
        changed["tool_calls"][0]["function"]["arguments"] = {"b": "x", "a": 1}
        answer = {"role": "tool", "content": "2", "tool_call_id": "invented"}
        developer = {"role": "developer", "content": "Be brief.\n"}
        await session.chat([developer, HI, changed, answer], tools=[copy.deepcopy(ADD)])

    asyncio.run(agent())
    (prompt, new), (second, _) = engine.completions
    assert second[: len(prompt) + len(new)] == prompt + new
    assert len(session.samples()) == 1


def test_other_tools_start_at_the_root(engine):
    session = session_of(engine)

    async def agent():
        first = await say(session, HI)
        await session.chat([HI, first, NEXT], tools=[ADD])

    asyncio.run(agent())
    assert [each.before is None for each in engine.requests] == [True, True]
    assert len(session.samples()) == 2


def test_an_ambiguous_path_is_answered_but_not_trained_on(chat_tokenizer):
    engine = RecordedEngine(chat_tokenizer, lambda request: "Equal text with other tokens.")
    session = session_of(engine)

    async def agent():
        first = await say(session, HI)
        await say(session, HI)
        assert engine.completions[0][1] != engine.completions[1][1]
        second = await say(session, HI, first, NEXT)
        await say(session, HI, first, NEXT, second, NEXT)

    asyncio.run(agent())
    assert session.num_ambiguous == 2
    samples = session.samples()
    first_turns = sorted(new for _, new in engine.completions[:2])
    assert sorted(turn for sample in samples for turn in trained(sample)) == first_turns


def test_an_id_of_only_one_turn_does_not_resolve_doubt_about_another(chat_tokenizer):
    engine = RecordedEngine(chat_tokenizer, lambda request: CALL)
    session = session_of(engine)
    answer = {"role": "tool", "content": "2"}

    def without_id(turn):
        return {**turn, "tool_calls": [{**turn["tool_calls"][0], "id": "invented"}]}

    async def agent():
        first, other = [(await session.chat([HI], tools=[ADD])).choices[0].turn for _ in range(2)]
        assert first["tool_calls"][0]["id"] != other["tool_calls"][0]["id"]
        # One second turn for each of them, and one that is in doubt.
        for turn in (first, other, without_id(first)):
            second = (await session.chat([HI, turn, answer], tools=[ADD])).choices[0].turn
        assert session.num_ambiguous == 1
        # The agent has the second turn that is in doubt after the first turn of another.
        history = [HI, other, answer, without_id(second), answer]
        await session.chat(history, tools=[ADD])
        assert session.num_ambiguous == 2

    asyncio.run(agent())
    assert sum(len(trained(sample)) for sample in session.samples()) == 4


def test_an_id_of_the_conversation_resolves_equal_texts(chat_tokenizer):
    engine = RecordedEngine(chat_tokenizer, lambda request: "Equal text with other tokens.")
    session = session_of(engine)

    async def agent():
        results = [await session.chat([HI]) for _ in range(2)]
        for result in results:
            await session.chat([NEXT], options=CallOptions(previous=result.choices[0].id))

    asyncio.run(agent())
    assert session.num_ambiguous == 0
    for start, end in ((0, 2), (1, 3)):
        prompt, new = engine.completions[start]
        assert engine.completions[end][0][: len(prompt) + len(new)] == prompt + new


def test_a_repeated_call_is_answered_from_the_record(engine):
    session = session_of(engine)

    async def agent():
        first = await say(session, HI)
        assert await say(session, HI, is_retry=True) == first
        named = await say(session, HI, idempotency_key="a")
        assert await say(session, HI, idempotency_key="a") == named
        assert len(engine.requests) == 2
        other = await say(session, HI)
        several = await session.chat([HI], options=CallOptions(num_choices=2))
        return [first, named, other, *(each.turn for each in several.choices)]

    turns = asyncio.run(agent())
    assert len(engine.requests) == 5
    assert len({each.seed for each in engine.requests}) == 5
    assert engine.requests[0].seed == request_seed(7, 3, 2, 0)
    assert len({turn["content"] for turn in turns}) > 1
    assert len(session.samples()) == 5


def test_a_call_whose_client_left_is_taken_over_and_else_left_out(engine):
    session = session_of(engine)

    async def agent():
        engine.delay.clear()
        calls = [asyncio.create_task(say(session, turn)) for turn in (HI, NEXT)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        again = asyncio.create_task(say(session, HI))  # no header names it as a retry
        await asyncio.sleep(0)
        engine.delay.set()
        await again
        await asyncio.sleep(0.01)

    asyncio.run(agent())
    assert len(engine.requests) == 2
    assert session.num_unanswered == 1
    (sample,) = session.samples()
    assert sample.turns[0] == HI


def test_a_failed_call_is_sampled_again_with_the_same_seed(chat_tokenizer):
    failures = [RuntimeError("lost")]

    def text(request):
        if failures:
            raise failures.pop()
        return "Yes."

    engine = RecordedEngine(chat_tokenizer, text)
    session = session_of(engine)

    async def agent():
        with pytest.raises(RuntimeError, match="lost"):
            await say(session, HI)
        await say(session, HI)

    asyncio.run(agent())
    assert engine.requests[0].seed == engine.requests[1].seed
    assert len(session.samples()) == 1


def test_samples_do_not_depend_on_the_order_of_concurrent_calls(chat_tokenizer):
    questions = [{"role": "user", "content": f"Part {number}"} for number in range(5)]

    def samples(order):
        engine = RecordedEngine(chat_tokenizer, lambda request: f"{request.seed}")
        session = session_of(engine)

        async def agent():
            await asyncio.gather(*(say(session, questions[each]) for each in order))

        asyncio.run(agent())
        return [(each.turns, trained(each)) for each in session.samples()]

    assert samples([0, 1, 2, 3, 4]) == samples([3, 1, 4, 0, 2])


def test_the_sample_of_the_last_call_is_last(engine):
    """Also after concurrent calls of sub-agents, and before one that is in doubt."""
    session = session_of(engine)
    parts = [{"role": "user", "content": f"Part {number}"} for number in range(5)]

    async def agent():
        first = await say(session, HI)
        await asyncio.gather(*(say(session, each) for each in parts))
        for number in range(4):
            await say(session, {"role": "user", "content": f"Summary {number}"})
            last = session.samples()[-1]
            assert last.turns[0]["content"] == f"Summary {number}"
        await say(session, HI, first, NEXT)
        assert session.samples()[-1].turns[-2] == NEXT

    asyncio.run(agent())


def test_sub_agents_draw_with_other_seeds(engine):
    session = session_of(engine)
    parts = [{"role": "user", "content": f"Part {number}"} for number in range(2)]

    async def agent():
        for opening in (HI, *parts):
            first = await say(session, opening)
            await say(session, opening, first, NEXT)

    asyncio.run(agent())
    seeds = [each.seed for each in engine.requests]
    assert seeds[:2] == [request_seed(7, 3, 2, 0, turn) for turn in range(2)]
    assert len(set(seeds)) == 6


def test_a_long_conversation_does_not_block_other_calls(engine, monkeypatch):
    session, other = session_of(engine), session_of(engine, 1)
    render, is_free = session._rendered, threading.Event()

    def rendered(*args):
        assert is_free.wait(10)
        return render(*args)

    monkeypatch.setattr(session, "_rendered", rendered)

    async def agent():
        long = {"role": "user", "content": "a" * 200_000}
        calls = [asyncio.create_task(say(session, long, max_new_tokens=5)) for _ in range(2)]
        await asyncio.sleep(0.01)
        await say(other, HI)
        is_free.set()
        await asyncio.gather(*calls)

    asyncio.run(agent())
    assert len({each.seed for each in engine.requests[1:]}) == 2  # one context


def test_bounds_cut_the_path(engine):
    session = session_of(engine, bounds=Bounds(max_turns=2, max_tokens=1000, max_new_tokens=1000))

    async def agent():
        first = await say(session, HI)
        second = await say(session, HI, first, NEXT)
        with pytest.raises(RefusedError, match="maximum context length is 2 turns") as error:
            await say(session, HI, first, NEXT, second, NEXT)
        assert error.value.code == "context_length_exceeded"

    asyncio.run(agent())
    (sample,) = session.samples()
    assert (sample.truncated, sample.num_unread_tokens, len(sample.texts)) == (True, 0, 2)


def test_tokens_without_room_are_counted(engine):
    session = session_of(
        engine, bounds=Bounds(max_turns=9, max_tokens=60, max_new_tokens=50), max_opening_tokens=99
    )

    async def agent():
        first = await say(session, HI)
        with pytest.raises(RefusedError, match="60 tokens after its first message"):
            await say(session, HI, first, {"role": "user", "content": "Why? " * 20})
        with pytest.raises(RefusedError, match="99 tokens before the first answer"):
            await say(session, {"role": "user", "content": "Why? " * 90})
        await say(session, HI, first, {"role": "user", "content": "?"})

    asyncio.run(agent())
    (sample,) = session.samples()
    (prompt, _), (second, _) = engine.completions
    # The first call may use all 50 tokens of a turn, the second what is left of 60.
    limits = [each.max_new_tokens for each in engine.requests]
    assert limits == [50, 60 - (len(second) - len(prompt))]
    assert sample.num_unread_tokens == 0  # the path continued


def test_a_stop_string_ends_a_turn_as_in_openai(chat_tokenizer):
    engine = RecordedEngine(chat_tokenizer, lambda request: "One.END")
    engine._split = lambda text, draw: engine.tokenizer.encode(text)
    session = session_of(engine)
    options = CallOptions(stop_strings=("END",), max_new_tokens=90)
    choice = asyncio.run(session.chat([HI], options=options)).choices[0]
    assert (choice.turn["content"], choice.stop_string) == ("One.", "END")
    assert choice.finish_reason == "stop"
    assert engine.requests[0].stop_strings == ("END",)
    assert engine.requests[0].max_new_tokens == 90


@pytest.mark.parametrize(
    ("sampling", "is_refused"),
    [
        ({"temperature": 0.7}, False),
        ({"temperature": None, "top_p": 1}, False),
        ({"temperature": 0}, True),
        ({"top_p": 0.9}, True),
        ({"top_k": -1, "logit_bias": {}}, False),
        ({"logit_bias": {"1": 5}}, True),
        ({"presence_penalty": 0.5}, True),
    ],
)
def test_only_the_sampling_of_the_run_is_accepted(engine, sampling, is_refused):
    session = session_of(engine, sampling={"temperature": 0.7})
    call = session.chat([HI], options=CallOptions(sampling=sampling))
    if is_refused:
        (name,) = sampling
        with pytest.raises(RefusedError, match=f"{name} is .* this run samples and trains at"):
            asyncio.run(call)
        assert not engine.requests
    else:
        asyncio.run(call)


def test_a_closed_session_refuses_calls(engine):
    session = session_of(engine)

    async def agent():
        engine.delay.clear()
        call = asyncio.create_task(say(session, HI))
        await asyncio.sleep(0.01)
        session.close()
        with pytest.raises(RefusedError, match="the episode has ended") as error:
            await call
        assert error.value.status == 410
        with pytest.raises(RefusedError, match="the episode has ended"):
            await say(session, HI)

    asyncio.run(agent())
    assert session.samples() == []


def test_a_conversation_that_the_model_does_not_answer_is_refused(engine):
    session = session_of(engine)
    with pytest.raises(RefusedError, match="must end with a turn that the model answers"):
        asyncio.run(session.chat([HI, {"role": "assistant", "content": "A prefix"}]))
