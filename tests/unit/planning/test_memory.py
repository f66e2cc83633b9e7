"""GiB of a GPU: published models by hand, one H100 as it was measured, and torch's own counts."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl_core.config.generation import VllmGenerationConfig
from nemo_rl_core.config.training import DTensorTraining, LoRAConfig, MegatronTraining
from nemo_rl_core.functional.logprobs import rows_at_once
from nemo_rl_core.planning import memory
from nemo_rl_core.planning.memory import MemoryPlan, missing_cache, plan_memory
from tests.unit.planning.layouts import CONFIGS, stage

H100 = 79.0
REPOSITORY = Path(__file__).parents[3]
LATE = {"gradient_sync": "last_microbatch"}
RECOMPUTED = DTensorTraining(activation_checkpointing=True)


def planned(name: str, num_ranks: int = 1, **options: Any) -> MemoryPlan:
    return plan_memory(stage(name, num_ranks, **options), H100)


@pytest.mark.parametrize(
    ("name", "num_ranks", "training", "parts"),
    [
        # weights, gradients, moments, reference; gathered in 16 bits, their float32 gradients;
        # layer inputs of 8192 tokens, a chunk of logits (192 MiB). Over torch's fake process group.
        ("qwen2.5-7b", 8, {}, [3.5, 3.5, 7.1, 3.5, 2.9, 4.9, 1.5, 1.0]),
        ("llama-3.1-8b", 8, {}, [3.7, 3.7, 7.5, 3.7, 2.8, 4.7, 2.0, 1.0]),
        ("llama-3.1-8b", 16, {}, [1.9, 1.9, 3.7, 1.9, 2.8, 4.7, 2.0, 1.0]),
        ("llama-3.1-70b", 64, {}, [4.1, 4.1, 8.2, 4.1, 7.1, 11.0, 10.0, 1.0]),
        (
            "llama-3.1-70b",
            64,
            {"tensor_parallel_size": 8},
            [4.1, 4.1, 8.2, 4.1, 0.9, 1.4, 10.0, 0.24],
        ),
        ("qwen3-30b-a3b", 8, {}, [14.2, 14.2, 28.4, 14.2, 3.5, 4.6, 1.5, 1.0]),
        ("qwen3-30b-a3b", 64, {}, [1.8, 1.8, 3.6, 1.8, 3.5, 4.6, 1.5, 1.0]),
    ],
)
def test_published_models(
    name: str, num_ranks: int, training: dict[str, Any], parts: list[float]
) -> None:
    config = DTensorTraining(activation_checkpointing=True, **training)
    planned_parts = planned(name, num_ranks, training=config, has_reference=True).parts
    last = stage(name).sizes.hidden * 8 * 8192 / 2**30  # of the last norm
    got = [
        planned_parts["weights"],
        planned_parts["gradients"],
        planned_parts["moments"],
        planned_parts["reference"],
        planned_parts["gathered weights"],
        planned_parts["gathered gradients"],
        planned_parts["activations"] - last,
        planned_parts["logits"],
    ]
    assert got == pytest.approx(parts, abs=0.06)


@pytest.mark.parametrize(
    ("config", "dtype", "same_as"),
    [
        (DTensorTraining(), "bfloat16", "varlen"),
        (DTensorTraining(), "float32", "flex"),
        (DTensorTraining(context_parallel_size=2), "bfloat16", "sdpa"),
        (MegatronTraining(), "bfloat16", "varlen"),
        (MegatronTraining(), "float32", "sdpa"),
    ],
)
def test_auto_attention_keeps_the_memory_of_its_kernel(
    config: Any, dtype: str, same_as: str
) -> None:
    kernel = config.replace(attention=same_as)
    auto, explicit = (
        planned("qwen2.5-7b", 2, training=each, dtype=dtype).parts["activations"]
        for each in (config, kernel)
    )
    assert auto == explicit


def test_hybrid_shards_have_one_copy_per_machine() -> None:
    training = DTensorTraining(data_parallel_replicas=8, activation_checkpointing=True)
    planned_parts = planned("llama-3.1-70b", 64, training=training, has_reference=True).parts
    states = [planned_parts[name] for name in ("weights", "gradients", "moments", "reference")]
    assert states == pytest.approx([33, 33, 66, 33], abs=0.5)


@pytest.mark.parametrize(
    ("name", "gib"), [("qwen2.5-7b", 51), ("llama-3.1-8b", 52), ("llama-3.1-70b", 260)]
)
def test_activations_of_full_layers(name: str, gib: float) -> None:
    planned_parts = planned(name, 8, training=DTensorTraining(attention="sdpa")).parts[
        "activations"
    ]
    assert planned_parts == pytest.approx(gib, rel=0.02)


@pytest.mark.parametrize(
    ("training", "dtype", "gib"),
    [
        # docs/h100.md: peaks of torch's allocator, 8 x 1024 tokens.
        ({"activation_checkpointing": True}, "bfloat16", 24),
        ({}, "bfloat16", 49),
        ({"activation_checkpointing": True}, "float32", 26),
        ({"backend": "megatron", "activation_checkpointing": True}, "bfloat16", 32),
        ({"backend": "megatron", "activation_checkpointing": True}, "float32", 29),
    ],
)
def test_one_h100_as_measured(
    training: dict[str, Any], dtype: str, gib: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Logits of 1024 tokens were computed at once then, without a budget of bytes.
    monkeypatch.setattr(memory, "_LOGITS_BYTES", 2**40)
    kind = MegatronTraining if training.get("backend") == "megatron" else DTensorTraining
    config = kind.model_validate({**training, "attention": "sdpa"})
    planned_parts = planned("qwen2.5-1.5b", training=config, dtype=dtype, longest=1024)
    assert planned_parts.training - planned_parts.parts["contexts"] == pytest.approx(gib, rel=0.06)


def test_layouts_that_ran_out_of_memory_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_LOGITS_BYTES", 2**40)
    config = MegatronTraining(attention="sdpa")
    assert planned("qwen2.5-1.5b", training=config, longest=1024).training > 75


def test_several_microbatches_keep_gradients_with_activations() -> None:
    one = stage("qwen2.5-1.5b", longest=1024)
    assert one.training is not None
    # 8 of 1024 tokens fill the budget; the ninth begins another micro-batch.
    nine = replace(one, training=replace(one.training, num_sequences=9))
    grown = plan_memory(nine, H100).training - plan_memory(one, H100).training
    assert grown == pytest.approx(4 * one.sizes.num_parameters / 2**30, rel=1e-6)


def test_an_engine_reserves_its_share_and_caches_what_is_left() -> None:
    generation = VllmGenerationConfig(gpu_memory_utilization=0.5)
    load = stage("qwen2.5-7b", 8, training=RECOMPUTED, generation=generation)
    planned_parts = plan_memory(load, H100)
    engine = ("engine weights", "engine workspace", "KV cache")
    assert sum(planned_parts.parts[name] for name in engine) == pytest.approx(0.5 * H100)
    # 28 layers x 2 x 4 heads x 128 x 2 bytes = 57,344 a token.
    assert planned_parts.kv_tokens == pytest.approx(planned_parts.parts["KV cache"] * 2**30 / 57344)
    # What stays of the trainer, and three contexts; weights were sent before the cache woke.
    assert planned_parts.parts["transfer"] < planned_parts.parts["KV cache"]
    stays = planned_parts.parts["weights"] + planned_parts.parts["moments"] + 3
    assert planned_parts.sampling == pytest.approx(stays + 0.5 * H100)


def test_fp8_engine_has_one_byte_per_layer_weight() -> None:
    generation = VllmGenerationConfig(quantization="fp8_per_channel")
    planned_parts = planned("qwen2.5-7b", 8, training=RECOMPUTED, generation=generation)
    # Of 7,615,616,512 weights, embedding, head and the last norm stay in 16 bits.
    outer = 2 * 152064 * 3584 + 3584
    expected = (7_615_616_512 - outer + 2 * outer) / 2**30
    assert planned_parts.parts["engine weights"] == pytest.approx(expected, rel=1e-6)


def test_an_engine_over_two_gpus_has_half_of_weights_and_cache_on_each() -> None:
    one, two = (
        planned(
            "qwen2.5-7b",
            8,
            training=RECOMPUTED,
            generation=VllmGenerationConfig(tensor_parallel_size=size),
        )
        for size in (1, 2)
    )
    assert two.parts["engine weights"] == pytest.approx(one.parts["engine weights"] / 2)
    per_token = [plan.parts["KV cache"] / plan.kv_tokens for plan in (one, two)]
    assert per_token[1] == pytest.approx(per_token[0] / 2)


def test_an_engine_that_is_too_small_for_one_sequence_is_found() -> None:
    # 14.2 GiB of weights and 1.7 of workspace leave nothing of 0.2 x 79.
    generation = VllmGenerationConfig(gpu_memory_utilization=0.2)
    load = stage("qwen2.5-7b", 8, training=RECOMPUTED, generation=generation)
    assert missing_cache(load, plan_memory(load, H100))


def test_one_gpu_holds_few_buckets_while_weights_are_sent() -> None:
    generation = VllmGenerationConfig(gpu_memory_utilization=0.08)
    planned_parts = planned("qwen2.5-1.5b", training=RECOMPUTED, generation=generation)
    largest = 151936 * 1536 / 2**30
    # The embedding in 16 bits, gathered and sent; three buckets of the sender; the embedding where
    # it arrives, and where vLLM has it.
    assert planned_parts.parts["transfer"] == pytest.approx(
        largest * (2 + 2) + 3 / 4 + 2 * largest * 2
    )
    adapted = RECOMPUTED.replace(lora=LoRAConfig())  # merged in float32, and rounded
    planned_parts = planned("qwen2.5-1.5b", training=adapted, generation=generation)
    assert planned_parts.parts["transfer"] == pytest.approx(
        largest * (4 + 2) + 3 / 4 + 2 * largest * 2
    )
    planned_parts = planned("qwen2.5-1.5b", training=RECOMPUTED, generation=generation)
    # Of so small an engine, more than of keys and values, which wake afterwards.
    assert planned_parts.parts["transfer"] > planned_parts.parts["KV cache"]
    parts = ("weights", "moments", "contexts", "transfer", "engine weights", "engine workspace")
    assert planned_parts.sampling == pytest.approx(sum(planned_parts.parts[name] for name in parts))


def test_offloaded_state_is_not_on_the_gpu_while_sampling() -> None:
    generation = VllmGenerationConfig(gpu_memory_utilization=0.5)

    def plan(offload: str) -> MemoryPlan:
        training = DTensorTraining(activation_checkpointing=True, offload_for_generation=offload)
        return planned(
            "qwen2.5-7b", 8, training=training, generation=generation, has_reference=True
        )

    stays, optimizer, everything = plan("none"), plan("optimizer"), plan("all")
    parts = stays.parts
    assert (stays.host, optimizer.host) == (0, pytest.approx(parts["moments"]))
    assert optimizer.sampling == pytest.approx(stays.sampling - parts["moments"])
    assert optimizer.training == stays.training
    offloaded = parts["moments"] + parts["weights"] + parts["reference"]
    assert everything.host == pytest.approx(offloaded)
    # The weights are there until they were sent; then only the engine and three contexts are.
    assert everything.sampling == pytest.approx(0.5 * H100 + 3)
    assert everything.training == pytest.approx(stays.training - parts["reference"])


def test_megatron_has_no_gradients_while_it_samples() -> None:
    generation = VllmGenerationConfig(gpu_memory_utilization=0.5)
    megatron = MegatronTraining(tensor_parallel_size=2, activation_checkpointing=True)
    planned_parts = planned("qwen2.5-7b", 8, training=megatron, generation=generation)
    stays = planned_parts.parts["weights"] + planned_parts.parts["moments"] + 3
    assert planned_parts.sampling == pytest.approx(stays + 0.5 * H100)
    offloaded = planned(
        "qwen2.5-7b",
        8,
        training=megatron.replace(offload_for_generation="optimizer"),
        generation=generation,
    )
    # Of the weights, 2 bytes stay: the float32 copies are a part of the optimizer's state.
    moments_and_copies = planned_parts.parts["moments"] * 12 / 8
    assert offloaded.sampling == pytest.approx(planned_parts.sampling - moments_and_copies)
    assert offloaded.host == pytest.approx(moments_and_copies)


def test_adapters_leave_the_base_without_gradients_and_reference() -> None:
    training = DTensorTraining(lora=LoRAConfig(rank=64), activation_checkpointing=True)
    load = stage("llama-3.1-8b", training=training, has_reference=True)
    planned_parts = plan_memory(load, H100).parts
    # Of a layer: q and o 4096 + 4096, k and v 4096 + 1024, gate, up and down 4096 + 14336.
    adapters = 32 * 64 * (2 * 8192 + 2 * 5120 + 3 * 18432)
    assert planned_parts["moments"] == pytest.approx(8 * adapters / 2**30)
    assert planned_parts["gradients"] == pytest.approx(4 * adapters / 2**30)
    assert planned_parts["weights"] == pytest.approx(
        4 * (load.sizes.num_parameters + adapters) / 2**30
    )
    assert "reference" not in planned_parts


def test_a_base_of_four_bits_is_dequantized_layer_by_layer() -> None:
    training = DTensorTraining(
        lora=LoRAConfig(rank=64), weights="4bit", activation_checkpointing=True
    )
    planned_parts = plan_memory(stage("llama-3.1-8b", training=training), H100).parts
    # As above; the constants of 64 weights take a byte, and embedding and head stay in float32.
    linear = 32 * 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336)
    outer = 2 * 128256 * 4096
    adapters = 32 * 64 * (2 * 8192 + 2 * 5120 + 3 * 18432)
    expected = (0.52 * linear + 4 * (outer + adapters)) / 2**30
    assert planned_parts["weights"] == pytest.approx(expected, rel=1e-3)  # norms
    # The largest layer in float32 and bfloat16, and autocast's copies of embedding and head.
    expected = (6 * 4096 * 14336 + 2 * outer) / 2**30
    assert planned_parts["gathered weights"] == pytest.approx(expected, rel=1e-3)


def test_logits_are_those_of_the_rows_that_are_computed_at_once() -> None:
    for name, ranks in (("qwen2.5-7b", 1), ("qwen2.5-7b", 4), ("llama-3.1-8b", 1)):
        training = DTensorTraining(tensor_parallel_size=ranks)
        load = stage(name, 8, training=training)
        vocabulary = load.sizes.vocabulary // ranks
        rows = rows_at_once(vocabulary, torch.device("cuda"))
        planned_parts = plan_memory(load, H100).parts["logits"]
        assert planned_parts == pytest.approx(4 * 4 * rows * vocabulary / 2**30)


def test_adapters_are_those_that_peft_makes() -> None:
    from accelerate import init_empty_weights
    from peft import LoraConfig, inject_adapter_in_model
    from transformers import AutoConfig, AutoModelForCausalLM

    experts = ["experts.down_proj", "experts.gate_up_proj"]
    for name, targets in (
        ("qwen2.5-7b", "all-linear"),
        ("qwen2.5-7b", ["q_proj", "down_proj"]),
        ("qwen3-30b-a3b", ["q_proj", *experts]),
        ("qwen3-30b-a3b", ["q_proj", *experts[:1]]),
    ):
        config = json.loads(CONFIGS[name].read_text()) | {"num_hidden_layers": 2}
        is_list = isinstance(targets, list)
        weights = [each for each in targets if each in experts] if is_list else []
        layers = [each for each in targets if each not in experts] if is_list else targets
        with init_empty_weights():
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
            lora = LoraConfig(r=8, target_modules=layers, target_parameters=weights)
            inject_adapter_in_model(lora, model)
        made = sum(p.numel() for name, p in model.named_parameters() if ".lora_" in name)
        training = DTensorTraining(lora=LoRAConfig(rank=8, target_modules=targets))
        planned_parts = planned(name, training=training, num_hidden_layers=2).parts
        assert planned_parts["moments"] == pytest.approx(8 * made / 2**30)


def test_offloaded_weights_are_not_on_the_gpu() -> None:
    training = DTensorTraining(cpu_offload=True, activation_checkpointing=True)
    planned_parts = planned("qwen2.5-7b", training=training).parts
    assert "weights" not in planned_parts
    assert "moments" not in planned_parts
    assert planned_parts["gathered weights"] > 2.8


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("num_ranks", "cases"),
    [
        (
            8,
            [
                ("qwen2.5-7b", 6, 8192, {}),
                ("qwen2.5-7b", 6, 8192, {"activation_checkpointing": True}),
                ("qwen2.5-7b", 6, 8192, {"gradient_sync": "every_microbatch"}),
                ("qwen2.5-7b", 6, 8192, LATE),
                ("qwen2.5-7b", 6, 8192, {"activation_checkpointing": True, **LATE}),
                ("llama-3.1-8b", 12, 4096, {}),
                ("llama-3.1-8b", 12, 4096, LATE),
                ("qwen3-30b-a3b", 2, 0, {}),
            ],
        ),
        (
            64,
            [
                ("llama-3.1-70b", 80, 0, {}),
                ("llama-3.1-70b", 80, 0, {"tensor_parallel_size": 8}),
                ("llama-3.1-70b", 80, 0, {"data_parallel_replicas": 8}),
                ("qwen2.5-7b", 28, 0, {"tensor_parallel_size": 4, "context_parallel_size": 2}),
                ("qwen3-30b-a3b", 48, 0, {}),
            ],
        ),
    ],
)
def test_torch_counts_the_same_over_its_fake_process_group(
    num_ranks: int, cases: list[tuple[str, int, int, dict[str, Any]]]
) -> None:
    """Shards of rank 0, and the peak of passes by FSDP2's memory tracker.

    Cases that say when gradients are exchanged have three micro-batches.
    """
    assert_counted(num_ranks, cases, within=0.04)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao: `make test-float8`")
def test_torch_counts_about_the_same_in_float8() -> None:
    cases: list[tuple[str, int, int, dict[str, Any]]] = [
        ("qwen2.5-7b", 6, 8192, {"float8": "rowwise"}),
        ("qwen2.5-7b", 6, 8192, {"float8": "tensorwise"}),
        ("qwen2.5-7b", 6, 8192, {"float8": "rowwise", "activation_checkpointing": True}),
    ]
    assert_counted(8, cases, within=0.05)


def assert_counted(
    num_ranks: int, cases: list[tuple[str, int, int, dict[str, Any]]], *, within: float
) -> None:
    requests = [
        {
            "config": str(CONFIGS[name]),
            "layers": layers,
            "tokens": tokens,
            "training": training,
            "microbatches": 3 if "gradient_sync" in training else 1,
        }
        for name, layers, tokens, training in cases
    ]
    script = Path(__file__).parent / "torch_counts.py"
    done = subprocess.run(
        [sys.executable, script, str(num_ranks), json.dumps(requests)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *sys.path])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    counts = json.loads(done.stdout.splitlines()[-1])
    for case, count in zip(requests, counts, strict=True):
        tokens = case["tokens"]
        planned_parts = planned(
            Path(case["config"]).stem,
            num_ranks,
            training=DTensorTraining(**case["training"]),
            tokens=tokens or 8192,
            microbatches=case["microbatches"],
            num_hidden_layers=case["layers"],
        )
        assert planned_parts.parts["weights"] == pytest.approx(count["weights"], rel=0.01)
        if tokens:
            moments = (
                planned_parts.parts["moments"] + planned_parts.parts["contexts"]
            )  # neither is tracked
            assert planned_parts.training - moments == pytest.approx(count["peak"], rel=within)
