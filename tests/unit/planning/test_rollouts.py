"""Estimated times of sampling, compared with sums by hand."""

import math
import random
from dataclasses import replace
from typing import Any

import pytest

from nemo_rl_core.config.generation import VllmGenerationConfig
from nemo_rl_core.planning.accelerators import ACCELERATORS
from nemo_rl_core.planning.load import StageLoad
from nemo_rl_core.planning.memory import plan_memory
from nemo_rl_core.planning.rollouts import Lengths, rollout_seconds
from tests.unit.planning.layouts import stage

H100 = ACCELERATORS["nvidia-h100"]


def load(
    name: str,
    num_sequences: int,
    *,
    mean: float | None = None,
    completion: int = 1000,
    **engine: Any,
) -> StageLoad:
    made = stage(name, 16, generation=VllmGenerationConfig(**engine))
    assert made.sampling is not None
    sampling = replace(made.sampling, num_sequences=num_sequences, mean_completion_tokens=mean)
    return replace(made, prompt_tokens=100, completion_tokens=completion, sampling=sampling)


def seconds(found: StageLoad) -> float:
    return rollout_seconds(found, plan_memory(found, H100.memory_gib), H100, 989e12)


def test_one_wave_by_hand() -> None:
    # 64 sequences of 1,000 tokens, one engine. Each token reads 16.06 GB of weights and, for each
    # sequence, 600 tokens on average of 131,072 bytes, at 70 % of 3,350 GB/s; vLLM takes 4.5 ms
    # and 36 us per sequence; the prompts' products take 70 % of 989 TFLOP/s.
    read = (2 * 8.030e9 + 64 * 600 * 131_072) / (0.7 * 3.35e12)
    token = read + 4.5e-3 + 64 * 36e-6
    prompts = 64 * 100 * 2 * (8.030e9 - 128_256 * 4096) / (0.7 * 989e12)
    assert seconds(load("llama-3.1-8b", 64)) == pytest.approx(1000 * token + prompts, rel=1e-3)


def test_sequences_beyond_the_engines_room_wait() -> None:
    one, four = (seconds(load("llama-3.1-8b", number, max_num_seqs=64)) for number in (64, 256))
    assert four == pytest.approx(4 * one, rel=0.01)


def test_a_long_tail_costs_more_than_its_tokens() -> None:
    full = load("llama-3.1-8b", 64, completion=4000)
    tailed = load("llama-3.1-8b", 64, completion=4000, mean=800)
    # A fifth of the tokens, but the longest of 64 is decoded to its end.
    longest = Lengths.with_mean(800, 4000).longest_of(64)
    assert longest == pytest.approx(807 * math.log(64 / math.log(2)), rel=0.01)
    assert 0.4 < seconds(tailed) / seconds(full) < longest / 4000


def test_tensor_parallelism_divides_reads_but_not_overheads() -> None:
    one = seconds(load("llama-3.1-70b", 8, tensor_parallel_size=2, gpu_memory_utilization=0.95))
    four = seconds(load("llama-3.1-70b", 8, tensor_parallel_size=8, gpu_memory_utilization=0.95))
    assert 1.8 < one / four < 3.5


def test_engine_over_machines_has_slower_all_reduces() -> None:
    near = seconds(load("qwen3-30b-a3b", 8, tensor_parallel_size=8))
    far = seconds(load("qwen3-30b-a3b", 8, tensor_parallel_size=16))
    # 2 * 48 sums per token of 30 us instead of 15, over half of the weights read.
    assert far > near - 1000 * 30.5e9 / 8 / (0.7 * 3.35e12) + 1000 * 96 * 14e-6


def test_few_sequences_meet_few_experts() -> None:
    few, many = (seconds(load("qwen3-30b-a3b", number)) for number in (1, 64))
    assert few < 0.6 * many


@pytest.mark.parametrize(("mean", "limit"), [(800, 4000), (100, 4000), (3200, 4000), (3990, 4000)])
def test_lengths_have_the_expected_mean_and_maximum(mean: float, limit: float) -> None:
    lengths = Lengths.with_mean(mean, limit)
    points = [limit * (step + 0.5) / 10_000 for step in range(10_000)]
    area = sum(map(lengths.share_beyond, points)) * limit / 10_000
    assert area == pytest.approx(mean, rel=1e-3)
    draw = random.Random(0)
    drawn = sorted(
        max(min(draw.expovariate(1 / lengths.decay), limit) for _ in range(512)) for _ in range(201)
    )
    assert drawn[100] == pytest.approx(lengths.longest_of(512), rel=0.07)


def test_lengths_without_a_mean_are_all_at_the_limit() -> None:
    lengths = Lengths.with_mean(4000, 4000)
    assert lengths.share_beyond(3999) == 1
    assert lengths.share_beyond(4000) == 0
    assert lengths.longest_of(1) == 4000
