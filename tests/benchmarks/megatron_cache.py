"""Measures the gain of Megatron's KV cache; `python tests/benchmarks/megatron_cache.py`.

A model of SmolLM2-135M's shape, with random weights and a fifth of its layers, samples greedily on
one thread: once as in the engine, and once by recomputing all tokens of all rows for each next one,
which is the same engine with an empty cache for every token. Both produce the same tokens; their
runs alternate. Measured as CPU time, because the machine was shared.

Eight rows of 64 prompt tokens and 64 new ones take 2.9 s (2.8 to 3.0) with the cache and 28.5 s
(28.2 to 28.6) without it, 9.9 times as long (9.6 to 10.2 in three pairs).
"""

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from nemo_rl_core.backends.generation.base import GenerationSetup
from nemo_rl_core.config.generation import MegatronGenerationConfig
from nemo_rl_core.config.model import ModelFromConfig
from nemo_rl_core.converters.materialize import materialize
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict

NUM_ROWS, NUM_PROMPT_TOKENS, NUM_NEW_TOKENS, NUM_REPETITIONS = 8, 64, 64, 3
SHAPE = LlamaConfig(
    vocab_size=49_152,
    hidden_size=576,
    intermediate_size=1_536,
    num_hidden_layers=6,  # of 30, with which recomputing takes minutes
    num_attention_heads=9,
    num_key_value_heads=3,
    max_position_embeddings=8_192,
    tie_word_embeddings=True,
)


def prompts() -> torch.Tensor:
    """Returns distinct prompts, `[B, T]`."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(SHAPE.vocab_size, (NUM_ROWS, NUM_PROMPT_TOKENS), generator=generator)


def cached(engine: Any) -> torch.Tensor:
    """Samples with the engine's cache, `[B, T + new]`."""
    batch = BatchedDataDict(
        {
            "input_ids": prompts(),
            "input_lengths": torch.full((NUM_ROWS,), NUM_PROMPT_TOKENS),
            "seeds": torch.arange(NUM_ROWS),
        }
    )
    ids: torch.Tensor = engine.generate(batch, greedy=True)["output_ids"]
    return ids


def recomputed(engine: Any) -> torch.Tensor:
    """Samples with an empty cache for each token, `[B, T + new]`."""
    from nemo_rl_core.backends.training.megatron.kv_cache import KeyValueCache

    ids = prompts()
    for _ in range(NUM_NEW_TOKENS):
        padding = torch.zeros(NUM_ROWS, dtype=torch.long)
        cache = KeyValueCache(engine._models[0], padding, ids.shape[1])
        tokens = engine._next_logits(cache, ids).argmax(-1)
        ids = torch.cat([ids, tokens[:, None]], dim=1)
    return ids


def engine_of(folder: Path) -> Any:
    """Returns an engine with random weights, an unrelated tokenizer and no stop token."""
    from nemo_rl_core.backends.generation.megatron import MegatronInferenceBackend

    materialize(ModelFromConfig(hidden_size=32, num_layers=2, num_heads=2), folder, seed=0)
    LlamaForCausalLM(SHAPE).save_pretrained(folder)
    engine = MegatronInferenceBackend()
    engine.setup(
        GenerationSetup(
            model_folder=folder,
            config=MegatronGenerationConfig(max_new_tokens=NUM_NEW_TOKENS),
            max_model_len=NUM_PROMPT_TOKENS + NUM_NEW_TOKENS,
            stop_token_ids=(),
        )
    )
    return engine


def seconds_of(draw: Callable[[Any], torch.Tensor], engine: Any) -> tuple[float, torch.Tensor]:
    """Returns the CPU time of one call and its tokens."""
    start = time.process_time()
    ids = draw(engine)
    return time.process_time() - start, ids


def compare() -> Table:
    """Returns median, minimum and maximum of alternating runs and of their ratios."""
    with TemporaryDirectory() as folder:
        torch.manual_seed(0)
        engine = engine_of(Path(folder) / "model")
    pairs = []
    for _ in range(NUM_REPETITIONS):
        with_cache, drawn = seconds_of(cached, engine)
        without, expected = seconds_of(recomputed, engine)
        assert torch.equal(drawn, expected)
        pairs.append((with_cache, without))
    engine.shutdown()
    table = Table("way", "median", "least", "largest")
    for name, unit, figures in (
        ("cached", " s", [pair[0] for pair in pairs]),
        ("recomputed", " s", [pair[1] for pair in pairs]),
        ("recomputed / cached", "", [pair[1] / pair[0] for pair in pairs]),
    ):
        shown = [statistics.median(figures), min(figures), max(figures)]
        table.add_row(name, *(f"{figure:.1f}{unit}" for figure in shown))
    return table


if __name__ == "__main__":
    torch.set_num_threads(1)
    Console(width=100).print(compare())
