"""A model of the run as a judge."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoModelForSequenceClassification

from nemo_rl_core.config.judge import JudgeModel, LLMJudge
from nemo_rl_core.config.trainer import RolloutSettings
from nemo_rl_core.data.pretrained import load_tokenizer
from nemo_rl_core.distributed.session import ClusterSession
from nemo_rl_core.environments.factory import make_scorer
from nemo_rl_core.environments.rewards.llm_judge import ChatModel
from nemo_rl_core.errors import ConfigError, RewardError
from nemo_rl_core.models.generation import VllmGeneration
from nemo_rl_core.rollouts.scorers import EngineChat, scorer_of, start_judge
from nemo_rl_core.types import Completion, Prompt, Rollout


@pytest.fixture(autouse=True)
def _given_back(session: ClusterSession) -> Iterator[None]:
    """Frees the cores, which other tests of the process need."""
    yield
    session._release_dedicated(list(session._dedicated))


def test_replies_are_the_engines_greedy_completions_in_order(
    engine: VllmGeneration, tiny_model: Path, prompts: list[Prompt]
) -> None:
    tokenizer = load_tokenizer(tiny_model)
    chat: ChatModel = EngineChat(engine, tokenizer, max_question_tokens=10)
    questions = [prompts[0].text, "1+" * 8, prompts[1].text]
    first, too_long, second = chat.replies(questions)
    assert isinstance(too_long, ValueError)
    assert "at most 10 fit" in str(too_long)
    # By itself and in another order, each question gets the same reply.
    assert chat.replies([questions[2], questions[0]]) == [second, first]
    assert chat.replies([]) == []


class Says:
    """A model that always gives the same reply."""

    def replies(self, questions: list[str]) -> list[str]:
        return ["Mark: 8"] * len(questions)

    def close(self) -> None:
        return


@pytest.mark.thorough
def test_a_judge_has_separate_workers(
    session: ClusterSession, engine: VllmGeneration, tiny_model: Path
) -> None:
    config = LLMJudge(judge=JudgeModel(model=str(tiny_model), max_model_len=64), max_new_tokens=4)
    policy_workers = session._groups["generation"][1]
    chat = start_judge(session, config.judge, config.max_new_tokens)
    assert session._groups["generation"][1] is policy_workers
    (reply,) = chat.replies(["12+34="])
    assert len(reply) <= 4
    scorer = make_scorer(config, start_judge=lambda *_: chat)
    rollout = Rollout(
        Prompt("0", "12+34=", (1,), "46", "sums"), Completion((), (), truncated=False), "46"
    )
    # A model that knows only digits cannot give a mark: an error, not a zero.
    (outcome,) = scorer.score([rollout])
    assert isinstance(outcome, RewardError)
    assert make_scorer(config, start_judge=lambda *_: Says()).score([rollout]) == [0.8]
    session.discard("judge")


def test_a_judge_is_refused_where_no_engine_can_start(tiny_model: Path) -> None:
    config = LLMJudge(judge=JudgeModel(model=str(tiny_model)))
    with pytest.raises(ConfigError, match="cannot be started here"):
        make_scorer(config)


@pytest.mark.thorough
@pytest.mark.parametrize(("number", "ranks"), [(1, 1), (2, 1), (2, 2)])
def test_a_judge_on_dedicated_bundles_replies_like_a_colocated_one(
    number: int, ranks: int, session: ClusterSession, tiny_model: Path, prompts: list[Prompt]
) -> None:
    colocated = JudgeModel(model=str(tiny_model), max_model_len=64)
    questions = [each.text for each in prompts]
    expected = start_judge(session, colocated, 6).replies(questions)
    assert len(set(expected)) > 1
    placed = {"placement": {"own": number}, "tensor_parallel_size": ranks}
    dedicated = JudgeModel.model_validate({**colocated.model_dump(), **placed})
    (bundles,) = dedicated.dedicated_bundles("judge", "environment.judge")
    session.reserve_dedicated([bundles])
    chat = start_judge(session, dedicated, 6)
    assert chat.replies(questions) == expected
    assert chat.replies(questions[:1]) == expected[:1]  # fewer questions than engines
    group = session._groups["judge"][1]
    assert group.world_size == number
    assert group.is_on(session.dedicated_cluster(bundles))
    # A stage with a colocated judge starts that one again.
    assert start_judge(session, colocated, 6).replies(questions) == expected
    session.discard("judge")


@pytest.mark.slow
def test_a_reward_model_on_dedicated_bundles_scores_like_one_in_this_process(
    session: ClusterSession, tiny_model: Path, prompts: list[Prompt], tmp_path: Path
) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=1)
    model.config.pad_token_id = 0
    model.save_pretrained(tmp_path)
    load_tokenizer(tiny_model).save_pretrained(tmp_path)
    rollouts = [
        Rollout(each, Completion((5, 6), (-1.0, -1.0), truncated=False), "12") for each in prompts
    ]
    scores = {}
    for placement in ("colocated", {"own": 2}):
        environment = {"kind": "reward_model", "model": str(tmp_path), "placement": placement}
        settings = RolloutSettings.model_validate({"environment": environment})
        session.reserve_dedicated(settings.dedicated_bundles)
        scorer = scorer_of(session, settings, tiny_model)
        scores[str(placement)] = scorer.score(rollouts)
        scorer.close()
    here, in_actors = scores.values()
    assert len(set(here)) > 1
    assert in_actors == pytest.approx(here, rel=1e-6)
