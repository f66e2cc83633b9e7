"""Prints what torch counts of layouts of dtensor, over its fake process group; run by a test.

    python torch_counts.py RANKS '[{"config": "FILE", "layers": 6, "training": {}, "tokens": 0,
                                    "microbatches": 1}]'

Weights have no memory, other ranks do not exist, and the sharding is the backend's own. With
`tokens`, forward and backward passes over rows of them are tracked, one a micro-batch.
"""

import json
import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AttentionInterface

from nemo_rl_core.backends.training.dtensor import float8, parallelize
from nemo_rl_core.backends.training.dtensor.mesh import join_mesh
from nemo_rl_core.config.training import DTensorTraining
from nemo_rl_core.functional.logprobs import token_logprobs_within_budget
from nemo_rl_core.model_files.loading import empty_model
from nemo_rl_core.model_files.weights import local


class Fused(torch.autograd.Function):
    """Keeps what a fused kernel keeps: queries, keys, values and outputs."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any) -> Any:
        output = torch.empty_like(query)
        ctx.save_for_backward(query, key, value, output)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return tuple(torch.empty_like(saved) for saved in ctx.saved_tensors[:3])


def fused_attention(module: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> Any:
    parts = (part.to(torch.bfloat16).transpose(1, 2).contiguous() for part in (query, key, value))
    return Fused.apply(*parts), None


def sharded(case: dict[str, Any], training: DTensorTraining, mesh: Any) -> Any:
    config = json.loads(Path(case["config"]).read_text())
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": case["layers"]}))
    model = empty_model(folder, "lm")
    model.config._attn_implementation = "fused"
    with mock.patch.object(parallelize, "convert_linear_layers", convert_as_for_gpus):
        return parallelize.parallelize(model, training, mesh, dtype="bfloat16")


def convert_as_for_gpus(model: Any, training: DTensorTraining, **options: Any) -> None:
    """Without the emulation of CPUs, which makes other tensors."""
    capability = mock.patch.object(torch.cuda, "get_device_capability", lambda _: (9, 0))
    with capability, mock.patch.object(float8, "local_device", lambda: torch.device("cuda")):
        float8.convert_linear_layers(model, training, **options)
    for layer in float8._float8_layers(model):
        layer.forward = partial(float8._emulated, layer)  # in the type of autocast


def counted(case: dict[str, Any]) -> dict[str, float]:
    """GiB of weights of rank 0, and with `tokens` those at the peak of a pass."""
    training = DTensorTraining(**case["training"])
    mesh = join_mesh(training)  # of real tensors
    if case["tokens"]:
        with FakeTensorMode(allow_non_fake_inputs=True):
            model = sharded(case, training, mesh)
            peak = passed(model, case["tokens"], training, case["microbatches"])
    else:
        peak = 0
        # On the meta device: tensor parallelism makes meshes, which no fake tensors can be.
        with (
            mock.patch.object(parallelize, "allocate", lambda *_: None),
            mock.patch.object(torch.nn.Module, "to", lambda module, *_, **__: module),
        ):
            model = sharded(case, training, mesh)
    resident = sum(local(parameter).nbytes for parameter in model.parameters())
    return {"weights": resident / 2**30, "peak": peak / 2**30}


def passed(model: Any, tokens: int, training: DTensorTraining, microbatches: int) -> int:
    """Bytes at the peak of forward and backward passes, each over a row."""
    ids, positions = torch.zeros(1, tokens, dtype=torch.long), torch.arange(tokens)[None]
    head, mask = model.get_output_embeddings(), torch.ones(1, 1, 1, 1, dtype=torch.bool)
    tracker = FSDPMemTracker(model)
    tracker.track_inputs((ids,))

    def logprobs(_: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            hidden = model.get_decoder()(
                input_ids=ids, position_ids=positions, use_cache=False, attention_mask=mask
            ).last_hidden_state[0]
            return token_logprobs_within_budget(
                hidden, head.weight, ids[0][:, None], temperature=1.0
            )

    model.forward = logprobs  # within FSDP2's hooks, as `run_within` calls it
    with tracker:
        for index in range(microbatches):
            is_last = index == microbatches - 1
            parallelize.sync_gradients(model, training, is_last=is_last)
            tracker.reset_mod_stats()  # of single modules, which it keeps for one pass
            model(ids).sum().backward()
    (found,) = tracker.get_tracker_snapshot("peak").values()
    return max(found.values())


def main(num_ranks: int, cases: list[dict[str, Any]]) -> None:
    os.environ.update(WORLD_SIZE=str(num_ranks), RANK="0", LOCAL_RANK="0")
    dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
    AttentionInterface.register("fused", fused_attention)
    sys.stdout.write(json.dumps([counted(case) for case in cases]) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
