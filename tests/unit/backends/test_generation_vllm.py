"""The vLLM worker without vLLM."""

import os

import pytest

from nemo_rl_core.backends.generation.vllm import _logprobs_mode, _refuse_block_size
from nemo_rl_core.backends.generation.vllm_ranks import join_engine
from nemo_rl_core.config.generation import VllmGenerationConfig
from nemo_rl_core.distributed.local_ranks import run_ranks
from nemo_rl_core.errors import ConfigError


def test_ranks_of_an_engine_meet_where_others_do_not() -> None:
    def on_rank() -> dict[str, str]:
        join_engine(2)
        return {key: os.environ[key] for key in ("RANK", "WORLD_SIZE", "MASTER_ADDR")} | {
            "port": os.environ["MASTER_PORT"]
        }

    first, second, third, fourth = run_ranks(on_rank, world_size=4)
    assert [found["RANK"] for found in (first, second, third, fourth)] == ["0", "1", "0", "1"]
    assert {found["WORLD_SIZE"] for found in (first, second, third, fourth)} == {"2"}
    assert first["port"] == second["port"] != third["port"] == fourth["port"]


@pytest.mark.parametrize(
    ("words", "mode"),
    [
        ({}, "processed_logprobs"),
        ({"temperature": 0.7, "top_p": 0.9}, "processed_logprobs"),
        ({"top_p": 0.9}, "raw_logprobs"),
        ({"top_k": 5}, "raw_logprobs"),
        ({"repetition_penalty": 1.2}, "raw_logprobs"),
    ],
)
def test_logprobs_are_of_the_whole_distribution_at_temperature_1(words: dict, mode: str) -> None:
    assert _logprobs_mode(VllmGenerationConfig(**words)) == mode


def test_blocks_that_a_cpu_cannot_take_are_refused_before_the_engine_starts() -> None:
    for size in (None, 32, 96):
        _refuse_block_size(VllmGenerationConfig(block_size=size), has_gpu=False)
    odd = VllmGenerationConfig(block_size=48)
    _refuse_block_size(odd, has_gpu=True)
    with pytest.raises(ConfigError, match="does not take blocks of this size") as refused:
        _refuse_block_size(odd, has_gpu=False)
    assert refused.value.fix == "set it to 64"
