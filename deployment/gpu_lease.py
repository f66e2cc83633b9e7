"""Training speed of one GPU in minutes, without vLLM, Ray or a network: one JSON line per case.

    python deployment/gpu_lease.py [--tiny] [--seconds 420] [--case-seconds 120] [CASE ...]

CASE is the first word of a name in `CASES`; by default all cases run, the most informative first.
Each runs in its own process with a time limit, so that a failing or hanging case affects no other.
Needs torch, transformers, pydantic and dill; torchao for float8. `--tiny` tries it on a CPU.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]
PEAK_FLOPS = 989e12
"""Dense bfloat16 operations per second of an H100 or H200, SXM."""
NUM_STEPS, NUM_WARM_UP = 7, 2

QWEN_1_5B = {
    "model_type": "qwen2",
    "vocab_size": 151936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
QWEN_7B = {
    "model_type": "qwen2",
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
LLAMA_8B_4_LAYERS = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}
TINY_SIZES = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
ROWS = {
    "8x1024": [[1024] * 8],
    "1x8192": [[8192]],
    "mixed": [[64, 64, 128, 256, 512, 1024, 2048, 4096]],
}


@dataclass(frozen=True)
class Case:
    """One measurement.

    Attributes:
        sizes: Fields of the model's config.
        rows: Key of `ROWS`: lengths of the packed sequences.
        recomputes: `training.activation_checkpointing`.
        compile: `training.compile`.
        fsdp: Shards over a process group of one rank.
        float8: `training.float8`.
    """

    sizes: dict[str, Any]
    rows: str = "8x1024"
    recomputes: bool = True
    compile: bool = False
    fsdp: bool = False
    float8: str = "none"


CASES = {
    "a1 1.5B, eager": Case(QWEN_1_5B),
    "a2 1.5B, compiled": Case(QWEN_1_5B, compile=True),
    "a3 1.5B, activations kept": Case(QWEN_1_5B, recomputes=False),
    "a4 1.5B, activations kept, compiled": Case(QWEN_1_5B, recomputes=False, compile=True),
    "b1 1.5B, FSDP2": Case(QWEN_1_5B, fsdp=True),
    "b2 1.5B, FSDP2, compiled": Case(QWEN_1_5B, fsdp=True, compile=True),
    "b3 b2 with activations kept": Case(QWEN_1_5B, recomputes=False, fsdp=True, compile=True),
    "c1 4 layers of 8B, FSDP2": Case(LLAMA_8B_4_LAYERS, fsdp=True),
    "c2 c1 compiled": Case(LLAMA_8B_4_LAYERS, fsdp=True, compile=True),
    "d1 7B, FSDP2, compiled, on an H200": Case(QWEN_7B, fsdp=True, compile=True),
    "c3 c2 in float8 rowwise": Case(LLAMA_8B_4_LAYERS, fsdp=True, compile=True, float8="rowwise"),
    "c4 c2 in float8 tensorwise": Case(
        LLAMA_8B_4_LAYERS, fsdp=True, compile=True, float8="tensorwise"
    ),
    "b4 one sequence": Case(QWEN_1_5B, "1x8192", fsdp=True, compile=True),
    "b5 mixed lengths": Case(QWEN_1_5B, "mixed", fsdp=True, compile=True),
}


def measure(case: Case, *, tiny: bool) -> dict[str, Any]:
    """Trains a random model for a few steps on one batch, and returns its figures."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from nemo_rl_core.backends.training.dtensor.attention import packed_attention
    from nemo_rl_core.backends.training.dtensor.model import LogprobModel
    from nemo_rl_core.backends.training.dtensor.parallelize import parallelize
    from nemo_rl_core.backends.training.optimizers import clip_gradients
    from nemo_rl_core.config.training import DTensorTraining
    from nemo_rl_core.distributed.process_group import local_device

    sizes = case.sizes | (TINY_SIZES if tiny else {})
    rows = [[16] * 4] if tiny else ROWS[case.rows]
    device = local_device()
    training = DTensorTraining(
        attention="auto",
        activation_checkpointing=case.recomputes,
        compile=case.compile,
        float8=case.float8,
    )
    if device.type == "cpu":
        # Inductor would compile C++ for a minute, which is not what the tiny case tests.
        torch.compile = partial(torch.compile, backend="aot_eager")
    torch.manual_seed(0)
    with device:
        config = AutoConfig.for_model(**sizes, pad_token_id=0, max_position_embeddings=32768)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    attention = packed_attention(model, training, dtype="bfloat16", device=device)
    mesh = _mesh_of_one_rank() if case.fsdp else None
    model = parallelize(model, training, mesh, dtype="bfloat16")
    trained = LogprobModel(model, temperature=1.0, dtype="bfloat16", mesh=mesh, attention=attention)
    batch, tokens = _batch(trained, rows, vocab_size=sizes["vocab_size"], device=device)
    parameters = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-6, fused=device.type == "cuda")
    num_tokens = sum(map(sum, rows))
    seconds, losses = [], []
    for _ in range(NUM_STEPS):
        started = time.perf_counter()
        loss = -trained.logprobs(batch, tokens).sum() / num_tokens
        loss.backward()
        clip_gradients(parameters, 1.0, step=1)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(loss.detach()))  # waits for the device
        seconds.append(time.perf_counter() - started)
    step_seconds = statistics.median(seconds[NUM_WARM_UP:])
    counters = torch._dynamo.utils.counters
    return {
        "tokens_per_second": round(num_tokens / step_seconds),
        "mfu": round(_flops(model, sizes, rows) / step_seconds / PEAK_FLOPS, 4),
        "first_step_seconds": round(seconds[0], 2),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2)
        if device.type == "cuda"
        else None,
        "losses": [round(each, 4) for each in losses],
        "attention": attention.kernel if attention else "sdpa",
        "graphs": counters["stats"]["unique_graphs"],
        "graph_breaks": sum(counters["graph_break"].values()),
    }


def _mesh_of_one_rank() -> Any:
    """Makes the mesh that `join_mesh` makes for several ranks, with one rank."""
    import torch.distributed as dist

    from nemo_rl_core.backends.training.dtensor import mesh
    from nemo_rl_core.distributed.ports import hold_port
    from nemo_rl_core.distributed.process_group import (
        join_process_group,
        local_device,
        rank_environment,
    )

    port = hold_port([0], host="127.0.0.1")
    assert port is not None
    os.environ.update(rank_environment(0, 1, address="127.0.0.1", port=port))
    join_process_group()
    assert dist.group.WORLD is not None
    grids = mesh._grids(dist.group.WORLD, local_device().type, 1, 1, 1)
    return mesh.RankMesh(*grids, row_multiple=1)


def _batch(trained: Any, rows: list[list[int]], *, vocab_size: int, device: Any) -> tuple[Any, Any]:
    import torch

    from nemo_rl_core.distributed.batched_data_dict import collate
    from nemo_rl_core.distributed.packing.plan import Microbatch

    lengths = [length for row in rows for length in row]
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(1, vocab_size, (n,), generator=generator).tolist() for n in lengths]
    batch = collate(ids, [[True] * n for n in lengths])
    indices = iter(range(len(lengths)))
    plan = Microbatch(
        rows=tuple(tuple(next(indices) for _ in row) for row in rows),
        row_length=max(map(sum, rows)),
    )
    return trained.packed(batch, plan).moved_with(batch, device)


def _flops(model: Any, sizes: dict[str, Any], rows: list[list[int]]) -> float:
    """Operations of a step without recomputation: 6 per weight and token, and causal attention."""
    num_weights = sum(each.numel() for each in model.parameters())
    if not sizes["tie_word_embeddings"]:
        num_weights -= sizes["vocab_size"] * sizes["hidden_size"]  # the embedding only looks up
    attention = 6 * sizes["num_hidden_layers"] * sizes["hidden_size"]
    return float(sum(6 * num_weights * n + attention * n * n for row in rows for n in row))


def _in_process(name: str, *, tiny: bool, seconds: float) -> dict[str, Any]:
    command = [sys.executable, __file__, "--run", name, *(["--tiny"] if tiny else [])]
    folders = [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders))}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"did not end within {seconds:.0f} s"}
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        return {"error": f"exit code {done.returncode}: {done.stderr[-1500:]}"}
    figures: dict[str, Any] = json.loads(lines[-1])
    return figures


def main() -> None:
    """Runs the cases one after the other, each in its own process."""
    parser = argparse.ArgumentParser(description="Measure training on one GPU.")
    parser.add_argument("cases", nargs="*", help="first words of names in CASES; by default all")
    parser.add_argument("--tiny", action="store_true", help="tiny models, as on a CPU")
    parser.add_argument("--seconds", type=float, default=420.0, help="time for all cases")
    parser.add_argument("--case-seconds", type=float, default=120.0, help="time for each case")
    parser.add_argument("--run", choices=CASES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        sys.stdout.write(json.dumps(measure(CASES[options.run], tiny=options.tiny)) + "\n")
        return
    by_word = {name.split()[0]: name for name in CASES}
    if unknown := set(options.cases) - by_word.keys():
        parser.error(f"no case {', '.join(sorted(unknown))}; there are {', '.join(by_word)}")
    ends = time.monotonic() + options.seconds
    for word in options.cases or by_word:
        left = min(options.case_seconds, ends - time.monotonic())
        name = by_word[word]
        figures = (
            _in_process(name, tiny=options.tiny, seconds=left)
            if left > 0
            else {"error": "no time left"}
        )
        settings = {key: value for key, value in asdict(CASES[name]).items() if key != "sizes"}
        sys.stdout.write(json.dumps({"case": name, **settings, **figures}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
