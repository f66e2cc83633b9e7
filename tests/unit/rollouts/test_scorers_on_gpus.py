"""Scorers with a model get a share of a GPU, and only while they compute."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemo_rl_core.config.environment import EnvironmentWorkers, WeightedSum, judges_of_the_run
from nemo_rl_core.config.isolation import IsolationConfig
from nemo_rl_core.config.judge import JudgeEndpoint, JudgeModel, LLMJudge
from nemo_rl_core.config.placement import DedicatedBundles
from nemo_rl_core.config.single_turn import ExactMatch, RewardModelScore
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.environments.interfaces import Scorer
from nemo_rl_core.errors import RewardError
from nemo_rl_core.rollouts import scorers
from nemo_rl_core.rollouts.scorers import EngineChat, scorer_of, scores_on_a_gpu
from nemo_rl_core.types import Completion, Prompt, Rollout

MODEL = RewardModelScore(model="folder")
JUDGE = LLMJudge(judge=JudgeModel(model="folder"))

OWN_MODEL = RewardModelScore(model="folder", placement={"own": 2})
OWN_JUDGE = LLMJudge(judge=JudgeModel(model="folder", placement={"own": 1}))


def mixed(*environments: Any) -> WeightedSum:
    return WeightedSum(parts=[{"environment": each, "weight": 1.0} for each in environments])


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any, Any]]:
    """Location, workers and GPUs of each scorer that is made."""
    made: list[tuple[str, Any, Any]] = []
    monkeypatch.setattr(
        scorers,
        "make_remote_scorer",
        lambda environment, workers, *_, bundles, **__: made.append(("actors", workers, bundles)),
    )
    monkeypatch.setattr(scorers, "make_scorer", lambda *_, **__: made.append(("here", None, None)))
    return made


def make(environment: Any, workers: EnvironmentWorkers | None, *, use_gpus: bool) -> Any:
    session: Any = SimpleNamespace(cluster=SimpleNamespace(use_gpus=use_gpus))
    settings: Any = SimpleNamespace(
        environment=environment, environment_workers=workers, isolation=IsolationConfig()
    )
    scorer_of(session, settings, Path("policy"))
    return session.cluster


def test_a_reward_model_gets_a_share_of_a_gpu(asked: list[tuple[str, Any, Any]]) -> None:
    workers_config = EnvironmentWorkers(num_workers=2)
    for environment in (MODEL, mixed(ExactMatch(), MODEL)):
        cluster = make(environment, None, use_gpus=True)
        assert asked.pop() == ("actors", scorers._WITH_A_MODEL, cluster)
        cluster = make(environment, workers_config, use_gpus=True)
        assert asked.pop() == ("actors", workers_config, cluster)
        make(environment, None, use_gpus=False)
        assert asked.pop() == ("here", None, None)


def test_other_scorers_get_a_gpu_only_if_the_recipe_asks_for_one(
    asked: list[tuple[str, Any, Any]],
) -> None:
    plain, with_gpus = EnvironmentWorkers(), EnvironmentWorkers(use_gpus=True)
    make(ExactMatch(), None, use_gpus=True)
    assert asked.pop() == ("here", None, None)
    make(ExactMatch(), plain, use_gpus=True)
    assert asked.pop() == ("actors", plain, None)
    cluster = make(ExactMatch(), with_gpus, use_gpus=True)
    assert asked.pop() == ("actors", with_gpus, cluster)
    make(ExactMatch(), with_gpus, use_gpus=False)
    assert asked.pop() == ("actors", with_gpus, None)


def test_a_judge_of_the_run_cannot_be_started_in_actors(
    asked: list[tuple[str, Any, Any]],
) -> None:
    assert not judges_of_the_run(mixed(MODEL, ExactMatch()))
    assert judges_of_the_run(mixed(MODEL, JUDGE)) == [JUDGE.judge]
    make(mixed(MODEL, JUDGE), None, use_gpus=True)
    assert asked.pop() == ("here", None, None)


@pytest.mark.parametrize(
    ("environment", "workers", "expected"),
    [
        (MODEL, None, True),
        (mixed(ExactMatch(), JUDGE), None, True),
        (OWN_MODEL, None, False),
        (mixed(OWN_MODEL, OWN_JUDGE), None, False),
        (mixed(OWN_MODEL, JUDGE), None, True),
        (mixed(MODEL, OWN_JUDGE), None, True),
        (OWN_JUDGE, EnvironmentWorkers(use_gpus=True), True),
        (ExactMatch(), EnvironmentWorkers(use_gpus=True), True),
        (ExactMatch(), EnvironmentWorkers(), False),
        (LLMJudge(judge=JudgeEndpoint(url="http://localhost/v1", model="any")), None, False),
    ],
)
def test_engines_leave_the_gpu_to_scorers_on_it(
    environment: Any, workers: EnvironmentWorkers | None, expected: bool
) -> None:
    for use_gpus in (True, False):
        session: Any = SimpleNamespace(cluster=SimpleNamespace(use_gpus=use_gpus))
        settings: Any = SimpleNamespace(environment=environment, environment_workers=workers)
        assert scores_on_a_gpu(session, settings) is (expected and use_gpus)


ROLLOUT = Rollout(
    Prompt("0", "question", (1, 2), "answer", "task"), Completion((3,), (-1.0,), False), "text"
)


class Constant(Scorer):
    """Gives every completion the same score."""

    def __init__(self, reward: float) -> None:
        self.reward = reward

    def score(self, rollouts: Sequence[Rollout]) -> list[float | RewardError]:
        return [self.reward for _ in rollouts]


class Asked:
    """A judge that replies the same to every question."""

    def replies(self, questions: Sequence[str]) -> list[str | Exception]:
        return ["Mark: 5" for _ in questions]

    def close(self) -> None:
        pass


def test_a_reward_model_next_to_a_judge_gets_a_share_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[tuple[Any, ...]] = []

    def in_actors(
        environment: Any, workers: Any, reward_model: Any, *, policy: Any, bundles: Any
    ) -> Any:
        started.append((environment, workers, reward_model, policy, bundles))
        return Constant(3.0)

    monkeypatch.setattr(scorers, "make_remote_scorer", in_actors)
    monkeypatch.setattr(scorers, "start_judge", lambda *_: Asked())
    cluster = SimpleNamespace(use_gpus=True)
    session: Any = SimpleNamespace(cluster=cluster)
    unnamed = RewardModelScore()
    environment = WeightedSum(
        parts=[
            {"environment": JUDGE, "weight": 1.0},
            {"environment": MODEL, "weight": 10.0},
            {"environment": unnamed, "weight": 100.0},
        ]
    )
    settings: Any = SimpleNamespace(environment=environment, environment_workers=None)
    scorer = scorer_of(session, settings, Path("policy"), Path("trained before"))
    shared = (scorers._WITH_A_MODEL, Path("trained before"), Path("policy"), cluster)
    assert started == [(MODEL, *shared), (unnamed, *shared)]
    # The judge's 5 of 10, and the models' 3.
    assert scorer.score([ROLLOUT]) == [0.5 + 30 + 300]


def test_without_gpus_a_reward_model_next_to_a_judge_computes_in_this_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(scorers, "make_scorer", lambda *_, **options: made.append(options))
    make(mixed(MODEL, JUDGE), None, use_gpus=False)
    assert made[0]["start_reward_model"] is None


@pytest.mark.parametrize("use_gpus", [True, False])
def test_reward_models_on_dedicated_bundles_have_actors_there(
    use_gpus: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[Any, dict[str, Any]]] = []

    def in_actors(environment: Any, **options: Any) -> Any:
        started.append((environment, options))
        return Constant(float(len(started)))

    here = Constant(10.0)
    make_here = scorers.make_scorer
    monkeypatch.setattr(scorers, "make_remote_scorer", in_actors)
    monkeypatch.setattr(
        scorers,
        "make_scorer",
        lambda config, *args, **options: (
            here if config == MODEL else make_here(config, *args, **options)
        ),
    )
    session: Any = SimpleNamespace(
        cluster=SimpleNamespace(use_gpus=use_gpus),
        dedicated_cluster=lambda bundles: ("bundles of", bundles),
    )
    settings: Any = SimpleNamespace(
        environment=mixed(OWN_MODEL, MODEL, OWN_MODEL), environment_workers=None
    )
    scorer = scorer_of(session, settings, Path("policy"), Path("trained before"))
    common = {"reward_model": Path("trained before"), "policy": Path("policy")}
    dedicated = {
        "workers": scorers._WITH_A_MODEL.replace(num_workers=2),
        "bundles": ("bundles of", DedicatedBundles("reward-model", 2)),
        "is_dedicated": True,
    }
    shared = {"workers": scorers._WITH_A_MODEL, "bundles": session.cluster}
    expected = [(OWN_MODEL, common | dedicated), (MODEL, common | shared)]
    assert started == (expected if use_gpus else expected[:1])
    # Both parts with one model share its actors.
    assert scorer.score([ROLLOUT]) == [1 + (2 if use_gpus else 10) + 1]


def test_different_judges_have_separate_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []

    def start(session: Any, config: JudgeModel, max_new_tokens: int, name: str) -> Any:
        started.append((config.model, max_new_tokens, name))
        return Asked()

    monkeypatch.setattr(scorers, "start_judge", start)
    others = [
        LLMJudge(judge=JudgeModel(model="other")),
        LLMJudge(judge=JUDGE.judge, instruction="Say how short it is."),
    ]
    session: Any = SimpleNamespace(cluster=SimpleNamespace(use_gpus=True))
    settings: Any = SimpleNamespace(environment=mixed(JUDGE, *others), environment_workers=None)
    scorer_of(session, settings, Path("policy"))
    assert started == [
        ("folder", 512, "judge"),
        ("other", 512, "judge-2"),
        ("folder", 512, "judge"),
    ]


def test_a_judge_sleeps_after_it_has_answered() -> None:
    events = []

    def generate(batch: BatchedDataDict, greedy: bool) -> BatchedDataDict:
        events.append("generate")
        lengths = batch["input_lengths"]
        return BatchedDataDict(
            output_ids=torch.nn.functional.pad(batch["input_ids"], (0, 1)),
            unpadded_sequence_lengths=lengths + 1,
        )

    generation: Any = SimpleNamespace(
        generate=generate, finish_generation=lambda: events.append("sleep")
    )
    tokenizer = SimpleNamespace(batch_decode=lambda rows, **_: ["yes"] * len(rows))
    chat = EngineChat(generation, tokenizer, max_question_tokens=8)
    assert chat._complete([[1, 2], [3]]) == ["yes", "yes"]
    assert events == ["generate", "sleep"]
    assert chat._complete([]) == []
    assert events == ["generate", "sleep"]
