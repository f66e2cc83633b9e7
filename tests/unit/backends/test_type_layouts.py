"""Model types of different structure at each layout, compared with a plain loop on one rank."""

from pathlib import Path
from typing import Any

import pytest

from nemo_rl_core.config.training import DTensorTraining
from nemo_rl_core.distributed.local_ranks import run_ranks
from nemo_rl_core.distributed.packing.ranks import shard_for_training
from nemo_rl_core.distributed.process_group import rank, world_size
from nemo_rl_core.errors import ConfigError, ModelError
from tests.model_types import (
    BOUND,
    MAX_TOKENS,
    Steps,
    backend_steps,
    loaded,
    make_backend,
    make_batch,
    plain_steps,
    save_tokenizer,
    tiny_model,
)

LEARNING_RATE = 1e-2
"""So large that logprobs after two steps depend on correct gradients."""
FULL_ATTENTION = {"layer_types": ["full_attention"] * 2}
TYPES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {}),
    "gemma2": ("gemma2", {}),
    "gpt_oss": ("gpt_oss", {}),
    "gpt_oss without windows": ("gpt_oss", FULL_ATTENTION),
    "qwen3_next": ("qwen3_next", {}),
    "nemotron_h": ("nemotron_h", {}),
    "mistral": ("mistral", {}),
    "qwen3_moe": ("qwen3_moe", {}),
    "deepseek_v3": ("deepseek_v3", {}),
    "cohere2": ("cohere2", {}),
    "olmo2": ("olmo2", {}),
    "longcat_flash": ("longcat_flash", {}),  # experts without weights: a rank may not use others
}
ALL = set(TYPES)
TENSOR_PARALLEL = {"gemma2", "mistral", "cohere2", "olmo2"}
LAYOUTS: dict[str, tuple[int, dict[str, Any], set[str]]] = {
    "recomputed": (1, {"activation_checkpointing": True}, ALL),
    "FSDP 2": (2, {}, ALL),
    "FSDP 2 recomputed": (2, {"activation_checkpointing": True}, ALL),
    "TP 2": (2, {"tensor_parallel_size": 2}, TENSOR_PARALLEL),
    "TP 2 + SP": (2, {"tensor_parallel_size": 2, "sequence_parallel": True}, TENSOR_PARALLEL),
    "CP 2": (
        2,
        {"context_parallel_size": 2},
        {"qwen3_moe", "deepseek_v3", "olmo2", "longcat_flash"},
    ),
}
"""Ranks and axes of each layout, and the types that it supports."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("types")
    for name, (kind, changes) in TYPES.items():
        tiny_model(kind, **changes).save_pretrained(root / name / "start")
        save_tokenizer(root / name)
    return {name: root / name / "start" for name in TYPES}


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> dict[str, Steps]:
    return {
        name: plain_steps(loaded(folder), make_batch(), LEARNING_RATE)
        for name, folder in folders.items()
    }


def steps_of(folders: dict[str, Path], axes: dict[str, Any]) -> dict[str, Steps]:
    """Returns figures of the types that are not refused, on this rank's part of a plan."""
    training = DTensorTraining(**axes)
    num_shards = training.data_parallel_size(world_size())
    shards = shard_for_training(make_batch(), num_ranks=num_shards, max_tokens=MAX_TOKENS)
    shard = shards[rank() // training.ranks_per_replica]
    steps = {}
    for name, folder in folders.items():
        try:
            backend = make_backend(folder, LEARNING_RATE, training=training)
        except (ConfigError, ModelError):
            continue
        steps[name] = backend_steps(backend, make_batch(), shard)
        backend.shutdown()
    return steps


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        "recomputed",
        "FSDP 2",
        "TP 2 + SP",
        "CP 2",
        pytest.param("FSDP 2 recomputed", marks=pytest.mark.thorough),
        pytest.param("TP 2", marks=pytest.mark.thorough),
    ],
)
def test_layout_matches_the_plain_loop_or_refuses_a_type(
    layout: str, folders: dict[str, Path], expected: dict[str, Steps]
) -> None:
    num_ranks, axes, names = LAYOUTS[layout]
    for actual in run_ranks(steps_of, folders, axes, world_size=num_ranks):
        errors = {name: steps.error(expected[name]) for name, steps in actual.items()}
        assert errors.keys() == names
        assert {name: error for name, error in errors.items() if not error < BOUND} == {}
