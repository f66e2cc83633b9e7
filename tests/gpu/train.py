"""A few optimizer steps on one batch in a separate process; prints losses, speed and memory."""

import json
import sys
import time
from pathlib import Path

import torch

from nemo_rl_core.algorithms.sft.loss import NLLLoss
from nemo_rl_core.backends.training.base import TrainingSetup, get_training_backend
from nemo_rl_core.config.optimizer import OptimizerConfig
from nemo_rl_core.config.training import DTensorTraining, MegatronTraining
from nemo_rl_core.distributed.batched_data_dict import collate

options = json.loads(sys.argv[1])
training = MegatronTraining if options["backend"] == "megatron" else DTensorTraining
backend = get_training_backend(options["backend"])()
backend.setup(
    TrainingSetup(
        model_folder=Path(options["folder"]),
        optimizer=OptimizerConfig(learning_rate=1e-5),
        training=training(
            activation_checkpointing=options.get("recompute", False),
            attention=options.get("attention", "auto"),
        ),
        max_tokens_per_microbatch=options["tokens"],
        dtype=options["dtype"],
    )
)
generator = torch.Generator().manual_seed(0)
lengths = options["lengths"]
ids = [torch.randint(3, options["vocabulary"], (n,), generator=generator) for n in lengths]
batch = collate([row.tolist() for row in ids], [[True] * n for n in lengths])
on_gpu = torch.cuda.is_available()
losses, seconds = [], []
for _ in range(options["steps"]):
    started = time.perf_counter()
    losses.append(backend.train_step(batch, NLLLoss())["loss"])
    if on_gpu:
        torch.cuda.synchronize()
    seconds.append(time.perf_counter() - started)
found = {
    "losses": losses,
    "tokens_per_second": round(sum(lengths) / sorted(seconds[1:])[len(seconds[1:]) // 2]),
    "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1) if on_gpu else None,
    "kept_gib": round(torch.cuda.memory_allocated() / 2**30, 1) if on_gpu else None,
}
sys.stdout.write(json.dumps(found) + "\n")
