"""The smallest change: which one is taken, and that it fits by the same arithmetic."""

from dataclasses import replace
from typing import Any

import pytest

from nemo_rl_core.config.generation import VllmGenerationConfig
from nemo_rl_core.config.training import DTensorTraining, LoRAConfig, MegatronTraining
from nemo_rl_core.planning.load import layout_problem, untried
from nemo_rl_core.planning.search import fits, smallest_change
from tests.unit.planning.layouts import stage

H100 = 79.0


def change(name: str, num_ranks: int = 1, *, memory: float = H100, **options: Any) -> list[str]:
    load = stage(name, num_ranks, **options)
    assert not fits(load, memory)
    changes = smallest_change([load], memory)
    assert changes is not None
    return list(map(str, changes))


def test_recomputation_comes_first() -> None:
    training = DTensorTraining(attention="sdpa", activation_checkpointing=False)
    changes = change("qwen2.5-7b", 8, training=training, tokens=16384)
    assert changes == ["training.activation_checkpointing=true"]


def test_full_gradients_are_given_up_first() -> None:
    training = DTensorTraining(gradient_sync="last_microbatch", activation_checkpointing=True)
    changes = change("qwen2.5-7b", 8, training=training, microbatches=4, memory=40.0)
    assert changes == ["training.gradient_sync=every_microbatch"]


def test_smaller_microbatches_are_the_next_change() -> None:
    training = DTensorTraining(activation_checkpointing=True)
    lora = training.replace(lora=LoRAConfig().model_dump())
    changes = change("qwen2.5-1.5b", training=lora, tokens=65536, longest=8192, memory=17.3)
    assert changes == ["grpo.max_tokens_per_microbatch=32768"]


def test_engine_that_reserves_too_much_gets_less() -> None:
    training = DTensorTraining(activation_checkpointing=True)
    generation = VllmGenerationConfig(gpu_memory_utilization=0.9, num_engines=8)
    changes = change("qwen2.5-7b", 8, training=training, generation=generation)
    assert changes == ["generation.gpu_memory_utilization=0.7"]


def test_an_engine_without_room_for_a_sequence_is_spread_or_gets_more() -> None:
    training = DTensorTraining(activation_checkpointing=True)
    generation = VllmGenerationConfig(num_engines=16)
    changes = change("qwen3-30b-a3b", 16, training=training, generation=generation)
    # With the moments on the host while it samples, a larger share of each GPU is left.
    assert changes == [
        "training.offload_for_generation=optimizer",
        "generation.gpu_memory_utilization=0.8",
    ]
    kept = training.replace(offload_for_generation="optimizer")
    changes = change("qwen3-30b-a3b", 16, training=kept, generation=generation, has_reference=True)
    assert changes == ["generation.tensor_parallel_size=2", "generation.num_engines=8"]


def test_weights_that_are_too_many_for_the_gpus_take_more_of_them() -> None:
    training = DTensorTraining(activation_checkpointing=True)
    # On the machine's memory 70 B would take 131 GiB for each of eight GPUs, 66 of sixteen; on the
    # GPUs themselves they fit 32.
    assert change("llama-3.1-70b", 8, training=training) == ["cluster.num_workers=32"]
    assert change("qwen2.5-7b", 1, training=training) == ["cluster.num_workers=2"]


def test_combination_of_two_changes_fits() -> None:
    generation = VllmGenerationConfig(gpu_memory_utilization=0.8, num_engines=8)
    training = DTensorTraining(attention="sdpa", activation_checkpointing=False)
    changes = change(
        "qwen2.5-7b", 8, training=training, generation=generation, has_reference=True, tokens=16384
    )
    assert changes == [
        "training.activation_checkpointing=true",
        "generation.gpu_memory_utilization=0.7",
    ]


def test_nothing_is_named_that_does_not_fit() -> None:
    load = stage("llama-3.1-70b", 1)
    assert smallest_change([load], memory_gib=1.0) is None


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        (
            "qwen3-30b-a3b",
            {"training": DTensorTraining(tensor_parallel_size=4)},
            "no tensor parallelism for experts",
        ),
        (
            "qwen2.5-7b",
            {"training": DTensorTraining(tensor_parallel_size=8)},
            "8 does not divide all of 28 heads, 4 key heads and the MLP's width 18944",
        ),
        (
            "qwen2.5-7b",
            {"generation": VllmGenerationConfig(tensor_parallel_size=8)},
            "generation.tensor_parallel_size: 8 does not divide all of 28 heads",
        ),
    ],
)
def test_a_layout_that_the_code_cannot_run_does_not_fit(
    name: str, options: dict[str, Any], words: str
) -> None:
    load = stage(name, 8, **options)
    assert words in str(layout_problem(load))
    assert not fits(load, memory_gib=1e6)


def test_untried_layouts_are_listed() -> None:
    assert untried(stage("qwen2.5-7b", 1, generation=VllmGenerationConfig())) == []
    many = stage("llama-3.1-70b", 64, generation=VllmGenerationConfig(tensor_parallel_size=8))
    assert [text.split(" (")[0] for text in untried(many)] == [
        "several ranks over NCCL",
        "several machines",
        "an engine over several GPUs",
    ]


def test_a_type_that_only_megatron_bridge_builds_fits_where_it_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load = stage("qwen2.5-7b", 8, training=MegatronTraining())
    load = replace(load, sizes=replace(load.sizes, model_type="mistral"))
    assert "megatron-bridge 0.3.1, which does, is not installed" in str(layout_problem(load))
    monkeypatch.setattr("nemo_rl_core.planning.load.bridge_version", lambda: "0.3.1")
    assert layout_problem(load) is None
    assert "models that megatron-bridge builds" in untried(load)
