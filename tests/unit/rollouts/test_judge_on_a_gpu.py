"""A judge and the policy's engine take turns on one GPU.

Sampler, judge, engines and vLLM backend are real. `vllm.LLM` is a fake that uses memory of a GPU of
80 GiB, of which a trainer uses 24: two engines of 40 GiB never fit at the same time.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl_core.config.evaluation import EvaluationConfig
from nemo_rl_core.config.judge import JudgeModel, LLMJudge
from nemo_rl_core.config.model import TextModelFromConfig
from nemo_rl_core.config.placement import DedicatedBundles
from nemo_rl_core.config.trainer import RolloutSettings
from nemo_rl_core.converters.materialize import materialize
from nemo_rl_core.data.loader import save_frame
from nemo_rl_core.data.module import DataModule
from nemo_rl_core.data.pretrained import load_tokenizer
from nemo_rl_core.errors import DataError
from nemo_rl_core.evals.evaluate import evaluate
from nemo_rl_core.models.generation import engine
from nemo_rl_core.rollouts.pairs import sample_pairs
from nemo_rl_core.rollouts.sampler import Sampler
from nemo_rl_core.trainers.fit.custom import CustomParts
from nemo_rl_core.trainers.rollouts import RolloutTrainer
from nemo_rl_core.types import Prompt
from tests.fake_llm import Gpu, LLMOnGpu
from tests.local_workers import LocalCluster, LocalSession

START = [
    "judge starts",
    "judge sleeps 1",
    "model starts",
]


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("judges") / "judge"
    config = TextModelFromConfig(
        hidden_size=32, intermediate_size=64, num_layers=1, num_heads=2, num_kv_heads=2,
        max_position_embeddings=1024,
    )  # fmt: skip
    materialize(config, folder, seed=0)
    return folder


@pytest.fixture
def session(judge: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    import vllm

    reply_ids = load_tokenizer(judge).encode("Mark: 5")
    monkeypatch.setattr(LLMOnGpu, "gpu", Gpu(80.0), raising=False)
    LLMOnGpu.gpu.hold("trainer", 24.0, "starts")
    LLMOnGpu.gpu.events.clear()
    monkeypatch.setattr(LLMOnGpu, "scripts", {"judge": reply_ids, "model": [5, 6]}, raising=False)
    monkeypatch.setattr(vllm, "LLM", LLMOnGpu, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(engine, "engine_gpu_use", lambda *_, **__: None)
    monkeypatch.setattr(engine, "process_numerics", lambda _: {})
    made = LocalSession()
    made.cluster = LocalCluster(1, use_gpus=True)
    return made


def settings_of(judge: Path, **of_judge: Any) -> RolloutSettings:
    settings = JudgeModel(model=str(judge), max_model_len=900, **of_judge)
    return RolloutSettings(
        environment=LLMJudge(judge=settings, max_new_tokens=16),
        generation={"max_new_tokens": 2},
        max_prompt_tokens=16,
    )


def data_of(model: Path, folder: Path) -> Path:
    rows = [{"prompt": f"1+{b}=", "answer": str(1 + b)} for b in range(3)]
    save_frame(DataModule.of(rows, tokenizer=load_tokenizer(model)).train, folder)
    return folder


def without_proofs(events: list[str]) -> list[str]:
    """Counts consecutive calls of an engine, such as for its proof, once."""
    return [each for each, before in zip(events, ["", *events], strict=False) if each != before]


@pytest.mark.slow
def test_a_judge_sleeps_when_the_engine_starts(session: Any, judge: Path, tiny_model: Path) -> None:
    with Sampler(session, settings_of(judge), tiny_model):
        assert LLMOnGpu.gpu.events == START
        assert LLMOnGpu.gpu.used_gib == {"trainer": 24.0, "judge": 1.0, "model": 40}
    assert LLMOnGpu.gpu.events == [*START, "model sleeps 1"]


def test_the_recipe_sets_its_share_of_the_gpu(session: Any, judge: Path, tiny_model: Path) -> None:
    settings = settings_of(judge, gpu_memory_utilization=0.25, kv_cache_gib=2)
    with Sampler(session, settings, tiny_model):
        options = session.groups["judge"].backends[0]._llm.calls[0][2]
        assert options["gpu_memory_utilization"] == 0.25
    # Fields that a recipe leaves out are not in the key of a stage.
    shown = json.loads(settings.model_dump_json())["environment"]["judge"]
    assert shown["gpu_memory_utilization"] == 0.25
    assert (
        "gpu_memory_utilization" not in settings_of(judge).model_dump_json().split("generation")[0]
    )


@pytest.mark.slow
def test_an_evaluation_takes_turns_with_its_judge(
    session: Any, judge: Path, tiny_model: Path, tmp_path: Path
) -> None:
    evaluation = evaluate(
        tiny_model,
        data_of(tiny_model, tmp_path),
        session,
        config=EvaluationConfig(num_samples_per_prompt=2),
        settings=settings_of(judge),
    )
    assert without_proofs(LLMOnGpu.gpu.events) == [
        *START,
        "model generates",
        "model sleeps 1",
        "judge wakes",
        "judge generates",
        "judge sleeps 1",
        "model wakes",
        "model generates",
        "model sleeps 1",
        "judge wakes",
        "judge generates",
        "judge sleeps 1",
    ]
    assert {row["reward"] for row in evaluation.rows} == {0.5}


@pytest.mark.slow
def test_pairs_are_scored_while_the_engine_sleeps(
    session: Any, judge: Path, tiny_model: Path, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match="have the same reward"):  # of the judge
        sample_pairs(
            tiny_model,
            data_of(tiny_model, tmp_path),
            session,
            settings=settings_of(judge),
            num_generations_per_prompt=2,
            margin=0.0,
            iteration=1,
        )
    assert without_proofs(LLMOnGpu.gpu.events) == [
        *START,
        "model generates",
        "model sleeps 1",
        "judge wakes",
        "judge generates",
        "judge sleeps 1",
    ]


class OnTwoGpus(LLMOnGpu):
    """An `LLMOnGpu` with a separate GPU for the judge."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if Path(args[0]).name == "judge":
            self.gpu = Gpu(80.0)  # type: ignore[misc]
        super().__init__(*args, **kwargs)


def test_nobody_waits_for_a_judge_on_a_dedicated_gpu(
    session: Any, judge: Path, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import vllm

    monkeypatch.setattr(vllm, "LLM", OnTwoGpus, raising=False)
    settings = settings_of(judge, placement={"own": 1}, gpu_memory_utilization=0.9)
    evaluation = evaluate(
        tiny_model,
        data_of(tiny_model, tmp_path),
        session,
        config=EvaluationConfig(num_samples_per_prompt=2),
        settings=settings,
    )
    llm = session.groups["judge"].backends[0]._llm
    # Neither sleeps for the other: the judge starts, stays, and answers; so does the engine, which
    # gives its share to the trainer at the end.
    assert without_proofs(llm.gpu.events) == ["judge starts", "judge generates"]
    assert without_proofs(LLMOnGpu.gpu.events) == [
        "model starts",
        "model generates",
        "model sleeps 1",
    ]
    assert llm.gpu.used_gib == {"judge": 72}
    assert llm.calls[0][2]["enable_sleep_mode"] is False
    assert session.reserved == (DedicatedBundles("judge", 1),)
    assert {row["reward"] for row in evaluation.rows} == {0.5}


class Recorded:
    """A sampler whose engine and scorer record their calls."""

    def __init__(self, events: list[str]) -> None:
        self.generation = self.engine = self
        self._events = events

    def prepare_for_generation(self) -> None:
        self._events.append("wake")

    def finish_generation(self, *, discards_weights: bool) -> None:
        self._events.append(f"sleep {discards_weights}")

    def update_weights(self, policy: object) -> None:
        self._events.append("weights")

    def run(self, prompts: list[Prompt], **_: Any) -> list[Any]:
        self._events.append("generate")
        return []

    def score(self, rollouts: list[Any]) -> list[Any]:
        self._events.append("score")
        return rollouts


class Validated(RolloutTrainer[Any, Any]):
    """A trainer that only validates."""

    def __init__(self, sampler: Any) -> None:
        self.sampler, self._held_out, self.policy = sampler, [None], None  # type: ignore[assignment]

    step = 3
    _custom = CustomParts()

    def _train_step(self, batch: Any) -> dict[str, float]:
        raise NotImplementedError


def test_a_validation_is_scored_after_the_engine_has_discarded_its_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from nemo_rl_core.trainers import rollouts

    events: list[str] = []
    monkeypatch.setattr(rollouts, "accuracy_metrics", lambda scored: {"accuracy": 1.0})
    assert Validated(Recorded(events))._validate() == {"accuracy": 1.0}
    assert events == ["weights", "wake", "generate", "sleep True", "score"]
