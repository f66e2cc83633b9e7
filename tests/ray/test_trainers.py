"""Every trainer, in five lines of Python: it trains, is reproducible, and resumes."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

from nemo_rl_core.algorithms import (
    DistillationTrainer,
    DPOTrainer,
    GRPOTrainer,
    PPOTrainer,
    RewardModelTrainer,
    SFTTrainer,
)
from nemo_rl_core.data.loader import load_frame, save_frame
from nemo_rl_core.data.module import DataModule
from nemo_rl_core.data.pairs import load_pairs, pair_batch, save_logprobs
from nemo_rl_core.data.pretrained import load_tokenizer
from nemo_rl_core.distributed.session import ClusterSession
from nemo_rl_core.errors import ConfigError
from nemo_rl_core.models.policy import Policy
from nemo_rl_core.store.manifest import Manifest
from nemo_rl_core.trainers.base import BaseTrainer
from nemo_rl_core.trainers.callbacks import Callback
from nemo_rl_core.trainers.fit.fitting import TrainResult
from nemo_rl_core.trainers.loop import RunSpec
from tests.training import Watch

LN_2 = math.log(2)
SUMS = [(a, b) for a in range(3, 9) for b in range(5)]
PROMPTS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in SUMS]
PAIRS = [{"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a + b + 1)} for a, b in SUMS]

ONE_THREAD = {"num_threads": 1}
# The same as in conftest.py, so that all tests share one engine.
ENGINE = {
    "generation": {"max_new_tokens": 6, "kv_cache_gib": 1, "max_num_seqs": 64},
    "max_prompt_tokens": 16,
}
OFFLINE = {"cluster": ONE_THREAD, "save_every_num_steps": 2, "learning_rate": 0.01}
ONLINE = {**OFFLINE, **ENGINE, "num_prompts_per_step": 4, "num_generations_per_prompt": 2}


def sevens(prompt: str, response: str) -> float:
    """A pattern that a model with random weights writes often enough to learn from."""
    return response.count("7") + 0.1 * len(response)


def fit_sft(model: Path, **options: Any) -> TrainResult:
    trainer = SFTTrainer.from_pretrained(model, num_steps=4, global_batch_size=4, **OFFLINE)
    return trainer.fit(PROMPTS, **options)


def fit_dpo(model: Path, **options: Any) -> TrainResult:
    settings = {"num_steps_per_iteration": 4, "num_pairs_per_step": 4, **OFFLINE}
    return DPOTrainer.from_pretrained(model, **settings).fit(PAIRS, **options)


def fit_reward_model(model: Path, **options: Any) -> TrainResult:
    settings = {"num_steps": 4, "num_pairs_per_step": 4, **OFFLINE}
    return RewardModelTrainer.from_pretrained(model, **settings).fit(PAIRS, **options)


def fit_grpo(model: Path, **options: Any) -> TrainResult:
    trainer = GRPOTrainer.from_pretrained(model, num_steps_per_iteration=4, **ONLINE)
    return trainer.fit(PROMPTS, reward_fn=sevens, **options)


def fit_ppo(model: Path, **options: Any) -> TrainResult:
    trainer = PPOTrainer.from_pretrained(model, num_steps_per_iteration=4, **ONLINE)
    return trainer.fit(PROMPTS, reward_fn=sevens, **options)


def fit_distillation(model: Path, **options: Any) -> TrainResult:
    trainer = DistillationTrainer.from_pretrained(model, num_steps=4, top_k=8, **ONLINE)
    return trainer.fit(PROMPTS, reference=fit_sft(model).checkpoint, **options)


Fit = Callable[..., TrainResult]
FITS = [fit_sft, fit_dpo, fit_reward_model, fit_grpo, fit_ppo, fit_distillation]
CONDITIONS = pytest.mark.parametrize("fit", FITS, ids=lambda fit: fit.__name__)


class StopAfter(Callback):
    """Raises when a step has ended, before it is saved."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, trainer: Any, step: int, metrics: Any) -> None:
        if step == self.step:
            raise KeyboardInterrupt


class Steps(Callback):
    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_step_begin(self, trainer: Any, step: int) -> None:
        self.seen.append(step)


@pytest.fixture(scope="module")
def straight(session: ClusterSession, tiny_model: Path) -> Callable[[Fit], TrainResult]:
    """Runs a trainer without interruption, once."""
    results: dict[Fit, TrainResult] = {}

    def run(fit: Fit) -> TrainResult:
        if fit not in results:
            results[fit] = fit(tiny_model, name="straight")
        return results[fit]

    return run


def weights(result: TrainResult) -> dict[str, torch.Tensor]:
    """Returns every tensor of every model that the run has saved, by file and name."""
    return {
        f"{path.relative_to(result.folder)}/{name}": tensor
        for path in sorted(result.folder.rglob("model/*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def assert_bitwise_identical(one: TrainResult, other: TrainResult) -> None:
    assert one.metrics == other.metrics
    ours, theirs = weights(one), weights(other)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@CONDITIONS
def test_a_trainer_trains_on_a_list_of_dicts(
    fit: Fit, straight: Callable[[Fit], TrainResult], tiny_model: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    result = straight(fit)
    assert [step["global_step"] for step in result.metrics] == [1.0, 2.0, 3.0, 4.0]
    assert all(math.isfinite(value) for step in result.metrics for value in step.values())
    assert result.step == 4
    assert result.num_tokens == sum(step["num_valid_tokens"] for step in result.metrics) > 0

    is_scalar = fit is fit_reward_model
    kind = AutoModelForSequenceClassification if is_scalar else AutoModelForCausalLM
    _, loading = kind.from_pretrained(result.checkpoint, output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    assert load_tokenizer(result.checkpoint).encode("1+2=")
    before = load_file(tiny_model / "model.safetensors")["model.norm.weight"]
    assert not torch.equal(weights(result)["model/model.safetensors/model.norm.weight"], before)

    manifest = Manifest.read(result.folder)
    assert result.lineage_id == result.folder.name
    assert result.manifest == manifest
    assert manifest.choices == {  # the choices of `auto` on a CPU
        "training.attention": "sdpa",
        "training.activation_checkpointing": "false",
        "training.data_parallel_replicas": "1",
        "training.deterministic": "true",
        "training.gradient_sync": "every_microbatch",
    }
    parents = {(parent.kind, parent.stage) for parent in manifest.parents}
    data = {("dataset", "prepare_data train"), ("dataset", "prepare_data validation")}
    # The teacher was trained here and is the artifact itself.
    teacher = {("checkpoint", "sft")} if fit is fit_distillation else set()
    assert parents == {("checkpoint", "prepare_model"), *teacher, *data}


@CONDITIONS
def test_a_stopped_run_resumes_and_ends_the_same(
    fit: Fit, straight: Callable[[Fit], TrainResult], tiny_model: Path
) -> None:
    # A save after step 2; step 3 is done and lost.
    with pytest.raises(KeyboardInterrupt):
        fit(tiny_model, name="stopped", callbacks=[StopAfter(3)])
    steps = Steps()
    result = fit(tiny_model, name="stopped", callbacks=[steps])
    assert steps.seen == [3, 4]
    assert_bitwise_identical(result, straight(fit))
    if fit is fit_ppo:
        assert any(name.startswith("critic/model/") for name in weights(result))


@CONDITIONS
def test_a_rerun_is_equal_and_a_finished_run_is_not_repeated(
    fit: Fit, straight: Callable[[Fit], TrainResult], tiny_model: Path
) -> None:
    steps = Steps()
    again = fit(tiny_model, name="straight", callbacks=[steps])
    assert (again.folder, steps.seen) == (straight(fit).folder, [])
    if fit in (fit_sft, fit_grpo):  # the others show it when they resume
        repeated = fit(tiny_model)
        assert repeated.folder != again.folder
        assert_bitwise_identical(repeated, again)


@pytest.fixture
def pairs_spec(tiny_model: Path, tmp_path: Path) -> RunSpec:
    train = tmp_path / "train"
    data = DataModule.of(PAIRS, tokenizer=load_tokenizer(tiny_model))
    save_frame(data.train, train)
    return RunSpec(train=train, start=tiny_model, work=tmp_path / "work", reference=tiny_model)


def dpo(**settings: Any) -> DPOTrainer:
    settings = {"num_steps_per_iteration": 2, "num_pairs_per_step": 4, **settings}
    return DPOTrainer.from_pretrained("unused", **OFFLINE | settings)


def first_loss(trainer: BaseTrainer[Any, Any], spec: RunSpec) -> float:
    watch = Watch()
    trainer.run(spec, callbacks=[watch])
    return watch.metrics[0]["loss"]


def test_the_first_loss_of_dpo_is_ln_2(session: ClusterSession, pairs_spec: RunSpec) -> None:
    # The policy is its own reference: the margin is 0, and -log sigmoid(0) = ln 2.
    assert first_loss(dpo(), pairs_spec) == pytest.approx(LN_2, abs=1e-6)


def test_the_first_loss_of_dpo_is_ln_2_with_cached_logprobs(
    session: ClusterSession, pairs_spec: RunSpec, tmp_path: Path
) -> None:
    trainer = dpo()
    pairs = load_pairs(pairs_spec.train, load_tokenizer(pairs_spec.start))
    policy = Policy(session, trainer._training_setup(pairs_spec))
    batch = pair_batch(pairs)
    rows = policy.get_logprobs(batch)["logprobs"]
    masks = batch["token_mask"]
    trained = [tuple(row[mask].tolist()) for row, mask in zip(rows, masks, strict=True)]
    cached = [
        replace(pair, reference_logprobs=(trained[2 * index], trained[2 * index + 1]))
        for index, pair in enumerate(pairs)
    ]
    save_logprobs(cached, tmp_path / "cached")
    spec = replace(pairs_spec, reference_logprobs=tmp_path / "cached")
    assert first_loss(trainer, spec) == pytest.approx(LN_2, abs=1e-6)

    # The cache is read: with every chosen logprob lower by 1 per token, the log-ratio of a
    # chosen sequence of n trained tokens is n, and the loss -log sigmoid(0.1 n) is below ln 2.
    lowered = []
    for pair in cached:
        chosen, rejected = pair.reference_logprobs
        both = (tuple(value - 1 for value in chosen), rejected)
        lowered.append(replace(pair, reference_logprobs=both))
    save_logprobs(lowered, tmp_path / "lowered")
    spec = replace(spec, reference_logprobs=tmp_path / "lowered", work=tmp_path / "other")
    counts = {pair.chosen.num_trained_tokens for pair in pairs}
    bounds = [math.log1p(math.exp(-0.1 * count)) for count in (max(counts), min(counts))]
    assert bounds[0] - 1e-6 <= first_loss(dpo(), spec) <= bounds[1] + 1e-6


def test_the_first_loss_of_a_reward_model_is_ln_2(
    straight: Callable[[Fit], TrainResult],
) -> None:
    # The head starts at 0, so all scores are equal.
    assert straight(fit_reward_model).metrics[0]["loss"] == pytest.approx(LN_2, abs=1e-6)


@pytest.mark.parametrize("kind", ["kto", "orpo"])
def test_preference_losses_without_pairs_or_reference_run(
    session: ClusterSession, tiny_model: Path, kind: str
) -> None:
    settings = {"num_steps_per_iteration": 2, "num_pairs_per_step": 4, "loss": {"kind": kind}}
    trainer = DPOTrainer.from_pretrained(tiny_model, **settings, **OFFLINE)
    result = trainer.fit(PAIRS)
    assert len(result.metrics) == 2
    assert all(math.isfinite(value) for step in result.metrics for value in step.values())
    if kind == "kto":
        # Nothing has been learned: no log-ratio, so every advantage is 0 and the loss sigmoid(0).
        assert result.metrics[0]["loss"] == pytest.approx(0.5, abs=1e-6)


def test_validation_is_reported_and_called_back(session: ClusterSession, tiny_model: Path) -> None:
    seen: list[tuple[int, dict[str, float]]] = []

    class WatchValidation(Callback):
        def on_validation_end(self, trainer: Any, step: int, metrics: Any) -> None:
            seen.append((step, dict(metrics)))

    result = SFTTrainer.from_pretrained(
        tiny_model, num_steps=3, global_batch_size=4, validate_every_num_steps=2, **OFFLINE
    ).fit(PROMPTS, callbacks=[WatchValidation()])
    assert [step for step, _ in seen] == [2, 3]
    assert [step.get("validation_loss") for step in result.metrics] == [
        None,
        seen[0][1]["validation_loss"],
        seen[1][1]["validation_loss"],
    ]
    validation = Path(next(p.path for p in result.manifest.parents if "validation" in p.stage))
    assert len(load_frame(validation)) == 2  # 5 % of 30 rows, rounded


class Hopeless:
    """Gives every completion the same reward, so that no group has an advantage."""

    def __init__(self) -> None:
        self.num_scored = 0

    def __call__(self, prompts: list[str], responses: list[str]) -> list[float]:
        self.num_scored += len(responses)
        return [1.0] * len(responses)


def test_dynamic_sampling_draws_again_and_gives_up_at_its_bound(
    session: ClusterSession, tiny_model: Path
) -> None:
    reward = Hopeless()
    result = GRPOTrainer.from_pretrained(
        tiny_model, num_steps_per_iteration=1, dynamic_sampling={"max_draws": 3}, **ONLINE
    ).fit(PROMPTS, reward_fn=reward)
    assert result.metrics[0]["num_draws"] == 3.0
    assert result.metrics[0]["zero_variance_fraction"] == 1.0
    # 3 draws of 4 prompts with 2 completions each; a first call may test how lists are accepted.
    assert 24 <= reward.num_scored <= 25


def test_dynamic_sampling_fills_up_with_other_prompts(
    session: ClusterSession, tiny_model: Path
) -> None:
    prompts: list[str] = []

    def only_small_sums(prompt: str, response: str) -> float:
        # Groups of odd first operands are all equal; the others differ by the index in the run.
        prompts.append(prompt)
        return float(len(prompts)) if int(prompt[0]) % 2 == 0 else 0.0

    result = GRPOTrainer.from_pretrained(
        tiny_model, num_steps_per_iteration=1, dynamic_sampling={"max_draws": 6}, **ONLINE
    ).fit(PROMPTS, reward_fn=only_small_sums)
    assert 2 <= result.metrics[0]["num_draws"] <= 6
    rollouts = pd.read_parquet(result.folder / "rollouts" / "step_000001.parquet")
    assert len(rollouts) == 8
    assert all(int(prompt[0]) % 2 == 0 for prompt in rollouts["prompt"])


def test_a_reward_is_refused_where_nothing_is_sampled(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match="'sft' scores no completions"):
        fit_sft(tiny_model, reward_fn=sevens)
