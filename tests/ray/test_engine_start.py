"""An engine that starts without weights computes the same as one that read them at start."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3MoeConfig,
)

from nemo_rl_core.backends.generation import vllm as backend_module
from nemo_rl_core.backends.generation.base import GenerationSetup
from nemo_rl_core.backends.generation.vllm import VllmBackend
from nemo_rl_core.backends.generation.vllm_loader import zeros_format
from nemo_rl_core.checkpoints.weight_files import stored_tensors
from nemo_rl_core.config.generation import VllmGenerationConfig
from nemo_rl_core.data.pretrained import load_tokenizer
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.distributed.local_ranks import run_ranks
from nemo_rl_core.models.generation.engine_environment import engine_environment

pytestmark = pytest.mark.slow

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
}
CONFIGS: dict[str, type[PreTrainedConfig]] = {
    "tied": LlamaConfig,
    "buffers": Gemma3TextConfig,  # a normalizer, and two caches of rotary embeddings
    "experts": Qwen3MoeConfig,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "tied": {"tie_word_embeddings": True},
    "buffers": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "experts": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
}


def make_model(name: str, folder: Path, tokenizer_of: Path, *, seed: int) -> Path:
    tokenizer = load_tokenizer(tokenizer_of)
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = CONFIGS[name](**SIZES, **OPTIONS[name], **ends, vocab_size=len(tokenizer))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    for weight in model.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.2)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def completions(first: Path, second: Path, load_format: str) -> dict[str, Any]:
    """Completes with the weights of a folder, then with others that are sent."""
    config = VllmGenerationConfig(max_new_tokens=12)
    os.environ.update(engine_environment(config))
    backend_module.load_format_of = lambda *_, **__: load_format  # like on a GPU
    backend = VllmBackend()
    backend.setup(
        GenerationSetup(model_folder=first, config=config, max_model_len=64, stop_token_ids=())
    )
    # On CPUs vLLM leaves parameters empty after packing their numbers.
    values = {float(each.abs().max()) for each in backend._model().parameters() if each.numel()}
    prompts = BatchedDataDict(
        {
            "input_ids": torch.arange(5, 13).view(2, 4),
            "input_lengths": torch.tensor([4, 3]),
            "seeds": torch.arange(2),
        }
    )
    drawn = [backend.generate(prompts, greedy=False)]  # reads the folder if nothing was read
    backend.take_weights(stored_tensors(second))
    drawn.append(backend.generate(prompts, greedy=False))
    backend.load_weights(first)
    drawn.append(backend.generate(prompts, greedy=False))
    return {"is_empty": values == {0.0}, "drawn": [dict(each) for each in drawn]}


def of_both_starts(folders: dict[str, tuple[Path, Path]]) -> dict[str, list[dict[str, Any]]]:
    return {
        name: [completions(*pair, load_format) for load_format in ("auto", zeros_format())]
        for name, pair in folders.items()
    }


@pytest.mark.thorough
def test_an_engine_that_starts_empty_samples_bitwise_identically(
    tiny_model: Path, tmp_path: Path
) -> None:
    folders = {
        name: tuple(
            make_model(name, tmp_path / f"{name}-{seed}", tiny_model, seed=seed) for seed in (0, 1)
        )
        for name in CONFIGS
    }
    (found,) = run_ranks(of_both_starts, folders, world_size=1, timeout_seconds=900.0)
    for name, (read, empty) in found.items():
        assert (read["is_empty"], empty["is_empty"]) == (False, True), name
        for ours, theirs in zip(empty["drawn"], read["drawn"], strict=True):
            assert ours.keys() == theirs.keys()
            for column, value in ours.items():
                other = torch.as_tensor(theirs[column])
                assert torch.equal(torch.as_tensor(value), other), (name, column)
        first, second, again = (each["logprobs"] for each in read["drawn"])
        assert torch.equal(first, again)
        assert not torch.equal(first, second)  # the sent weights are others
