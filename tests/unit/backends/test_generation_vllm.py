"""The vLLM worker without vLLM."""

import os

import pytest

from nemo_rl_core.backends.generation.vllm import _logprobs_mode
from nemo_rl_core.backends.generation.vllm_ranks import join_engine
from nemo_rl_core.config.generation import VllmGenerationConfig
from nemo_rl_core.distributed.local_ranks import run_ranks


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
