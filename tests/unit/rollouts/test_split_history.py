"""Episodes whose chat template rewrites past turns: as sampled, or as several training samples."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from nemo_rl_core.config.trainer import RolloutLimits
from nemo_rl_core.data.renderer import Renderer
from nemo_rl_core.environments.interfaces import EnvironmentReturn
from nemo_rl_core.rollouts.episode import Bounds
from nemo_rl_core.rollouts.multi_turn import MultiTurnRollouts
from nemo_rl_core.rollouts.remote_rollouts import RemoteRollouts
from nemo_rl_core.types import Prompt
from tests.unit.rollouts.conftest import Scripted

TEMPLATE = (
    "{% for turn in messages %}{{ turn.content }}"
    "{% if turn.role == 'assistant' %}{{ eos_token }}{% else %}={% endif %}{% endfor %}"
    "{% if add_generation_prompt %}-{% endif %}"
)
"""A new turn of the assistant begins with a minus, which past ones do not have."""


@pytest.fixture
def rewriting(tokenizer: Any) -> Any:
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


class Counting:
    """Answers with the number of the turn, and ends after the answer; turn k earns k."""

    def step(self, message_log_batch: Sequence[Any], metadata: Sequence[Any]) -> EnvironmentReturn:
        turns = [(len(log) + 1) // 2 for log in message_log_batch]
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": str(turn)} for turn in turns],
            metadata=list(metadata),
            next_stop_strings=[None] * len(turns),
            rewards=torch.tensor([float(turn) for turn in turns]),
            terminateds=torch.tensor(
                [turn == int(each["answer"]) for turn, each in zip(turns, metadata, strict=True)]
            ),
            errors=["a nine" if log[-1]["content"] == "9" else None for log in message_log_batch],
        )


def play(
    tokenizer: Any,
    *,
    num_turns: int = 3,
    max_tokens: int = 40,
    answer: str = "67",
    split: bool = True,
) -> tuple[RemoteRollouts, list[Any]]:
    ids = tuple(Renderer(tokenizer).opening([{"role": "user", "content": "8"}], row="a"))
    engine = Scripted(tokenizer, lambda request: answer)
    rollouts = MultiTurnRollouts(
        engine,
        tokenizer,
        Counting(),
        seed=3,
        bounds=Bounds(9, max_tokens, 6, splits_history=split),
    )
    prompt = Prompt("a", "8", ids, str(num_turns), "t")
    played = rollouts.run([prompt], num_generations_per_prompt=1, step=1)
    return played, [request for call in engine.asked for request in call]


def text(tokenizer: Any, ids: Sequence[int]) -> str:
    return tokenizer.decode(ids)


def test_each_turn_reads_the_templates_conversation(rewriting: Any) -> None:
    samples, requests = play(rewriting)
    openings = ["8=-", "8=67<eos>1=-", "8=67<eos>1=67<eos>2=-"]
    assert [request["text"] for request in requests] == openings
    assert [text(rewriting, each.prompt.token_ids) for each in samples] == openings
    assert [text(rewriting, each.completion.token_ids) for each in samples] == ["67<eos>"] * 3
    assert [each.completion.generated for each in samples] == [()] * 3
    assert [(each.group, each.sample, each.part) for each in samples] == [
        *((0, 0, 0), (0, 0, 1), (0, 0, 2))
    ]
    assert [each.turn_rewards for each in samples] == [(1.0,), (2.0,), (3.0,)]
    assert [each.reward for each in samples] == [6.0] * 3
    assert [each.text for each in samples] == ["67"] * 3
    assert len({request["seed"] for request in requests}) == 3


def test_the_past_stays_as_sampled_by_default(rewriting: Any) -> None:
    (rollout,), requests = play(rewriting, split=False)
    assert requests[1]["text"] == "8=-67<eos>1=-"  # with the minus, unlike the template
    assert rollout.turn_rewards == (1.0, 2.0, 3.0)
    assert rollout.part == 0


def test_a_template_that_only_appends_gives_one_sample(tokenizer: Any) -> None:
    appending = copy.deepcopy(tokenizer)
    appending.chat_template = TEMPLATE.replace("%}-{%", "%}{%")
    split, _ = play(appending)
    assert len(split) == 1
    assert list(split) == list(play(appending, split=False)[0])


def test_the_limit_counts_the_tokens_that_a_turn_reads(rewriting: Any) -> None:
    # 8=- has 3 tokens; the second turn reads 8 and the third 13, and the limit leaves none for it
    samples, requests = play(rewriting, max_tokens=10)
    assert [request["limit"] for request in requests] == [6, 5]
    assert [each.completion.truncated for each in samples] == [False, True]
    assert samples[1].completion.num_unread_tokens == 13 - (8 + 3)
    assert [each.reward for each in samples] == [3.0, 3.0]


def test_a_failure_is_that_of_all_samples(rewriting: Any) -> None:
    answers = iter(["67", "9"])
    ids = tuple(Renderer(rewriting).opening([{"role": "user", "content": "8"}], row="a"))
    rollouts = MultiTurnRollouts(
        Scripted(rewriting, lambda request: next(answers)),
        rewriting,
        Counting(),
        seed=3,
        bounds=Bounds(9, 40, 6, splits_history=True),
    )
    prompt = Prompt("a", "8", ids, "3", "t")
    samples = rollouts.run([prompt], num_generations_per_prompt=1, step=1)
    assert [each.reward for each in samples] == [None, None]
    assert all("a nine" in str(each.error) for each in samples)
    assert len(samples.episodes()) == 1


def test_the_setting_is_in_the_key_only_if_it_is_chosen() -> None:
    assert "history" not in RolloutLimits().model_dump()
    assert RolloutLimits(history="split").model_dump()["history"] == "split"
