"""Megatron's cached generation, compared with its plain forward pass and transformers' tokens."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from nemo_rl_core.backends.generation.base import GenerationSetup, get_generation_backend
from nemo_rl_core.config.generation import HuggingFaceGenerationConfig, MegatronGenerationConfig
from nemo_rl_core.data.pretrained import load_tokenizer
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.distributed.local_ranks import run_ranks

# 49 tokens: not a multiple of two tensor ranks. Two query groups of two heads.
SHAPE: dict[str, Any] = {
    "vocab_size": 49,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2}
MODELS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SHAPE, tie_word_embeddings=False),
    "qwen2": Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=True),
    "qwen3_moe": Qwen3MoeConfig(
        **SHAPE,
        **EXPERTS,
        head_dim=16,
        num_experts=4,
        moe_intermediate_size=16,
        mlp_only_layers=[1],
    ),
    "mixtral": MixtralConfig(**SHAPE, **EXPERTS, num_local_experts=4, sliding_window=None),
}
TENSOR, PIPELINE = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}
# Ranks that a layout does not use are other engines, which do the same.
PLAN: list[tuple[str, dict[str, int]]] = [
    *((name, {}) for name in MODELS),
    *((name, TENSOR) for name in ("llama", "qwen2", "qwen3")),
    *((name, PIPELINE) for name in ("llama", "qwen3", "qwen3_moe")),
]
PROMPTS = [[5, 6, 7, 8, 11, 2, 30], [9], [4, 4], [5, 6, 7, 8, 11, 2, 30], [3, 48, 3]]
FORCED = torch.randint(0, 49, (len(PROMPTS), 6), generator=torch.Generator().manual_seed(3))


def batch_of(rows: list[int]) -> BatchedDataDict:
    prompts = [PROMPTS[row] for row in rows]
    width = max(map(len, prompts))
    return BatchedDataDict(
        {
            "input_ids": torch.tensor([ids + [0] * (width - len(ids)) for ids in prompts]),
            "input_lengths": torch.tensor([len(ids) for ids in prompts]),
            "seeds": torch.tensor(rows) + 40,
            "max_new_tokens": torch.tensor([8, 8, 3, 5, 8])[rows],
        }
    )


EVERY = list(range(len(PROMPTS)))


def started(folder: Path, config: Any) -> Any:
    backend = get_generation_backend(config.backend)()
    backend.setup(
        GenerationSetup(model_folder=folder, config=config, max_model_len=32, stop_token_ids=(1,))
    )
    return backend


def sequences(backend: Any, rows: list[int], *, greedy: bool) -> list[list[int]]:
    output = backend.generate(batch_of(rows), greedy=greedy)
    lengths = output["unpadded_sequence_lengths"].tolist()
    return [ids[:end].tolist() for ids, end in zip(output["output_ids"], lengths, strict=True)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    for name, config in MODELS.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if "norm" in parameter_name or parameter_name.endswith("bias"):
                    parameter.add_(torch.rand_like(parameter))
        model.save_pretrained(root / name)
        load_tokenizer(tiny_model).save_pretrained(root / name)
    return {name: root / name for name in MODELS}


def cached_logits(backend: Any, **options: int) -> torch.Tensor:
    """Returns `[steps, B, V]` along the forced tokens; two rows are dropped after the third."""
    from nemo_rl_core.backends.decoding.requests import padded_on_the_left
    from nemo_rl_core.backends.training.megatron.kv_cache import KeyValueCache

    ids, mask = padded_on_the_left(PROMPTS)
    padding, num_slots = (mask == 0).sum(dim=1), 7 + FORCED.shape[1]
    cache = KeyValueCache(backend._models[0], padding, num_slots, **options)
    steps = [backend._next_logits(cache, ids)]
    rows = torch.arange(len(PROMPTS))
    for step, tokens in enumerate(FORCED.T):
        if step == 3:
            rows = torch.tensor([4, 1, 2])  # in a different order, too
            cache.select(rows)
        logits = torch.zeros_like(steps[0])
        logits[rows] = backend._next_logits(cache, tokens[rows, None])
        steps.append(logits)
    return torch.stack(steps)


def plain_logits(backend: Any) -> torch.Tensor | None:
    """Returns the same logits on the last stage, else None: each row in one training-style pass."""
    from nemo_rl_core.backends.training.megatron.parts import MegatronMicrobatch, make_parts
    from nemo_rl_core.backends.training.megatron.step import run_parts

    def consume(hidden: torch.Tensor, part: MegatronMicrobatch) -> tuple[torch.Tensor, Any]:
        last = part.batch["input_lengths"] - 1
        return hidden.new_zeros(()), backend._logits(hidden[last])

    config, steps = backend._models[0].config, []
    for step in range(FORCED.shape[1] + 1):
        rows = []
        for prompt, forced in zip(PROMPTS, FORCED.tolist(), strict=True):
            ids = torch.tensor([prompt + forced[:step]])
            row = BatchedDataDict({"input_ids": ids, "input_lengths": torch.tensor([ids.shape[1]])})
            parts = make_parts(row, config, max_tokens=32, device=ids.device)
            rows += run_parts(backend._models, parts, consume, forward_only=True)
        steps.append(rows)
    return torch.stack([torch.cat(rows) for rows in steps]) if steps[0] else None


@pytest.mark.thorough
def test_cached_logits_and_tokens_match_at_every_layout(folders: dict[str, Path]) -> None:
    def compare(name: str, layout: dict[str, int]) -> dict[str, Any]:
        words = {"max_new_tokens": 8, "temperature": 0.8}
        backend = started(folders[name], MegatronGenerationConfig(**words, **layout))
        reference = started(folders[name], HuggingFaceGenerationConfig(**words))
        return {
            "cached": cached_logits(backend),
            # Enough for the scores of two prompts, and of one on each of two tensor ranks.
            "in parts": cached_logits(backend, most_scores=2 * 4 * 7 * 7),
            "plain": plain_logits(backend),
            "greedy": [sequences(one, EVERY, greedy=True) for one in (backend, reference)],
            "sampled": [sequences(one, EVERY, greedy=False) for one in (backend, reference)],
            "separate": [sequences(backend, [row], greedy=False)[0] for row in EVERY],
        }

    def compare_all() -> list[dict[str, Any]]:
        return [compare(name, layout) for name, layout in PLAN]

    ranks = run_ranks(compare_all, world_size=2)
    for (name, layout), *actual in zip(PLAN, *ranks, strict=True):
        plain = actual[-1]["plain"]
        plain[4:, [0, 3]] = 0.0
        largest = plain.abs().max()
        assert largest > 1, name
        for rank in actual:
            for way in ("cached", "in parts"):
                error = ((rank[way] - plain).abs().max() / largest).item()
                assert error < 1e-5, (name, layout, way, error)
            for kind in ("greedy", "sampled"):
                cached, expected = rank[kind]
                assert cached == expected, (name, layout, kind)
            assert rank["separate"] == rank["sampled"][0], (name, layout)


@pytest.fixture(scope="module")
def engine(folders: dict[str, Path]) -> Iterator[Any]:
    backend = started(folders["qwen3"], MegatronGenerationConfig(max_new_tokens=8))
    yield backend
    backend.shutdown()


def test_prompts_are_computed_once_then_one_token_per_running_row(engine: Any) -> None:
    seen = []

    def count(_: Any, __: Any, inputs: dict[str, Any]) -> None:
        seen.append(tuple(inputs["hidden_states"].shape[:2]))

    hook = engine._models[0].decoder.register_forward_pre_hook(count, with_kwargs=True)
    output = engine.generate(batch_of(EVERY), greedy=False)
    hook.remove()
    lengths = output["generation_lengths"]
    # Rows end at three different steps at least, at their limits.
    assert len(set(lengths.tolist())) >= 3
    running = [int((lengths > step).sum()) for step in range(1, int(lengths.max()))]
    # Two of the five prompts are equal; the longest has seven tokens.
    assert seen == [(7, 4), *((1, rows) for rows in running)]


def test_cache_is_not_reused_after_new_weights(
    engine: Any, folders: dict[str, Path], tmp_path: Path
) -> None:
    before = engine.generate(batch_of(EVERY), greedy=True)
    other = AutoModelForCausalLM.from_pretrained(folders["qwen3"], dtype=torch.float32)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.manual_seed(0)) * 0.1)
    other.save_pretrained(tmp_path)
    engine.load_weights(tmp_path)
    after = engine.generate(batch_of(EVERY), greedy=True)
    engine.load_weights(folders["qwen3"])
    assert not torch.equal(after["logprobs"], before["logprobs"])
    load_tokenizer(folders["qwen3"]).save_pretrained(tmp_path)
    fresh = started(tmp_path, MegatronGenerationConfig(max_new_tokens=8))
    expected = fresh.generate(batch_of(EVERY), greedy=True)
    assert torch.equal(after["output_ids"], expected["output_ids"])
    assert torch.equal(after["logprobs"], expected["logprobs"])
