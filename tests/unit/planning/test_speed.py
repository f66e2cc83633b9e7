"""Estimated speeds, compared with one H100, and the transports that the code chooses."""

import json
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from nemo_rl_core.config.cluster import AcceleratorName
from nemo_rl_core.config.generation import OwnPlacement, VllmGenerationConfig
from nemo_rl_core.config.training import DTensorTraining, MegatronTraining
from nemo_rl_core.planning.accelerators import (
    ACCELERATORS,
    Accelerator,
    accelerator,
    accelerator_of_device,
)
from nemo_rl_core.planning.load import routes_of, transport_of, untried
from nemo_rl_core.planning.memory import plan_memory
from nemo_rl_core.planning.speed import SpeedPlan, plan_speed
from nemo_rl_core.telemetry.cost import peak_flops
from tests.unit.planning.layouts import CONFIGS, stage

H100 = ACCELERATORS["nvidia-h100"]


def planned(name: str, num_ranks: int = 1, *, gpu: Accelerator = H100, **options: Any) -> SpeedPlan:
    load = stage(name, num_ranks, **options)
    plan = plan_speed(load, plan_memory(load, gpu.memory_gib), gpu)
    assert plan is not None
    return plan


@pytest.mark.parametrize(
    ("training", "options", "tokens_per_second"),
    [
        # docs/h100.md, deterministic kernels where they are the default.
        ({"activation_checkpointing": True}, {"longest": 1024}, 20_800),
        ({"attention": "sdpa"}, {"longest": 1024}, 24_300),
        ({"activation_checkpointing": True}, {"longest": 8192}, 16_800),
        ({"activation_checkpointing": True}, {"longest": 1024, "dtype": "float32"}, 3_500),
        (
            {"backend": "megatron", "activation_checkpointing": True, "attention": "sdpa"},
            {"longest": 1024},
            15_100,
        ),
    ],
)
def test_trained_tokens_of_one_h100(
    training: dict[str, Any], options: dict[str, Any], tokens_per_second: float
) -> None:
    kind = MegatronTraining if training.get("backend") == "megatron" else DTensorTraining
    plan = planned("qwen2.5-1.5b", training=kind.model_validate(training), **options)
    assert plan.trained == pytest.approx(tokens_per_second, rel=0.11)


@pytest.mark.parametrize(
    ("training", "bytes_of_links"),
    [
        # A weight in 16 bits twice and its gradient in float32, to 15 of 16 ranks, at 60 % of the
        # 400 GB/s that the eight ports of a machine have.
        ({"gradient_sync": "every_microbatch"}, 8 * 15 / 16 / 240),
        # The gradient in one of eight micro-batches.
        ({"gradient_sync": "last_microbatch"}, 4.5 * 15 / 16 / 240),
        # Within a machine at 60 % of 450 GB/s; then the sums of two copies, once, each rank its
        # eighth over its own port at 60 % of 50 GB/s.
        (
            {"data_parallel_replicas": 2, "gradient_sync": "every_microbatch"},
            8 * 7 / 8 / 270 + 4 / 8 / 30 / 8,
        ),
    ],
)
def test_communication_bounds_small_microbatches(
    training: dict[str, Any], bytes_of_links: float
) -> None:
    options: dict[str, Any] = {"tokens": 512, "microbatches": 8}
    config = DTensorTraining(activation_checkpointing=False, **training)
    plan = planned("qwen2.5-7b", 16, training=config, **options)
    sizes = stage("qwen2.5-7b").sizes
    seconds = bytes_of_links * sizes.num_parameters / 1e9
    assert plan.trained is not None
    # But for the optimizer's own update.
    assert 16 * 512 / plan.trained == pytest.approx(seconds, rel=0.05)


def test_tensor_ranks_share_the_ports_of_their_machine() -> None:
    # Each of four tensor ranks gathers its quarter over a separate ring, two ports of 50 GB/s.
    options: dict[str, Any] = {"tokens": 512, "microbatches": 8}
    config = DTensorTraining(
        activation_checkpointing=False,
        tensor_parallel_size=4,
        gradient_sync="every_microbatch",
    )
    plan = planned("qwen2.5-7b", 16, training=config, **options)
    assert plan.trained is not None
    sent = 8 * stage("qwen2.5-7b").sizes.num_parameters / 4 * 3 / 4
    seconds = sent / (2 * 50e9 * 0.6)
    assert 4 * 512 / plan.trained == pytest.approx(seconds, rel=0.05)


@pytest.mark.parametrize("microbatches", [1, 8])
def test_megatron_exchanges_once_a_step_what_fsdp_gathers_for_every_microbatch(
    microbatches: int,
) -> None:
    slow = replace(H100, link_gb_per_second=1)
    options: dict[str, Any] = {"tokens": 512, "microbatches": microbatches, "gpu": slow}
    plan = planned("qwen2.5-7b", 2, training=MegatronTraining(), **options)
    assert plan.trained is not None
    # A weight in 16 bits and its gradient in float32, to the one other rank.
    seconds = 6 * stage("qwen2.5-7b").sizes.num_parameters / 2 / 0.6e9 / microbatches
    assert 2 * 512 / plan.trained == pytest.approx(seconds, rel=0.03)  # and an update


def test_a_stage_of_a_pipeline_sums_the_activations_of_its_own_layers() -> None:
    slow = replace(H100, link_gb_per_second=0.1)
    results = []
    for stages in (1, 2):
        config = MegatronTraining(tensor_parallel_size=2, pipeline_parallel_size=stages)
        options: dict[str, Any] = {"training": config, "gpu": slow, "microbatches": 64}
        results.append(planned("qwen2.5-7b", 2 * stages, **options).trained)
    full, halved = results
    assert full is not None
    assert halved is not None
    # Half of the layers' sums a rank, which take nearly all of its time.
    assert halved / full == pytest.approx(2, rel=0.05)


def test_ranks_of_a_pipeline_wait_for_its_first_microbatch() -> None:
    fast = replace(H100, link_gb_per_second=1e6)
    results = []
    for stages in (1, 4):
        config = MegatronTraining(pipeline_parallel_size=stages)
        options: dict[str, Any] = {"training": config, "gpu": fast, "longest": 8192}
        results.append(planned("qwen2.5-7b", 4, **options).trained)
    full, divided = results
    assert full is not None
    assert divided is not None
    # Four micro-batches through four stages take the time of seven; updates are a little quicker.
    assert full / divided == pytest.approx(7 / 4, rel=0.05)


def test_narrow_experts_are_slower_than_wide_ones() -> None:
    one_of_16 = {"moe_intermediate_size": 6144, "num_experts": 16, "num_experts_per_tok": 1}
    wide, narrow = (planned("qwen3-30b-a3b", microbatches=16, **changes).trained
                    for changes in (one_of_16, {}))  # fmt: skip
    assert wide is not None
    assert narrow is not None
    # As many weights in all, and active ones: in one expert of 6144 or eight of 768, of 4500.
    assert 2 < wide / narrow < 4500 / 768


def test_dedicated_engines_count_and_do_not_use_trainer_memory() -> None:
    sampling = {"tensor_parallel_size": 2, "gpu_memory_utilization": 0.9}
    colocated = VllmGenerationConfig.model_validate({**sampling, "num_engines": 2})
    dedicated = VllmGenerationConfig.model_validate({**sampling, "placement": {"own": 4}})
    loads = [stage("qwen2.5-1.5b", 6, generation=each) for each in (colocated, dedicated)]
    assert [load.num_gpus for load in loads] == [6, 10]
    assert [load.machines for load in loads] == [[6], [8, 2]]
    assert [transport_of(load) for load in loads] == ["cuda_ipc", "nccl"]
    shared, apart = (plan_memory(load, H100.memory_gib) for load in loads)
    awake = sum(apart.parts[name] for name in ("engine weights", "engine workspace", "KV cache"))
    assert awake == pytest.approx(0.9 * H100.memory_gib)
    # Contexts of an engine; the embedding where it arrives, and where vLLM has it.
    assert apart.sampling == pytest.approx(awake + 2 + 2 * 151936 * 1536 * 2 / 2**30)
    assert shared.sampling - apart.sampling > 1  # what the trainer holds meanwhile
    assert shared.training - apart.training == pytest.approx(2)
    assert "engines on dedicated GPUs" in " ".join(untried(loads[1]))


def test_rollouts_and_logprobs_of_one_h100() -> None:
    # 256 prompts of 128 tokens with 512 new ones: 131,000 tokens in 7.7 to 8.9 s, and logprobs of
    # 164,000 tokens in 1.8 to 1.9 s.
    training = DTensorTraining(activation_checkpointing=True, attention="sdpa")
    load = stage("qwen2.5-1.5b", training=training, longest=640, generation=VllmGenerationConfig())
    assert load.sampling is not None
    assert load.training is not None
    load = replace(
        load,
        training=replace(load.training, num_scorings=1),
        prompt_tokens=128,
        completion_tokens=512,
        sampling=replace(load.sampling, num_sequences=256),
    )
    plan = plan_speed(load, plan_memory(load, 79.0), H100)
    assert plan is not None
    assert plan.sampled == pytest.approx(16_000, rel=0.1)
    assert plan.scored == pytest.approx(88_000, rel=0.1)


def test_planned_mfu_uses_the_formula_of_measured_runs() -> None:
    load = stage("qwen2.5-1.5b", training=DTensorTraining(activation_checkpointing=True))
    plan = planned("qwen2.5-1.5b", training=DTensorTraining(activation_checkpointing=True))
    flops = load.sizes.flops.flops("training", [8192]) / 8192
    assert plan.trained is not None
    assert plan.utilization == pytest.approx(plan.trained * flops / 989e12)


def test_recomputation_and_slow_links_lower_the_speed() -> None:
    plain, recomputed = (
        planned("qwen2.5-7b", 8, training=DTensorTraining(activation_checkpointing=on))
        for on in (False, True)
    )
    assert plain.trained is not None
    assert recomputed.trained is not None
    assert 0.7 < recomputed.trained / plain.trained < 0.85
    slow = planned("qwen2.5-7b", 8, gpu=ACCELERATORS["nvidia-l40s"])
    # 8 bytes a weight and 7/8 of a ring over 32 GB/s of PCIe, of which 60 % are had.
    seconds = 8 * 7.6156e9 * 7 / 8 / (32e9 * 0.6)
    assert slow.trained == pytest.approx(8 * 8192 / seconds, rel=0.03)  # and an update


@pytest.mark.parametrize(
    ("num_ranks", "engines", "ranks"), [(1, 1, 1), (8, 8, 1), (8, 1, 1), (8, 2, 4), (64, 8, 8)]
)
def test_ranks_send_as_the_code_chooses(num_ranks: int, engines: int, ranks: int) -> None:
    generation = VllmGenerationConfig(num_engines=engines, tensor_parallel_size=ranks)
    load = stage("llama-3.1-70b", num_ranks, generation=generation)
    result = [(each.sender, each.receivers, each.transport) for each in routes_of(load)]
    assert result == [(rank, (rank,), "cuda_ipc") for rank in range(engines * ranks)]


def test_dedicated_engines_receive_from_one_rank() -> None:
    dedicated = VllmGenerationConfig(tensor_parallel_size=4, placement=OwnPlacement(own=16))
    (route,) = routes_of(stage("llama-3.1-70b", 12, generation=dedicated))
    assert (route.sender, route.receivers, route.transport) == (0, tuple(range(16)), "nccl")


@pytest.mark.parametrize(
    ("name", "num_ranks", "generation", "seconds", "goal"),
    [
        # Gathered in bfloat16 over NVLink (15.2 GB x 7/8 / 270 GB/s and 339 x 0.3 ms), 18 passes of
        # 15.2 GB at 0.54 x 3350 GB/s, 339 tensors of 1 ms, and 1.2 s.
        ("qwen2.5-7b", 8, {"num_engines": 8}, 0.049 + 0.102 + 0.151 + 0.339 + 1.2, 2.0),
        # 141 GB x 63/64 over eight ports a machine, 240 GB/s; 141 GB; 723 tensors.
        (
            "llama-3.1-70b",
            64,
            {"num_engines": 8, "tensor_parallel_size": 8},
            0.579 + 0.217 + 1.404 + 0.723 + 1.2,
            10.0,
        ),
        # The same to 64 dedicated GPUs: through one port of 50 GB/s, of which 60 % are reached.
        (
            "llama-3.1-70b",
            64,
            {"placement": {"own": 64}, "tensor_parallel_size": 8},
            0.579 + 0.217 + 1.404 + 0.723 + 1.2 + 4.704,
            10.0,
        ),
    ],
)
def test_seconds_of_a_transfer(
    name: str, num_ranks: int, generation: dict[str, Any], seconds: float, goal: float
) -> None:
    config = VllmGenerationConfig.model_validate(generation)
    plan = planned(name, num_ranks, generation=config).transfer
    assert plan is not None
    assert plan.seconds == pytest.approx(seconds, rel=0.005)
    assert plan.goal_seconds == pytest.approx(goal, rel=0.02)
    assert plan.least_seconds < plan.goal_seconds


def test_a_transfer_on_one_gpu_as_measured() -> None:
    # 3.2 GB took 5.5 to 6.1 s with loading, of which 3.6 to 4.0 were the transport's. That takes
    # 0.17 s since, and fewer passes of the checksum. The engine copied its embedding and the sent
    # one to the host and compared them there: 0.93 GB, of which the transport copied 6.4 GB in 3.4
    # s at the least, 0.4 s of them checksums.
    plan = planned("qwen2.5-1.5b", generation=VllmGenerationConfig()).transfer
    assert plan is not None
    copied = 2 * 151936 * 1536 * 2
    assert plan.seconds == pytest.approx(5.8 - 3.8 - copied / 6.4e9 * (3.4 - 0.4), rel=0.06)


def test_tensors_are_those_of_the_class_of_transformers() -> None:
    for name, config in CONFIGS.items():
        described = AutoConfig.for_model(**json.loads(config.read_text()))
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(described)
        published = revert_weight_conversion(model, model.state_dict())
        tied = described.tie_word_embeddings
        assert stage(name).sizes.num_tensors == len(published) - tied, name


@pytest.mark.parametrize(
    ("line", "name", "gib"),
    [
        ("NVIDIA H100 80GB HBM3, 81559", "nvidia-h100", 79.1),
        ("NVIDIA H200, 143771", "nvidia-h200", 139.9),
        ("NVIDIA A100-SXM4-40GB, 40960", "nvidia-tesla-a100", 39.5),
        ("NVIDIA A100-SXM4-80GB, 81920", "nvidia-a100-80gb", 79.5),
        ("NVIDIA L40S, 46068", "nvidia-l40s", 44.5),
        ("NVIDIA L4, 23034", "nvidia-l4", 22.0),
        ("NVIDIA A10G, 23028", "nvidia-a10g", 22.0),
        ("NVIDIA GeForce RTX 4090, 24564", "nvidia-rtx-4090", 23.5),
        ("Tesla T4, 15360", "nvidia-tesla-t4", 14.5),
        ("NVIDIA B200, 183359", "nvidia-b200", 178.6),
    ],
)
def test_gpu_is_identified_by_its_driver_name(line: str, name: str, gib: float) -> None:
    gpu = accelerator_of_device(line)
    assert gpu is not None
    assert gpu.name == name
    assert gpu.memory_gib == pytest.approx(gib, abs=0.1)
    assert gpu.memory_gib == pytest.approx(ACCELERATORS[name].memory_gib, abs=1.0)


def test_another_gpu_is_unknown() -> None:
    assert accelerator_of_device("AMD Instinct MI300X, 196608") is None
    assert accelerator_of_device("") is None
    with pytest.raises(Exception, match="there is no accelerator 'nvidia-h1000'") as refused:
        accelerator("nvidia-h1000")
    assert "nvidia-h100" in str(refused.value)


def test_every_kind_that_a_recipe_may_name_is_in_the_table() -> None:
    assert set(get_args(AcceleratorName)) <= set(ACCELERATORS)
    # The part of the name finds that device's peak, and none of another.
    assert {name for name, each in ACCELERATORS.items() if each.flops("bfloat16") is None} == {
        "nvidia-tesla-t4"
    }
    assert ACCELERATORS["nvidia-l4"].flops("bfloat16") == peak_flops("NVIDIA L4", "bfloat16")
    assert ACCELERATORS["nvidia-l40s"].flops("bfloat16") == 362e12
