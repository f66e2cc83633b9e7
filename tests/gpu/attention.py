"""Attention over packed rows on a GPU: comparisons and timings, one line of JSON per case.

Standalone: only needs torch, transformers and nemo_rl_core. `lengths` makes a case a timing.

    python tests/gpu/attention.py '[{"model": "qwen2", "attention": "varlen"}]'
    python tests/gpu/attention.py '[{"attention": "varlen", "lengths": "64 x 128"}]'

`flash_attention` chooses the version that computes `varlen`; 3 and 4 need `deterministic: false`.
"""

import json
import sys
import time
import traceback
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from nemo_rl_core.backends.training.determinism import compute_deterministically
from nemo_rl_core.backends.training.dtensor.attention import packed_attention
from nemo_rl_core.backends.training.dtensor.model import LogprobModel
from nemo_rl_core.backends.training.dtensor.parallelize import parallelize
from nemo_rl_core.config.training import DTensorTraining
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict, collate
from nemo_rl_core.distributed.packing.plan import Microbatch

DEVICE = torch.device("cuda", 0)
SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "pad_token_id": 0,
}
MODELS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "qwen2": Qwen2Config(**{**SIZES, "num_attention_heads": 6, "num_key_value_heads": 1}),
    "qwen3": Qwen3Config(**{**SIZES, "head_dim": 128}),
    "gemma3": Gemma3TextConfig(
        **SIZES, sliding_window=100, layer_types=["sliding_attention", "full_attention"]
    ),
}
# Two rows with filler: sequences below, at and above a block of 128 tokens.
AGREE = ([7, 128, 301, 60], [500, 2, 33])
LARGE = Qwen2Config(
    vocab_size=32768,
    hidden_size=1536,
    intermediate_size=8960,
    num_hidden_layers=4,
    num_attention_heads=12,
    num_key_value_heads=2,
    tie_word_embeddings=True,
    pad_token_id=0,
)
LENGTHS = {
    "64 x 128": [128] * 64,
    "8 x 1024": [1024] * 8,
    "64 to 4096": [64, 64, 128, 256, 512, 1024, 2048, 4096],
}


def batch_of(rows: tuple[list[int], ...], vocabulary: int) -> tuple[BatchedDataDict, Microbatch]:
    generator = torch.Generator().manual_seed(1)
    lengths = [length for row in rows for length in row]
    ids = [torch.randint(1, vocabulary, (n,), generator=generator).tolist() for n in lengths]
    batch = collate(ids, [[True] * n for n in lengths]).to(DEVICE)
    numbers, indices = iter(range(len(lengths))), []
    for row in rows:
        indices.append(tuple(next(numbers) for _ in row))
    return batch, Microbatch(rows=tuple(indices), row_length=max(map(sum, rows)))


def packed_model(config: PreTrainedConfig, options: dict[str, Any]) -> LogprobModel:
    torch.manual_seed(0)
    dtype = options.get("dtype", "bfloat16")
    training = DTensorTraining(
        attention=options["attention"],
        flash_attention=options.get("flash_attention", "auto"),
        activation_checkpointing=options.get("recompute", False),
        compile=options.get("compile", False),
    )
    with DEVICE:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    attention = packed_attention(model, training, dtype=dtype, device=DEVICE)
    model = parallelize(model, training, None, dtype=dtype)
    return LogprobModel(model, temperature=1.0, dtype=dtype, attention=attention)


def step(packed: LogprobModel, batch: BatchedDataDict, plan: Microbatch) -> torch.Tensor:
    logprobs = packed.logprobs(batch, packed.packed(batch, plan))
    (-logprobs.sum() / batch["token_mask"].sum()).backward()
    return logprobs.detach()


def computed(config: PreTrainedConfig, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    packed = packed_model(config, options)
    packed.choose_layout()
    logprobs = step(packed, *batch_of(AGREE, 512))
    gradients = {name: each.grad for name, each in packed.model.named_parameters()}
    return logprobs, {name: each for name, each in gradients.items() if each is not None}


def agree(options: dict[str, Any]) -> dict[str, Any]:
    """Returns distances of the kernel and of a dense mask in its dtype to a float32 mask."""
    config = MODELS[options["model"]]
    want, want_gradients = computed(config, {"attention": "sdpa", "dtype": "float32"})
    distances = {}
    for name, attention in (("kernel", options["attention"]), ("dense", "sdpa")):
        version = {} if attention == "varlen" else {"flash_attention": "auto"}
        logprobs, gradients = computed(config, {**options, "attention": attention, **version})
        cosines, norms = [], []
        for parameter, gradient in want_gradients.items():
            actual = gradients[parameter]
            cosines.append(torch.cosine_similarity(actual.flatten(), gradient.flatten(), 0).item())
            norms.append(((actual - gradient).norm() / gradient.norm()).item())
        difference = (logprobs - want).abs()
        distances[name] = {
            "largest": difference.max().item(),
            "mean": difference.mean().item(),
            "gradient": max(norms),
            "cosine": min(cosines),
            "finite": all(bool(each.isfinite().all()) for each in gradients.values()),
        }
    return distances


def timed(options: dict[str, Any]) -> dict[str, Any]:
    """Measures time and memory of forward and backward: 8192 tokens, 4 layers of 1.5 B."""
    packed = packed_model(LARGE, {"recompute": True, **options})
    batch, plan = batch_of((LENGTHS[options["lengths"]],), 32768)
    torch.cuda.reset_peak_memory_stats()
    milliseconds = []
    for _ in range(8):
        torch.cuda.synchronize()
        started = time.perf_counter()
        step(packed, batch, plan)
        torch.cuda.synchronize()
        milliseconds.append(1000 * (time.perf_counter() - started))
        packed.model.zero_grad(set_to_none=True)
    return {
        "first_ms": round(milliseconds[0]),
        "median_ms": round(sorted(milliseconds[2:])[len(milliseconds[2:]) // 2], 1),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
    }


def result(options: dict[str, Any]) -> dict[str, Any]:
    """Returns a case's figures, or its error, so that the other cases still run."""
    try:
        if options.get("deterministic", True):
            compute_deterministically()
        else:
            torch.use_deterministic_algorithms(False)
        return (timed if "lengths" in options else agree)(options)
    except Exception:  # noqa: BLE001  (the other cases are to run)
        return {"error": traceback.format_exc()}
    finally:
        torch.cuda.empty_cache()


if __name__ == "__main__":
    for case in json.loads(sys.argv[1]):
        named = {**case, "torch": torch.__version__, **result(case)}
        sys.stdout.write(json.dumps(named) + "\n")
        sys.stdout.flush()
