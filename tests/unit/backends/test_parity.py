"""The parity table: both backends at every layout compared with a plain transformers loop.

Errors are relative: the largest |actual - expected| over the largest |expected| of a tensor or a
number, and the worst over several tensors and ranks.
"""

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3MoeConfig
from transformers.core_model_loading import revert_weight_conversion

from nemo_rl_core.algorithms.grpo.loss import GRPOLossFn
from nemo_rl_core.algorithms.grpo.loss_config import ClippedLoss, KLInLoss
from nemo_rl_core.algorithms.sft.loss import NLLLoss
from nemo_rl_core.backends.training.base import (
    TrainingSetup,
    allowed_sharing,
    get_training_backend,
)
from nemo_rl_core.config.optimizer import OptimizerConfig
from nemo_rl_core.config.training import DTensorTraining, MegatronTraining, TrainingConfig
from nemo_rl_core.data.pretrained import load_tokenizer
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict, collate
from nemo_rl_core.distributed.local_ranks import run_ranks
from nemo_rl_core.distributed.packing.plan import Microbatch
from nemo_rl_core.distributed.packing.ranks import plan_shard
from nemo_rl_core.distributed.process_group import rank, world_size

TOLERANCE = 1e-5
NUM_STEPS = 5
MAX_TOKENS = 24
LENGTHS = [11, 4, 7, 2, 9, 3, 3, 8]
# With Adam's usual epsilon, a gradient that is zero except for rounding moves a weight by the full
# learning rate, in a direction that rounding decides, so results could not be compared. With twice
# this rate, the plain loop's fifth gradient norm in float32 is 6e-6 off the one in float64.
ADAM = OptimizerConfig(
    learning_rate=5e-3, weight_decay=0.1, num_warmup_steps=2, adam_epsilon=1e-3, max_grad_norm=1.0
)
# With an epsilon that dominates the second moment, Adam's first step is plain gradient descent, so
# that the change of a weight is its gradient, however it is sharded. RATE is so large that the
# weight itself is lost in the sum, not the gradient.
RATE = 1e4
DESCENT = OptimizerConfig(
    learning_rate=RATE * 1e8, adam_epsilon=1e8, adam_beta1=0, adam_beta2=0, max_grad_norm=1e9
)
GRPO = GRPOLossFn(ClippedLoss(kl=KLInLoss(beta=0.1)))
SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    model: str
    layout: str
    training: TrainingConfig


def dtensor(layout: str, model: str = "dense", **axes: Any) -> Case:
    return Case(model, layout, DTensorTraining(share_prefixes=True, **axes))


def megatron(layout: str, tensor: int = 1, pipeline: int = 1, **axes: Any) -> Case:
    model = "experts" if "EP" in layout else "dense"
    training = MegatronTraining(
        tensor_parallel_size=tensor,
        pipeline_parallel_size=pipeline,
        share_prefixes=True,
        **axes,
    )
    return Case(model, layout, training)


# By number of ranks; those that a layout does not use are data-parallel. Each group gets separate
# processes, since a backend leaves its process groups' threads behind when it is shut down.
CASES = [
    (1, [dtensor("1"), dtensor("1", "experts"), megatron("1x1"), megatron("EP 1")]),
    (
        2,
        [
            dtensor("FSDP 2"),
            dtensor("TP 2", tensor_parallel_size=2),
            dtensor("TP 2 + SP", tensor_parallel_size=2, sequence_parallel=True),
            dtensor("CP 2", context_parallel_size=2),
            dtensor("FSDP 2", "experts"),
        ],
    ),
    (
        2,
        [
            megatron("2x1", 2),
            megatron("2x1 + SP", 2, sequence_parallel=True),
            megatron("1x2", 1, 2),
            megatron("1x2 interleaved", 1, 2, virtual_pipeline_size=2),
            megatron("DP 2 x 1x1 recomputed", activation_checkpointing=True),
            megatron("EP 2", expert_parallel_size=2),
        ],
    ),
    (
        2,
        [
            megatron("CP 2", context_parallel_size=2),
            megatron("CP 2 recomputed", context_parallel_size=2, activation_checkpointing=True),
        ],
    ),
    (
        4,
        [
            dtensor("FSDP 2 x TP 2", tensor_parallel_size=2),
            dtensor(
                "HSDP 2 x 2 recomputed", data_parallel_replicas=2, activation_checkpointing=True
            ),
        ],
    ),
    (
        4,
        [
            dtensor("HSDP 2 x TP 2", data_parallel_replicas=2, tensor_parallel_size=2),
            dtensor(
                "CP 2 x TP 2 + SP",
                context_parallel_size=2,
                tensor_parallel_size=2,
                sequence_parallel=True,
            ),
            dtensor("FSDP 2 x CP 2 offloaded", context_parallel_size=2, cpu_offload=True),
        ],
    ),
    (
        4,
        [
            megatron("2x2", 2, 2),
            megatron("DP 2 x 2x1", 2),
            megatron("DP 2 x 1x2", 1, 2),
            megatron("PP 2 x EP 2", 1, 2, expert_parallel_size=2),
        ],
    ),
    (
        4,
        [
            megatron("CP 2 x 2x1 + SP", 2, context_parallel_size=2, sequence_parallel=True),
            megatron("CP 2 x 1x2", 1, 2, context_parallel_size=2),
            megatron("CP 2 x EP 2", context_parallel_size=2, expert_parallel_size=2),
        ],
    ),
]


def name_of(group: tuple[int, list[Case]]) -> str:
    num_ranks, cases = group
    backends = "-".join(sorted({case.training.backend for case in cases}))
    return f"{backends}-{num_ranks}-{cases[0].layout}"


@pytest.fixture(scope="module")
def folders(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Creates a dense model and a mixture of experts; two ranks do not divide the 19 tokens."""
    tokenizer = load_tokenizer(tiny_model)
    configs = {
        "dense": Qwen2Config(**SHAPE, vocab_size=len(tokenizer)),
        "experts": Qwen3MoeConfig(
            **SHAPE,
            vocab_size=len(tokenizer),
            head_dim=8,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            norm_topk_prob=True,
        ),
    }
    root = tmp_path_factory.mktemp("parity")
    for name, config in configs.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if "norm" in parameter_name or parameter_name.endswith("bias"):
                    parameter.add_(torch.rand_like(parameter) - 0.5)
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    return {name: root / name for name in configs}


def make_batch(*, all_tokens: bool = False) -> BatchedDataDict:
    """Creates eight sequences with the columns of GRPO's loss; second halves are trained.

    Some have common beginnings of different lengths: the second and third with the first, the last
    with the fifth; the sixth and seventh are equal.
    """
    generator = torch.Generator().manual_seed(1)
    sequences = [torch.randint(0, 16, (n,), generator=generator).tolist() for n in LENGTHS]
    for row, former, overlap in ((1, 0, 3), (2, 0, 5), (6, 5, 3), (7, 4, 2)):
        sequences[row][:overlap] = sequences[former][:overlap]
    masks = [[all_tokens or index >= n // 2 for index in range(n)] for n in LENGTHS]
    batch = collate(sequences, masks)
    shape = batch["token_mask"].shape
    batch["advantages"] = torch.randn(shape, generator=generator) + 0.5
    for name in ("prev_logprobs", "reference_logprobs"):
        # Close to the result of five steps, so that ratios are on both sides of GRPO's band.
        batch[name] = -1.5 * torch.rand(shape, generator=generator)
    return batch


def test_rows_of_the_table_share_prefixes(folders: dict[str, Path]) -> None:
    for folder in folders.values():
        sharing = allowed_sharing(folder)
        plan = plan_shard(make_batch(), max_tokens=MAX_TOKENS, sharing=sharing)
        assert sum(tokens for part in plan for tokens in part.shared) >= 8


def rows_of_this_rank(training: TrainingConfig) -> list[int]:
    """Returns uneven shards, and no rows for the last of four data ranks."""
    stages = training.pipeline_parallel_size if isinstance(training, MegatronTraining) else 1
    ranks_per_stage = training.ranks_per_replica // stages
    num_data_ranks = training.data_parallel_size(world_size())
    data_rank = rank() // ranks_per_stage % num_data_ranks
    bounds = {1: [0, 8], 2: [0, 6, 8], 4: [0, 5, 6, 8, 8]}[num_data_ranks]
    return list(range(bounds[data_rank], bounds[data_rank + 1]))


def shard_of(rows: list[int], *, padded: bool = False, all_tokens: bool = False) -> BatchedDataDict:
    shard = make_batch(all_tokens=all_tokens).select_indices(rows)
    if padded:  # one micro-batch with one sequence per row
        plan = Microbatch(tuple((row,) for row in range(len(rows))), max(LENGTHS))
        shard.microbatches = [plan] if rows else []
    return shard


def all_logprobs(backend: Any, rows: list[int]) -> torch.Tensor:
    """Returns `[B, T-1, V]` logits, up to a constant that a softmax ignores."""
    shard = shard_of(rows, all_tokens=True)
    ids, logprobs = backend.get_reference_topk_logprobs(shard, 19)
    return torch.zeros_like(logprobs).scatter_add(-1, ids, logprobs)


def start(folder: Path, training: TrainingConfig, optimizer: OptimizerConfig) -> Any:
    backend = get_training_backend(training.backend)()
    backend.setup(
        TrainingSetup(
            model_folder=folder,
            optimizer=optimizer,
            training=training,
            max_tokens_per_microbatch=MAX_TOKENS,
            reference_folder=folder,
        )
    )
    return backend


def gradients(
    folder: Path, training: TrainingConfig, *, padded: bool = False
) -> dict[str, torch.Tensor]:
    """Returns the full gradients of one step by the weights' names."""
    backend = start(folder, training, DESCENT)
    before = {name: weight.double() for name, weight in backend.named_weights()}
    backend.train_step(shard_of(rows_of_this_rank(training), padded=padded), NLLLoss())
    actual = {name: (before[name] - w.double()) / RATE for name, w in backend.named_weights()}
    backend.shutdown()
    return actual


def measured(folder: Path, training: TrainingConfig) -> dict[str, Any]:
    """Returns the results of a backend on this rank."""
    rows = rows_of_this_rank(training)
    results: dict[str, Any] = {
        "packed": gradients(folder, training),
        "padded": gradients(folder, training, padded=True),
    }
    backend = start(folder, training, ADAM)
    results |= {
        "rows": rows,
        "logits": all_logprobs(backend, rows),
        "logprobs": backend.get_logprobs(shard_of(rows)),
        "padded logprobs": backend.get_logprobs(shard_of(rows, padded=True)),
        "logprobs of a step": backend.forward_backward(shard_of(rows), NLLLoss())[1],
        "steps": [backend.train_step(shard_of(rows), NLLLoss()) for _ in range(NUM_STEPS)],
        "weights": {name: weight.clone() for name, weight in backend.named_weights()},
        "grpo": backend.train_step(shard_of(rows), GRPO),
    }
    backend.shutdown()
    return results


def plain_logprobs(model: Any, batch: BatchedDataDict) -> torch.Tensor:
    """Computes `[B, T-1, V]` logprobs of each sequence separately, 0 past its end."""
    rows = []
    for row, length in enumerate(batch["input_lengths"].tolist()):
        logits = model(input_ids=batch["input_ids"][row : row + 1, :length]).logits[0, :-1]
        short = max(LENGTHS) - length
        rows.append(torch.nn.functional.pad(logits.log_softmax(-1), (0, 0, 0, short)))
    return torch.stack(rows)


def plain(folder: Path) -> dict[str, Any]:
    """Returns the results of `measured` from transformers and torch only."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    batch = make_batch()

    def logprobs() -> torch.Tensor:
        ids = batch["input_ids"][:, 1:, None]
        return plain_logprobs(model, batch).gather(-1, ids)[..., 0] * batch["token_mask"]

    def named(values: Iterable[tuple[str, Any]]) -> dict[str, torch.Tensor]:
        # Experts are separate, as they are published.
        return dict(revert_weight_conversion(model, {name: v.clone() for name, v in values}))

    results: dict[str, Any] = {
        "logits": plain_logprobs(model, batch).detach(),
        "logprobs": logprobs().detach(),
        "steps": [],
    }
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=ADAM.learning_rate, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.1
    )
    num_tokens = batch["token_mask"].sum()
    for step in range(NUM_STEPS):
        # Two steps of warm-up: half the rate, then the full rate.
        optimizer.param_groups[0]["lr"] = ADAM.learning_rate * min(1.0, (step + 1) / 2)
        optimizer.zero_grad()
        loss = -logprobs().sum() / num_tokens
        loss.backward()
        if step == 0:
            results["gradients"] = named((n, p.grad) for n, p in model.named_parameters())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        results["steps"].append({"loss": loss.item(), "grad_norm": norm.item()})
    results["weights"] = named((n, p.detach()) for n, p in model.named_parameters())
    model.zero_grad()
    loss, metrics = GRPO(
        logprobs(),
        batch,
        global_valid_seqs=torch.tensor(float(len(LENGTHS))),
        global_valid_tokens=num_tokens.float(),
    )
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    results["grpo"] = {**{name: value.item() for name, value in metrics.items()}, "grad_norm": norm}
    return results


def error(actual: Any, expected: Any) -> float:
    actual, expected = torch.as_tensor(actual).double(), torch.as_tensor(expected).double()
    assert actual.shape == expected.shape
    assert actual.isfinite().all()
    if torch.equal(actual, expected):
        return 0.0
    return float((actual - expected).abs().max() / expected.abs().max())


def worst(actual: dict[str, Any], expected: dict[str, Any]) -> float:
    assert actual.keys() == expected.keys()
    return max(error(actual[name], expected[name]) for name in expected)


def errors(actual: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    """Returns one rank's row of the table."""
    rows, steps = actual["rows"], list(zip(actual["steps"], expected["steps"], strict=True))
    logprobs = expected["logprobs"][rows]
    return {
        "logits": error(actual["logits"], expected["logits"][rows]),
        "logprobs": error(actual["logprobs"], logprobs),
        "logprobs of a step": error(actual["logprobs of a step"], logprobs),
        "loss": max(error(a["loss"], b["loss"]) for a, b in steps),
        "gradient norm": max(error(a["grad_norm"], b["grad_norm"]) for a, b in steps),
        "gradients": worst(actual["packed"], expected["gradients"]),
        f"weights after {NUM_STEPS} steps": worst(actual["weights"], expected["weights"]),
        "GRPO metrics": worst({k: actual["grpo"][k] for k in expected["grpo"]}, expected["grpo"]),
        "logprobs, padded": error(actual["padded logprobs"], logprobs),
        "gradients, padded": worst(actual["padded"], expected["gradients"]),
        "gradients, packed to padded": worst(actual["packed"], actual["padded"]),
    }


def as_markdown(table: dict[tuple[str, ...], dict[str, float]]) -> str:
    columns = ["model", "backend", "layout", "ranks", *next(iter(table.values()))]
    lines = [columns, ["---"] * 4 + ["---:"] * (len(columns) - 4)]
    lines += [[*case, *(f"{e:.1e}" for e in row.values())] for case, row in table.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


@pytest.mark.parametrize(
    "case",
    [dtensor("FSDP 2"), pytest.param(megatron("2x1", 2), marks=pytest.mark.slow)],
    ids=lambda case: case.layout,
)
def test_two_ranks_match_the_gradients_of_the_plain_loop(
    folders: dict[str, Path], case: Case
) -> None:
    folder = folders[case.model]
    expected = plain(folder)["gradients"]
    for actual in run_ranks(gradients, folder, case.training, world_size=2):
        assert worst(actual, expected) <= TOLERANCE


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> dict[str, dict[str, Any]]:
    return {name: plain(folder) for name, folder in folders.items()}


@pytest.mark.thorough
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("group", CASES, ids=name_of)
def test_every_layout_of_both_backends_matches_the_plain_loop(
    folders: dict[str, Path],
    expected: dict[str, dict[str, Any]],
    group: tuple[int, list[Case]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    num_ranks, cases = group
    run: Callable[[list[Case]], list[dict[str, Any]]] = lambda cases: [  # noqa: E731
        measured(folders[case.model], case.training) for case in cases
    ]
    table: dict[tuple[str, ...], dict[str, float]] = {}
    ranks = run_ranks(run, cases, world_size=num_ranks)
    for case, *actual in zip(cases, *ranks, strict=True):
        rows = [errors(of_rank, expected[case.model]) for of_rank in actual]
        case_key = (case.model, case.training.backend, case.layout, str(num_ranks))
        table[case_key] = {name: max(row[name] for row in rows) for name in rows[0]}
    with capsys.disabled():
        sys.stdout.write(f"\n\n{as_markdown(table)}\n\n")
    too_large = {
        (*case_key, name): actual
        for case_key, row in table.items()
        for name, actual in row.items()
        if not actual <= TOLERANCE
    }
    assert not too_large
