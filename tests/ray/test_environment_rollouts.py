"""Every kind of environment in a rollout with real vLLM, with hand-computed rewards.

A tiny model is trained, within seconds, on two or three replies to each prompt, so that its samples
earn rewards and vary.
"""

import json
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from pydantic import TypeAdapter

from nemo_rl_core.config.environment import EnvironmentConfig
from nemo_rl_core.config.generation import VllmGenerationConfig
from nemo_rl_core.config.judge import LLMJudge
from nemo_rl_core.config.trainer import RolloutLimits, RolloutSettings
from nemo_rl_core.data.chat import prompt_token_ids, supervised_example
from nemo_rl_core.data.tokenizer import build_arithmetic_tokenizer
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict, collate
from nemo_rl_core.distributed.session import ClusterSession
from nemo_rl_core.environments.rewards.llm_judge import question
from nemo_rl_core.models.generation.engine import Generation
from nemo_rl_core.models.generation.remote_completions import (
    RemoteCompletions,
    Requests,
    full_requests,
)
from nemo_rl_core.rollouts.batch import rollout_batch, valid_rollouts
from nemo_rl_core.rollouts.episode import Bounds
from nemo_rl_core.rollouts.multi_turn import MultiTurnRollouts
from nemo_rl_core.rollouts.sampler import Sampler
from nemo_rl_core.types import Completion, Prompt, Rollout

GROUP = 16
NUM_STEPS = 250
PENALTY = 0.25
Said = tuple[str, ...]
"""The policy's turns, or all turns of a conversation, the prompt first."""


@dataclass(frozen=True)
class Row:
    """A prompt and its training replies.

    Attributes:
        prompt: Text of the prompt.
        worth: Rewards of each possible reply's turns, or None for an error.
        answer: Answer of the row.
        metadata: Metadata of the row.
        replies: Answers of the environment, by the policy's turns so far.
    """

    prompt: str
    worth: Mapping[Said, tuple[float, ...] | None]
    answer: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    replies: Mapping[Said, str] = field(default_factory=dict)

    def taught(self) -> Iterator[tuple[Said, str]]:
        """Yields conversations and the policy's next turn."""
        for turns in self.worth:
            log = [self.prompt]
            for index, turn in enumerate(turns):
                yield tuple(log), turn
                log += [turn, self.replies.get(turns[: index + 1], "")]


SUM = Row("exact 2+3=", {("5",): (1,), ("6",): (0,)}, answer="5")
GUESS = Row(
    "0-9=",
    {("7",): (1,), ("4", "7"): (0, 1), ("77", "7"): (-PENALTY, 1), ("77", "4"): (-PENALTY, 0)},
    metadata={"game": {"secret": 7, "low": 0, "high": 9}, "max_turns": 2},
    replies={("4",): "5-9=", ("77",): "0-9="},
)
PUZZLE = Row(
    "02-13=",
    {
        ("1", "3"): (0, 1),
        ("1", "1", "1"): (0, 0, 0),
        ("9", "1", "3"): (-PENALTY, 0, 1),
    },
    metadata={"game": {"tiles": [0, 2, 1, 3], "num_columns": 2}, "max_turns": 3},
    replies={("1",): "12-03=", ("1", "1"): "02-13=", ("9",): "02-13=", ("9", "1"): "12-03="},
)
CALLS = {
    "calculator": "<tool>calculator 12*34</tool>",
    "python": "<tool>python print(2**9)</tool>",
    "retriever": "<tool>retriever capital of France</tool>",
}
TOOLS = [
    Row(
        "tool 12*34=",
        {(CALLS["calculator"], "408"): (0, 1), ("400",): (0,)},
        answer="408",
        replies={(CALLS["calculator"],): "\n<result>408</result>\n"},
    ),
    Row(
        "tool 2**9=",
        {(CALLS["python"], "512"): (0, 1), (CALLS["python"], "511"): (0, 0)},
        answer="512",
        replies={(CALLS["python"],): "\n<result>512</result>\n"},
    ),
    Row(
        "tool Paris?",
        {(CALLS["retriever"], "Paris"): (0, 1), ("Rome",): (0,)},
        answer="Paris",
        replies={(CALLS["retriever"],): "\n<result>Paris is the capital.</result>\n"},
    ),
]
GYM = Row(
    "gym 4-1=",
    {("3",): (1,), ("5",): (0,)},
    answer="3",
    metadata={"task": "chain_sum", "options": {}, "entry": {"answer": "3", "metadata": {}}},
)

pytestmark = pytest.mark.thorough
ADD = ["assert add(2, 2) == 4", "assert add(1, 2) == 3"]
ROWS: dict[str, list[Row]] = {
    "exact": [SUM],
    "math": [Row("math", {("0.75",): (1,), ("0.7",): (0,)}, answer=r"\frac{3}{4}")],
    "reasoning_gym": [GYM],
    "function": [Row("function", {("four",): (4,), ("to",): (2,), ("boom",): None})],
    "python": [Row("function", {("four",): (4,), ("to",): (2,), ("boom",): (-1,)})],
    "reward_model": [SUM],  # computed by `scores_of_the_reward_model`
    "regex": [Row("regex", {("123",): (1,), ("12a",): (0,)})],
    "json_schema": [Row("json", {('{"a": 1}',): (1,), ('{"a": "b"}',): (0,), ('{"a"',): (0,)})],
    "llm_judge": [Row("judge", {("good",): (0.8,), ("bad",): (0.3,)})],
    "multiple_choice": [
        Row("choice", {("The answer is (B).",): (1,), ("I pick C.",): (0,)}, answer="B")
    ],
    "code": [
        Row(
            "code",
            {
                ("def add(a, b):\n return a + b",): (1,),
                ("def add(a, b):\n return a * b",): (0.5,),
                ("def add(a, b) return",): (0,),
            },
            metadata={"tests": ADD, "entry_point": "add"},
        )
    ],
    "weighted_sum": [replace(SUM, worth={("5",): (1 + 0.5,), ("6",): (0.5,)})],
    "sliding_puzzle": [PUZZLE],
    "guess_number": [GUESS],
    "tools": TOOLS,
    "by_task": [SUM, GUESS],
}
MODEL_AS_JUDGE = {"kind": "llm_judge", "judge": {"kind": "model"}, "max_new_tokens": 10}
COMPONENTS = {("5",): (1.0, 1.0), ("6",): (0.0, 1.0)}


def config_of(kind: str, folder: Path) -> dict[str, Any]:
    """Returns the recipe section of a kind; `folder` has its files."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    digit = {"kind": "regex", "pattern": "[0-9]"}
    own: dict[str, dict[str, Any]] = {
        "function": {"target": "custom_rewards:length"},
        "python": {"target": "custom_rewards:Length", "arguments": {"boom": -1.0}},
        "reward_model": {"model": str(folder / "reward_model")},
        "regex": {"pattern": "[0-9]{3}"},
        "json_schema": {"json_schema": json.dumps(schema)},
        "llm_judge": {
            **MODEL_AS_JUDGE,
            "judge": {"kind": "model", "model": str(folder / "model"), "max_model_len": 640},
        },
        "weighted_sum": {
            "parts": [{"environment": {"kind": "exact"}}, {"weight": 0.5, "environment": digit}]
        },
        "sliding_puzzle": {"illegal_penalty": PENALTY},
        "guess_number": {"illegal_penalty": PENALTY},
        "tools": {
            "tools": [
                {"kind": "calculator"},
                {"kind": "python"},
                {"kind": "retriever", "path": str(folder / "passages.txt"), "num_passages": 1},
            ]
        },
        "by_task": {
            "tasks": [
                {"task": SUM.prompt, "environment": {"kind": "exact"}},
                {
                    "task": GUESS.prompt,
                    "environment": {"kind": "guess_number", "illegal_penalty": PENALTY},
                },
            ]
        },
    }
    return {"kind": kind, **own.get(kind, {})}


def known_kinds() -> set[str]:
    union, _ = get_args(EnvironmentConfig)
    return {get_args(each.model_fields["kind"].annotation)[0] for each in get_args(union)}


def test_every_kind_of_environment_is_rolled_out_here() -> None:
    assert set(ROWS) == known_kinds()


def as_prompt(row: Row, tokenizer: Any) -> Prompt:
    ids = tuple(prompt_token_ids(tokenizer, row.prompt))
    metadata = json.dumps(dict(row.metadata))
    return Prompt(row.prompt, row.prompt, ids, row.answer, row.prompt, metadata)


def lessons(tokenizer: Any) -> Iterator[tuple[str, str]]:
    """Yields prompts with completions: all replies of all rows, and the marks of the judge."""
    for row in {row.prompt: row for rows in ROWS.values() for row in rows}.values():
        for log, reply in row.taught():
            roles = ("user", "assistant") * len(log)
            turns = [{"role": r, "content": c} for r, c in zip(roles, log, strict=False)]
            yield (json.dumps(turns) if len(log) > 1 else log[0]), reply
    (row,) = ROWS["llm_judge"]
    judge = LLMJudge.model_validate({**MODEL_AS_JUDGE, "judge": {"kind": "model", "model": "?"}})
    for (text,), worth in row.worth.items():
        rollout = Rollout(as_prompt(row, tokenizer), Completion((), (), truncated=False), text)
        assert worth is not None
        yield question(judge, rollout), f"Mark: {10 * worth[0]:.0f}"


def byte_tokenizer() -> Any:
    """Returns a tokenizer with one token per byte, in the form that a Qwen2 folder needs."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    special["unk_token"] = "<|endoftext|>"  # transformers would add it
    tokens = [*special.values(), *sorted(pre_tokenizers.ByteLevel.alphabet())]
    core = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    template = build_arithmetic_tokenizer().chat_template
    return PreTrainedTokenizerFast(tokenizer_object=core, chat_template=template, **special)


def teach(model: Any, tokenizer: Any) -> float:
    """Trains until the model has learned every lesson; returns the last loss."""
    examples = [supervised_example(tokenizer, *lesson) for lesson in lessons(tokenizer)]
    examples.sort(key=lambda each: len(each.token_ids))
    # The judge's questions are ten times as long as the others: a separate batch.
    batches = [
        collate([e.token_ids for e in part], [e.loss_mask for e in part])
        for part in (examples[:-2], examples[-2:])
    ]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.004, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.004, total_steps=NUM_STEPS)
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = sum(nll(model, batch) for batch in batches)
        loss.backward()
        optimizer.step()
        schedule.step()
    return float(loss)


def nll(model: Any, batch: BatchedDataDict) -> torch.Tensor:
    ids, mask = batch["input_ids"], batch["token_mask"].bool()
    logits = model(input_ids=ids).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits[mask], ids[:, 1:][mask])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has learned its lessons, a reward model, and files of environments."""
    from transformers import (
        AutoModelForSequenceClassification,
        Qwen2Config,
        Qwen2ForCausalLM,
    )

    folder = tmp_path_factory.mktemp("taught")
    tokenizer = byte_tokenizer()
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 1024}
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **sizes,
        **heads,
    )
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config)
    teach(model, tokenizer)
    config.num_labels = 1
    scorer = AutoModelForSequenceClassification.from_config(config)
    torch.nn.init.normal_(scorer.score.weight)
    for name, each in (("model", model), ("reward_model", scorer)):
        each.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    (folder / "passages.txt").write_text("Bread is made of flour.\nParis is the capital.\n")
    shutil.copy(Path(__file__).with_name("custom_rewards.py"), folder)
    return folder


Sent = dict[tuple[int, ...], list[Any]]
"""By the tokens of requests: tokens and log-probabilities of the answers."""


class WatchedGeneration(Generation):
    """The engine, with a record of its requests and answers."""

    sent: Sent

    def complete(self, requests: Requests, **options: Any) -> RemoteCompletions:
        completions = super().complete(requests, **options)
        (asked, _), columns = full_requests(requests.batch()), completions.tokens.fetched()
        for row, end in enumerate(completions.input_lengths.tolist()):
            start = int(asked["input_lengths"][row])
            ids = columns["input_ids"][row].tolist()
            logprobs = columns["generation_logprobs"][row, start - 1 : end - 1].tolist()
            self.sent[tuple(ids[:start])].append((tuple(ids[start:end]), tuple(logprobs)))
        return completions


class WatchedSampler(Sampler):
    _engine_class = WatchedGeneration
    generation: WatchedGeneration


@dataclass(frozen=True)
class Played:
    """Results of a kind of environment."""

    kind: str
    rollouts: Sequence[Rollout]
    sent: Sent
    tokenizer: Any


@contextmanager
def sampling(kind: str, session: ClusterSession, folder: Path) -> Iterator[WatchedSampler]:
    """Yields the sampler of one kind; all kinds share the engine."""
    environment = TypeAdapter(EnvironmentConfig).validate_python(config_of(kind, folder))
    settings = RolloutSettings(
        environment=environment,
        generation=VllmGenerationConfig(temperature=0.7, max_new_tokens=48, max_num_seqs=64),
        rollouts=RolloutLimits(max_turns=3, max_rollout_tokens=160, max_failed_fraction=0.9),
        max_prompt_tokens=32,
        dtype="float32",
        seed=5,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        with WatchedSampler(session, settings, folder / "model") as sampler:
            sampler.generation.sent = defaultdict(list)
            yield sampler


@pytest.fixture(scope="module", params=sorted(ROWS))
def played(
    request: pytest.FixtureRequest, session: ClusterSession, folder: Path
) -> Iterator[Played]:
    """Returns a step's rollouts of one kind."""
    with sampling(request.param, session, folder) as sampler:
        prompts = [as_prompt(row, sampler.tokenizer) for row in ROWS[request.param]]
        made = sampler.engine.run(prompts, num_generations_per_prompt=GROUP, step=1)
        sent = sampler.generation.sent
        yield Played(request.param, sampler.score(made), sent, sampler.tokenizer)
    session.discard("judge")


def policy_turns(rollout: Rollout) -> Said:
    """Returns the policy's turns as text; several if an environment answers."""
    turns = [each["content"] for each in rollout.messages if each["role"] == "assistant"]
    return tuple(turns) or (rollout.text,)


def runs(rollout: Rollout) -> Iterator[tuple[bool, int, int]]:
    """Yields runs of tokens by one writer: whether it is the policy, start and end."""
    start = 0
    for is_own, tokens in groupby(rollout.completion.token_mask):
        end = start + len(list(tokens))
        yield is_own, start, end
        start = end


def scores_of_the_reward_model(folder: Path, rollouts: list[Rollout]) -> list[float]:
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        hidden = [
            model.model(torch.tensor([[*r.prompt.token_ids, *r.completion.token_ids]]))
            for r in rollouts
        ]
        return [float(model.score(each.last_hidden_state[0, -1])) for each in hidden]


def test_rewards_equal_hand_computed_ones(played: Played, folder: Path) -> None:
    rows = {row.prompt: row for row in ROWS[played.kind]}
    assert len(played.rollouts) == GROUP * len(rows)
    taught = [r for r in played.rollouts if policy_turns(r) in rows[r.prompt.text].worth]
    assert len(taught) > 0.8 * len(played.rollouts), [r.text for r in played.rollouts]
    worth = [rows[each.prompt.text].worth[policy_turns(each)] for each in taught]
    if played.kind == "reward_model":
        worth = [(each,) for each in scores_of_the_reward_model(folder / "reward_model", taught)]
    for rollout, turn_rewards in zip(taught, worth, strict=True):
        if turn_rewards is None:
            assert rollout.reward is None
            assert rollout.error is not None and "no answer sheet" in rollout.error
            continue
        assert rollout.error is None
        assert rollout.reward == pytest.approx(sum(turn_rewards), abs=1e-5)
        if rollout.messages:
            assert rollout.turn_rewards == pytest.approx(turn_rewards)
        if played.kind == "weighted_sum":
            assert rollout.components == COMPONENTS[policy_turns(rollout)]
    # The model gives different replies, and they earn different rewards.
    for row in rows.values():
        rewards = {r.reward for r in played.rollouts if r.prompt.text == row.prompt}
        assert len(rewards) > 1
        assert max(each for each in rewards if each is not None) > 0 or played.kind == (
            "reward_model"
        )


def test_rollouts_without_a_score_are_counted_and_dropped(played: Played) -> None:
    (boom,) = [said for said, worth in ROWS["function"][0].worth.items() if worth is None]
    failed = [each for each in played.rollouts if each.error is not None]
    is_expected = played.kind == "function"
    assert len(failed) == is_expected * sum(each.text in boom for each in played.rollouts)
    assert bool(failed) == is_expected
    assert valid_rollouts(played.rollouts) == [
        each for each in played.rollouts if each.error is None
    ]


def test_tokens_are_those_that_the_engine_sent(played: Played) -> None:
    num_taken = 0
    for rollout in played.rollouts:
        made, asked = rollout.completion, rollout.prompt.token_ids
        texts = [each["content"] for each in rollout.messages if each["role"] == "environment"]
        for is_own, start, end in runs(rollout):
            piece = (made.token_ids[start:end], made.logprobs[start:end])
            if is_own:
                # Requested with the exact preceding tokens, and answered with these.
                played.sent[asked + made.token_ids[:start]].remove(piece)
                num_taken += 1
            else:
                assert set(piece[1]) == {0}
                text = played.tokenizer.decode(piece[0]).removeprefix("<eos>")
                assert text == texts.pop(0)
        assert rollout.text == "\n".join(policy_turns(rollout))
        if not made.truncated:
            # A malformed tool call that ends like one is an answer.
            is_stopped = played.kind in {"tools", "by_task"} and rollout.text.endswith("</tool>")
            assert is_stopped or made.token_ids[-1] == played.tokenizer.eos_token_id
    assert not any(played.sent.values())
    assert num_taken == sum(len(policy_turns(each)) for each in played.rollouts)


def test_only_the_policys_tokens_are_trained_on(played: Played) -> None:
    rollouts = valid_rollouts(played.rollouts)
    batch = rollout_batch(rollouts).fetched()
    for row, rollout in enumerate(rollouts):
        tokens = rollout.prompt.token_ids + rollout.completion.token_ids
        trained = [index + 1 for index in batch["token_mask"][row].nonzero().flatten().tolist()]
        first = len(rollout.prompt.token_ids)
        expected = [
            first + index
            for is_own, start, end in runs(rollout)
            for index in range(start, end)
            if is_own
        ]
        assert trained == expected
        text = played.tokenizer.decode(
            [tokens[index] for index in expected], skip_special_tokens=True
        )
        assert text == "".join(policy_turns(rollout))
    if played.kind in {"sliding_puzzle", "guess_number", "tools", "by_task"}:
        several = [each for each in rollouts if len(policy_turns(each)) > 1]
        assert several
        assert all(False in each.completion.token_mask for each in several)


def test_a_game_continues_after_a_truncated_turn(session: ClusterSession, folder: Path) -> None:
    bounds = Bounds(max_turns=3, max_tokens=160, max_new_tokens=1)
    with sampling("guess_number", session, folder) as sampler:
        engine, tokenizer = sampler.generation, sampler.tokenizer
        cut = MultiTurnRollouts(engine, tokenizer, sampler.environment, seed=5, bounds=bounds)
        rollouts = cut.run([as_prompt(GUESS, tokenizer)], num_generations_per_prompt=GROUP, step=1)
    # 77 is truncated to 7, which wins; 4 is truncated before its stop token and answered as usual.
    by_turns = {policy_turns(each): each for each in rollouts}
    assert {("7",), ("4", "7")} <= by_turns.keys()
    assert by_turns["7",].turn_rewards == (1,)
    rollout = by_turns["4", "7"]
    assert rollout.turn_rewards == (0, 1)
    assert tokenizer.decode(rollout.completion.token_ids) == "4<eos>5-9=7"
    assert rollout.completion.token_mask == (True, *(False,) * 5, True)
