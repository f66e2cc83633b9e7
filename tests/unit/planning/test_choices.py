"""Choices of the plan for `auto` settings."""

from dataclasses import replace
from typing import Any

import pytest

from nemo_rl_core.config.cluster import ClusterConfig
from nemo_rl_core.config.training import (
    DTensorTraining,
    LoRAConfig,
    MegatronTraining,
    open_choices,
    without_plan,
)
from nemo_rl_core.planning.choices import HEADROOM, chosen, fits, resolved
from nemo_rl_core.planning.load import StageLoad
from nemo_rl_core.planning.memory import plan_memory
from tests.unit.planning.layouts import stage

H100 = 79.0
NAMES = ("activation_checkpointing", "gradient_sync", "data_parallel_replicas")


def values_of(load: StageLoad, memory_gib: float | None = H100) -> tuple[Any, ...]:
    result = chosen(load, memory_gib).training
    assert result is not None
    return tuple(getattr(result.config, name, None) for name in NAMES)


@pytest.mark.parametrize(
    ("name", "num_ranks", "tokens", "found"),
    [
        # 48 GiB of activations fit with 17.7 of states, but not with 28.4 of full gradients too.
        ("qwen2.5-7b", 8, 8192, (False, "every_microbatch", 1)),
        # Half as many activations again do not; recomputed, full gradients fit with them.
        ("qwen2.5-7b", 8, 12288, (True, "last_microbatch", 1)),
        # One rank: nothing is sent.
        ("qwen2.5-1.5b", 1, 2048, (False, "every_microbatch", 1)),
        # A quarter of the activations, and gradients of 1.5 B: all fit.
        ("qwen2.5-1.5b", 8, 2048, (False, "last_microbatch", 1)),
        # 70 B: full gradients are 263 GiB.
        ("llama-3.1-70b", 64, 8192, (True, "every_microbatch", 1)),
        # 8 B on two machines: a copy each, of 18.7 GiB a GPU.
        ("llama-3.1-8b", 16, 7168, (False, "every_microbatch", 2)),
        ("llama-3.1-8b", 16, 12288, (True, "last_microbatch", 2)),
    ],
)
def test_the_fastest_that_fits_is_chosen(
    name: str, num_ranks: int, tokens: int, found: tuple[Any, ...]
) -> None:
    load = stage(name, num_ranks, tokens=tokens, has_reference=True, microbatches=8)
    assert values_of(load) == found
    assert fits(load, H100)
    after = plan_memory(chosen(load, H100), H100)
    assert after.peak <= HEADROOM * H100


def test_fastest_choice_that_fits_is_made() -> None:
    load = stage("qwen2.5-7b", 8, tokens=12288, has_reference=True, microbatches=8)
    assert load.training is not None
    faster = load.training.config.replace(activation_checkpointing=False)
    assert not fits(replace(load, training=replace(load.training, config=faster)), H100)


def test_one_copy_per_machine_needs_full_machines_with_enough_memory() -> None:
    load = stage("llama-3.1-8b", 16, microbatches=8)
    assert values_of(load)[2] == 2
    uneven = replace(load, cluster=ClusterConfig(shape="cluster", num_workers=12))
    assert values_of(uneven)[2] == 1
    # Eight GPUs of 24 GiB do not hold a copy: 14.9 GiB of states and 6.7 of activations.
    assert values_of(load, 23.5)[2] == 1
    by_hand = DTensorTraining(data_parallel_replicas=4)
    assert load.training is not None
    values = replace(load, training=replace(load.training, config=by_hand))
    assert values_of(values)[2] == 4


def test_explicit_settings_are_kept() -> None:
    config = DTensorTraining(activation_checkpointing=False, gradient_sync="every_microbatch")
    load = stage("llama-3.1-70b", 64, training=config, microbatches=8)
    assert values_of(load) == (False, "every_microbatch", 1)
    assert not fits(load, H100)


def test_full_gradients_are_only_summed_in_float32() -> None:
    config = DTensorTraining(reduce_dtype="bfloat16")
    assert values_of(stage("qwen2.5-1.5b", 8, tokens=2048, training=config, microbatches=8))[1] == (
        "every_microbatch"
    )


def test_gradients_of_adapters_are_small() -> None:
    config = DTensorTraining(lora=LoRAConfig())
    load = stage("llama-3.1-70b", 64, training=config, microbatches=8)
    assert values_of(load)[1] == "last_microbatch"


def test_megatron_recomputes_what_does_not_fit() -> None:
    config = MegatronTraining(tensor_parallel_size=8, attention="sdpa")
    load = stage("llama-3.1-70b", 64, training=config, microbatches=8)
    assert values_of(load)[0] is True
    small = stage("qwen2.5-1.5b", 1, tokens=1024, training=MegatronTraining(), microbatches=8)
    assert values_of(small)[:2] == (False, None)


def test_cpus_have_plain_values_and_the_same_config_as_before() -> None:
    laptop = replace(stage("llama-3.1-70b", 2), cluster=ClusterConfig(num_workers=2))
    assert values_of(laptop) == values_of(laptop, None) == (False, "every_microbatch", 1)
    assert open_choices(without_plan(DTensorTraining())) == []
    assert not DTensorTraining().recomputes
    assert DTensorTraining().num_copies == 1


def test_choices_have_the_words_of_a_recipe() -> None:
    before = DTensorTraining(gradient_sync="every_microbatch")
    after = before.replace(activation_checkpointing=True, data_parallel_replicas=2)
    assert resolved(before, after) == {
        "training.data_parallel_replicas": "2",
        "training.activation_checkpointing": "true",
    }


def test_full_gradients_count_with_several_microbatches() -> None:
    config = DTensorTraining(gradient_sync="last_microbatch", activation_checkpointing=True)
    every = config.replace(gradient_sync="every_microbatch")
    one = stage("qwen2.5-7b", 8, training=config)
    assert "whole gradients" not in plan_memory(one, H100).parts
    late, early = (
        plan_memory(stage("qwen2.5-7b", 8, training=each, microbatches=8), H100)
        for each in (config, every)
    )
    full = 4 * one.sizes.num_parameters / 2**30
    assert late.parts["whole gradients"] == pytest.approx(full)
    # They exist together with activations, instead of the shards' sums.
    grown = late.training - early.training
    assert full - early.parts["gradients"] - 0.1 < grown < full + late.parts["activations"]
