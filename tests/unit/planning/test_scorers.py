"""Memory of reward models and judges on the trainer's first GPU, computed by hand."""

import json
from dataclasses import replace
from typing import Any

import pytest

from nemo_rl_core.config.cluster import ClusterConfig
from nemo_rl_core.config.environment import ByTask, WeightedSum
from nemo_rl_core.config.generation import VllmGenerationConfig
from nemo_rl_core.config.judge import JudgeModel, LLMJudge
from nemo_rl_core.config.placement import DedicatedBundles
from nemo_rl_core.config.single_turn import ExactMatch, RewardModelScore
from nemo_rl_core.config.training import DTensorTraining
from nemo_rl_core.planning.accelerators import ACCELERATORS
from nemo_rl_core.planning.choices import fits
from nemo_rl_core.planning.engine_memory import kv_tokens_of_judge
from nemo_rl_core.planning.load import ScorerLoad, StageLoad, routes_of, untried
from nemo_rl_core.planning.memory import plan_memory
from nemo_rl_core.planning.scorers import names_of_scorers, scorer_problem, scorers_of
from nemo_rl_core.planning.search import smallest_change
from nemo_rl_core.planning.speed import plan_transfer
from tests.unit.planning.layouts import CONFIGS, sizes, stage

GPU, GIB = 80.0, 2**30
JUDGE = ScorerLoad(
    "the judge folder", sizes("llama-3.1-8b"), "bfloat16", "environment.judge", 4096, share=0.5
)
MODEL = ScorerLoad("the reward model folder", sizes("qwen2.5-7b"), "bfloat16", "environment", 8192)


def stage_with(*scorers: ScorerLoad, **options: Any) -> StageLoad:
    sampled = {"generation": VllmGenerationConfig(num_engines=8), "longest": 1024, **options}
    return replace(stage("qwen2.5-7b", 8, **sampled), scorers=scorers)


def test_largest_scorer_runs_on_the_trainers_gpu_while_the_engine_sleeps() -> None:
    base = plan_memory(stage_with(), GPU)
    assert (base.scoring, "scorer" in base.parts) == (0.0, False)
    plan = plan_memory(stage_with(JUDGE, MODEL), GPU)
    # A process with an engine and one without hold their contexts always.
    assert plan.parts["contexts"] == base.parts["contexts"] + 2 + 1
    assert plan.training == pytest.approx(base.training + 3)
    assert plan.sampling == pytest.approx(base.sampling + 3)
    assert plan.parts["scorer"] == 0.5 * GPU
    resident = sum(plan.parts[name] for name in ("weights", "moments", "contexts"))
    assert plan.scoring == pytest.approx(resident + 0.5 * GPU)
    assert plan.peak == max(plan.training, plan.sampling, plan.scoring)
    # 7.62e9 weights less a head of 152,064 x 3,584, in two bytes; 8192 tokens of a layer.
    weights = 2 * (7_615_616_512 - 152_064 * 3_584)
    activations = 8192 * 2 * 2 * (3_584 + 18_944)
    expected = (weights + activations) / GIB
    assert plan_memory(stage_with(MODEL), GPU).parts["scorer"] == pytest.approx(expected)
    assert expected == pytest.approx(13.86, abs=0.01)


def test_offloaded_state_leaves_room_for_scorers() -> None:
    offloaded = DTensorTraining(offload_for_generation="all")
    here, there = (
        plan_memory(stage_with(MODEL, training=training), GPU)
        for training in (DTensorTraining(), offloaded)
    )
    states = here.parts["weights"] + here.parts["moments"]
    assert here.scoring - there.scoring == pytest.approx(states)


def test_engines_that_do_not_sleep_count_on_their_gpus() -> None:
    def scoring(is_ahead: bool, **placement: Any) -> float:
        load = stage_with(MODEL, generation=VllmGenerationConfig(num_engines=8, **placement))
        assert load.sampling is not None
        sampling = replace(load.sampling, is_asynchronous=is_ahead)
        return plan_memory(replace(load, sampling=sampling), GPU).scoring

    asleep = scoring(False)
    assert scoring(True) == pytest.approx(asleep + 0.5 * GPU)
    dedicated = {"placement": {"own": 8}}
    assert (
        scoring(True, **dedicated) == scoring(False, **dedicated) == asleep - 2
    )  # and no engine's context


def test_a_judge_that_cannot_read_its_questions_is_named() -> None:
    # 8.03e9 weights in two bytes, a GiB, and 8192 tokens of a layer leave that of 16 GiB.
    left = 0.2 * GPU - 1 - (2 * 8_030_261_248 + 8192 * 4 * (4096 + 14_336)) / GIB
    assert left < 0
    small = replace(JUDGE, share=0.2)
    assert scorer_problem(stage_with(small), GPU) == (
        "the judge folder: the KV cache holds 0 tokens, fewer than "
        "environment.judge.max_model_len (4,096)"
    )
    assert not fits(stage_with(small, training=DTensorTraining()), GPU)
    assert scorer_problem(stage_with(JUDGE, MODEL), GPU) is None


def test_the_smallest_change_is_the_share_of_a_judge() -> None:
    load = stage_with(replace(JUDGE, share=0.8), tokens=2048)
    assert plan_memory(load, GPU).scoring > 0.93 * GPU
    change = smallest_change([load], GPU)
    assert change is not None
    assert [str(each) for each in change] == ["environment.judge.gpu_memory_utilization=0.7"]


def test_scorers_on_dedicated_gpus_are_counted_there() -> None:
    bundles = (DedicatedBundles("judge", 2), DedicatedBundles("reward-model", 1))
    judge = replace(JUDGE, has_own_gpus=True, share=0.9)
    base = plan_memory(stage_with(), GPU)
    load = replace(stage_with(judge, replace(MODEL, has_own_gpus=True)), own_scorers=bundles)
    assert (load.num_gpus, load.machines) == (11, [8, 3])
    plan = plan_memory(load, GPU)
    # The trainer's GPU holds none of it, not even a context.
    assert (plan.training, plan.sampling) == (base.training, base.sampling)
    assert plan.parts == {**base.parts, "scorer on its own": 0.9 * GPU + 2}
    assert plan.scoring == 0.9 * GPU + 2
    shared = plan_memory(stage_with(MODEL), GPU).parts["scorer"]
    of_model = replace(load, scorers=(replace(MODEL, has_own_gpus=True),))
    assert plan_memory(of_model, GPU).scoring == shared + 1
    # One on the trainer's GPU and one on a dedicated GPU: the larger of both.
    both = plan_memory(replace(load, scorers=(judge, MODEL)), GPU)
    assert both.parts["scorer"] == shared
    assert both.scoring == max(plan_memory(stage_with(MODEL), GPU).scoring, plan.scoring)
    assert "models that score on dedicated GPUs" in untried(load)
    assert "models that score on dedicated GPUs" not in untried(stage_with(judge))


def test_scorers_receive_no_policy_weights() -> None:
    generation = VllmGenerationConfig(placement={"own": 4})
    base = stage("qwen2.5-7b", 4, generation=generation, longest=1024)
    load = replace(base, own_scorers=(DedicatedBundles("judge", 4),))
    assert (base.machines, load.machines) == ([8], [8, 4])
    assert routes_of(load) == routes_of(base)
    found, expected = (plan_transfer(each, ACCELERATORS["nvidia-h100"]) for each in (load, base))
    assert found == expected


def test_dedicated_gpu_is_a_change_that_fits() -> None:
    # It leaves 3 GiB of the usable memory; contexts of trainer and engine take 3, its own takes 1.
    large = replace(MODEL, sizes=sizes("qwen3-30b-a3b", num_hidden_layers=61))
    load = stage_with(large, tokens=2048)
    assert plan_memory(load, GPU).scoring > 0.93 * GPU
    change = smallest_change([load], GPU)
    assert change is not None
    assert [str(each) for each in change] == ["environment.placement.own=1"]
    # A machine of eight that the workers fill has no other GPU.
    full = replace(load, cluster=ClusterConfig(shape="node_8gpu"))
    change = smallest_change([full], GPU)
    assert change is not None
    assert [str(each) for each in change] == [
        "cluster.shape=cluster",
        "environment.placement.own=1",
    ]
    # A model that no GPU can hold does not fit a dedicated GPU either.
    huge = replace(MODEL, sizes=sizes("llama-3.1-70b"))
    assert smallest_change([stage_with(huge, tokens=2048)], GPU) is None


def test_judge_too_large_for_a_gpu_is_split_over_several() -> None:
    huge = replace(JUDGE, sizes=sizes("llama-3.1-70b"))
    change = smallest_change([stage_with(huge, tokens=2048)], GPU)
    assert change is not None
    # 65.7 GiB of weights on each of two, and 0.9 of 80 GiB.
    assert [str(each) for each in change] == [
        "environment.judge.placement.own=2",
        "environment.judge.tensor_parallel_size=2",
    ]
    # Two copies stay two, and the share that the recipe has stays, which leaves two GPUs too few.
    on_two = replace(huge, has_own_gpus=True, share=0.8)
    bundles = DedicatedBundles("judge", 2, path="environment.judge.placement.own")
    load = replace(stage_with(on_two, tokens=2048), own_scorers=(bundles,))
    change = smallest_change([load], GPU)
    assert change is not None
    assert [str(each) for each in change] == [
        "environment.judge.placement.own=8",
        "environment.judge.tensor_parallel_size=4",
    ]


def test_a_judge_over_several_gpus_by_hand() -> None:
    spread = replace(JUDGE, has_own_gpus=True, share=0.9, ranks=4)
    weights = 2 * 8_030_261_248 / 4
    activations = 8192 * 4 * (4096 + 14_336 / 4)
    free = 0.9 * GPU * GIB - GIB - weights - activations
    tokens = kv_tokens_of_judge(spread.sizes, "bfloat16", share=0.9, memory_gib=GPU, ranks=4)
    assert tokens == pytest.approx(free / (2 * 32 * 2 * 128 * 2))  # 2 of 8 heads of 32 layers
    assert scorer_problem(stage_with(spread), GPU) is None
    assert "an engine over several GPUs" in untried(stage_with(spread))
    assert scorer_problem(stage_with(replace(spread, ranks=3)), GPU) == (
        "environment.judge.tensor_parallel_size: 3 does not divide the 32 heads of the judge folder"
    )


def test_all_scoring_models_are_listed() -> None:
    judge = LLMJudge(judge=JudgeModel(model="judge", dtype="bfloat16"))
    summed = WeightedSum(
        parts=[{"environment": ExactMatch()}, {"environment": RewardModelScore(model="rm")}]
    )
    unnamed = RewardModelScore(max_tokens_per_batch=64)
    environment = ByTask(
        tasks=[
            {"task": "a", "environment": judge},
            {"task": "b", "environment": summed},
            {"task": "c", "environment": unnamed},
        ]
    )
    configs = {
        "judge": json.loads(CONFIGS["llama-3.1-8b"].read_text()),
        "rm": {**json.loads(CONFIGS["qwen2.5-7b"].read_text()), "dtype": "bfloat16"},
    }
    small = sizes("qwen2.5-1.5b")
    result = list(scorers_of(environment, configs.__getitem__, run_sizes=small, path="environment"))
    assert result == [
        replace(JUDGE, name="the judge judge", path="environment.tasks.0.environment.judge"),
        replace(
            MODEL,
            name="the reward model rm",
            path="environment.tasks.1.environment.parts.1.environment",
        ),
        ScorerLoad(
            "the reward model of the run",
            small,
            "float32",
            "environment.tasks.2.environment",
            64,
        ),
    ]
    assert names_of_scorers(environment) == [each.name for each in result]
    del configs["rm"]["dtype"]  # which transformers then reads as float32
    assert next(iter(scorers_of(summed, configs.__getitem__))).dtype == "float32"


def test_sections_with_the_same_judge_share_it() -> None:
    judge = LLMJudge(judge=JudgeModel(model="judge"), instruction="Is it short?")
    other = LLMJudge(judge=JudgeModel(model="judge"), instruction="Is it right?")
    model = RewardModelScore(model="rm")
    parts = [{"environment": each} for each in (judge, other, model, model)]
    summed = WeightedSum.model_validate({"parts": parts})
    read = json.loads(CONFIGS["qwen2.5-7b"].read_text())
    result = [each.name for each in scorers_of(summed, lambda _: read)]
    # Each section loads its own reward model on the trainer's GPU.
    assert result == ["the judge judge", "the reward model rm", "the reward model rm"]
