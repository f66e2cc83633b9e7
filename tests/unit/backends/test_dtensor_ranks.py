"""The training worker on several ranks against the plain transformers loop on one."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from nemo_rl_core.algorithms.sft.loss import NLLLoss
from nemo_rl_core.backends.training.base import TrainingSetup
from nemo_rl_core.backends.training.dtensor.backend import DTensorBackend
from nemo_rl_core.config.training import DTensorTraining, OptimizerConfig
from nemo_rl_core.data.collate import collate
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.distributed.local_ranks import run_ranks
from nemo_rl_core.distributed.process_group import rank, world_size

EPSILON = 1e-3  # as in test_dtensor.py: a gradient of rounding must not move a weight
LENGTHS = [11, 4, 7, 2, 9, 3, 3, 8]
NUM_STEPS = 5
TWO_RANKS: dict[str, dict[str, Any]] = {
    "FSDP 2": {},
    "TP 2": {"tensor_parallel_size": 2},
    "TP 2 + SP": {"tensor_parallel_size": 2, "sequence_parallel": True},
    "CP 2": {"context_parallel_size": 2},
}
FOUR_RANKS: dict[str, dict[str, Any]] = {
    "FSDP 2 x TP 2": {"tensor_parallel_size": 2},
    "HSDP 2 x 2": {"data_parallel_replicas": 2, "activation_checkpointing": True},
    "HSDP 2 x TP 2": {"data_parallel_replicas": 2, "tensor_parallel_size": 2},
    "CP 2 x TP 2 + SP": {
        "context_parallel_size": 2,
        "tensor_parallel_size": 2,
        "sequence_parallel": True,
    },
    "FSDP 2 x CP 2": {"context_parallel_size": 2, "cpu_offload": True},
}


def make_batch() -> BatchedDataDict:
    generator = torch.Generator().manual_seed(1)
    sequences = [torch.randint(0, 16, (n,), generator=generator).tolist() for n in LENGTHS]
    return collate(sequences, [[place >= n // 2 for place in range(n)] for n in LENGTHS])


def rows_of(data_rank: int, num_data_ranks: int) -> list[int]:
    """Uneven shards, and none for the last of four."""
    if num_data_ranks == 1:
        return list(range(len(LENGTHS)))
    bounds = {2: [0, 6, 8], 4: [0, 5, 6, 8, 8]}[num_data_ranks]
    return list(range(bounds[data_rank], bounds[data_rank + 1]))


def make_backend(folder: Path, axes: dict[str, Any]) -> DTensorBackend:
    optimizer = OptimizerConfig(
        learning_rate=1e-2, weight_decay=0.1, num_warmup_steps=2, adam_epsilon=EPSILON
    )
    backend = DTensorBackend()
    backend.setup(
        TrainingSetup(
            model_folder=folder,
            optimizer=optimizer,
            training=DTensorTraining(**axes),
            max_tokens_per_microbatch=24,
            reference_folder=folder,
        )
    )
    return backend


def make_shard(axes: dict[str, Any]) -> tuple[list[int], BatchedDataDict]:
    ranks_per_replica = DTensorTraining(**axes).ranks_per_replica
    rows = rows_of(rank() // ranks_per_replica, world_size() // ranks_per_replica)
    return rows, make_batch().select_indices(rows)


def trained(folder: Path, layouts: dict[str, dict[str, Any]], saved: Path) -> dict[str, Any]:
    """What each layout gives on this rank, from logprobs to the weights after the last step.

    What they have then is saved, and the next layout takes one more step from there.
    """
    results: dict[str, Any] = {}
    names = list(layouts)
    for name, axes in layouts.items():
        backend = make_backend(folder, axes)
        rows, shard = make_shard(axes)
        logprobs = backend.get_logprobs(shard)
        reference = backend.get_reference_topk_logprobs(shard, 3)
        steps = [backend.train_step(shard, NLLLoss()) for _ in range(NUM_STEPS)]
        checkpoint = saved / name
        checkpoint.mkdir(parents=True, exist_ok=True)
        backend.save_checkpoint(checkpoint)
        results[name] = {
            "rows": rows,
            "logprobs": logprobs,
            "reference": reference,
            "steps": steps,
            "weights": dict(backend.named_weights()),
            "last": backend.get_logprobs(shard),
            "buckets": len(backend.weight_buckets()[0]),
        }
        backend.shutdown()
        other = layouts[names[(names.index(name) + 1) % len(names)]]
        resumed = make_backend(folder, other)
        resumed.load_checkpoint(checkpoint)
        steps.append(resumed.train_step(make_shard(other)[1], NLLLoss()))
        resumed.shutdown()
    return results


def plain_logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=ids).logits[0, :-1]
    return torch.log_softmax(logits, dim=-1)


def plain_logprobs(model: Any, batch: BatchedDataDict) -> torch.Tensor:
    rows = []
    for row, length in enumerate(batch["input_lengths"].tolist()):
        ids = batch["input_ids"][row : row + 1, :length]
        chosen = plain_logits(model, ids).gather(-1, ids[0, 1:, None])[:, 0]
        rows.append(torch.nn.functional.pad(chosen, (0, batch["token_mask"].shape[1] + 1 - length)))
    return torch.stack(rows) * batch["token_mask"]


def plain_training(folder: Path) -> dict[str, Any]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    batch = make_batch()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=EPSILON, weight_decay=0.1
    )
    first = plain_logprobs(model, batch).detach()
    steps = []
    for step in range(NUM_STEPS + 1):
        if step == NUM_STEPS:
            weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
            last = plain_logprobs(model, batch).detach()
        optimizer.param_groups[0]["lr"] = 1e-2 * min(1.0, (step + 1) / 2)
        optimizer.zero_grad()
        loss = -plain_logprobs(model, batch).sum() / batch["token_mask"].sum()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        steps.append((loss.item(), norm.item()))
    return {"logprobs": first, "steps": steps, "weights": weights, "last": last}


def compare(found: dict[str, Any], expected: dict[str, Any]) -> None:
    rows = found["rows"]
    close: Callable[..., None] = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)
    close(found["logprobs"], expected["logprobs"][rows])
    close(found["last"], expected["last"][rows], atol=2e-5)
    for metrics, (loss, norm) in zip(found["steps"], expected["steps"], strict=True):
        assert metrics["loss"] == pytest.approx(loss, rel=1e-5)
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert found["weights"].keys() == expected["weights"].keys()
    for name, weight in found["weights"].items():
        close(weight, expected["weights"][name], atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "layouts"), [(2, TWO_RANKS), (4, FOUR_RANKS)])
def test_every_layout_follows_the_plain_loop(
    tiny_model: Path, tmp_path: Path, num_ranks: int, layouts: dict[str, dict[str, Any]]
) -> None:
    expected = plain_training(tiny_model)
    alone = trained(tiny_model, {"alone": {}}, tmp_path)["alone"]
    compare(alone, expected)
    found_by_rank = run_ranks(
        trained, tiny_model, layouts, tmp_path, world_size=num_ranks, timeout_seconds=900.0
    )
    for place, results in enumerate(found_by_rank):
        for found in results.values():
            compare(found, expected)
            ids, logprobs = found["reference"]
            assert torch.equal(ids, alone["reference"][0][found["rows"]])
            torch.testing.assert_close(logprobs, alone["reference"][1][found["rows"]])
            assert (found["buckets"] > 0) == (place == 0)
