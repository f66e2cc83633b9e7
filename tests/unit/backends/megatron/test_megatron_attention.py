"""Megatron's local layers over packed rows: boundaries compared with a dense mask."""

from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl_core.algorithms.sft.loss import NLLLoss
from nemo_rl_core.backends.training import packed_attention as kernels
from nemo_rl_core.backends.training.base import TrainingSetup
from nemo_rl_core.config.optimizer import OptimizerConfig
from nemo_rl_core.config.training import MegatronTraining
from nemo_rl_core.distributed.batched_data_dict import collate
from nemo_rl_core.distributed.local_ranks import run_ranks
from nemo_rl_core.errors import ConfigError

LENGTHS = [11, 4, 7, 2, 9, 3, 3, 8]


def one_step(folder: Path, **training: Any) -> tuple[torch.Tensor, dict[str, float], list[Any]]:
    """Returns logprobs, the metrics of a step, and the shapes that the kernel got."""
    from nemo_rl_core.backends.training.megatron import attention
    from nemo_rl_core.backends.training.megatron.backend import MegatronBackend

    seen: list[Any] = []

    def watched(query: torch.Tensor, *others: Any, **options: Any) -> torch.Tensor:
        seen.append(tuple(query.shape))
        return kernels.reference_attention(query, *others, **options)

    with pytest.MonkeyPatch.context() as patch:
        # The kernel only runs on GPUs; the reference computes the same on a CPU.
        patch.setitem(kernels.KERNELS, "varlen", watched)
        patch.setattr(attention, "unsupported_reasons", lambda *_, **__: [])
        backend = MegatronBackend()
        backend.setup(
            TrainingSetup(
                model_folder=folder,
                optimizer=OptimizerConfig(learning_rate=1e-2, adam_epsilon=1e-3),
                training=MegatronTraining(**training),
                max_tokens_per_microbatch=24,
            )
        )
        generator = torch.Generator().manual_seed(1)
        ids = [torch.randint(0, 16, (n,), generator=generator).tolist() for n in LENGTHS]
        batch = collate(ids, [[True] * n for n in LENGTHS])
        return backend.get_logprobs(batch), backend.train_step(batch, NLLLoss()), seen


def both(folder: Path, **training: Any) -> list[Any]:
    return [one_step(folder, attention=each, **training) for each in ("sdpa", "varlen")]


def compare(results: list[Any]) -> None:
    (want, want_step, unseen), (actual, found_step, seen) = results
    assert seen and not unseen
    assert all(len(shape) == 3 for shape in seen)  # tokens, heads, size
    torch.testing.assert_close(actual, want, rtol=1e-5, atol=1e-5)
    assert found_step["loss"] == pytest.approx(want_step["loss"], rel=1e-5)
    assert found_step["grad_norm"] == pytest.approx(want_step["grad_norm"], rel=1e-4)


@pytest.mark.thorough
def test_boundaries_match_a_dense_mask(tiny_model: Path) -> None:
    (results,) = run_ranks(both, tiny_model, world_size=1)
    compare(results)


@pytest.mark.thorough
def test_pipelines_and_recomputed_layers_use_the_boundaries_of_each_microbatch(
    tiny_model: Path,
) -> None:
    options = {"pipeline_parallel_size": 2, "activation_checkpointing": True}
    for results in run_ranks(both_of, tiny_model, options, world_size=2):
        compare(results)


def both_of(folder: Path, options: dict[str, Any]) -> list[Any]:
    return both(folder, **options)


def test_varlen_is_refused_on_cpus_and_with_context_parallelism() -> None:
    from types import SimpleNamespace

    from nemo_rl_core.backends.training.megatron.attention import takes_boundaries

    sizes = SimpleNamespace(kv_channels=64, num_attention_heads=12, num_query_groups=2)
    model = SimpleNamespace(config=sizes)
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    for training, device, fused, message in (
        (MegatronTraining(attention="varlen"), cpu, False, "only computes gradients on GPUs"),
        (MegatronTraining(attention="varlen"), cuda, True, "Transformer Engine is installed"),
        (
            MegatronTraining(attention="varlen", context_parallel_size=2),
            cuda,
            False,
            "context_parallel_size splits rows",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            takes_boundaries(model, training, dtype="bfloat16", device=device, fused=fused)
    auto = MegatronTraining()
    assert takes_boundaries(model, auto, dtype="bfloat16", device=cuda, fused=False)
    assert not takes_boundaries(model, auto, dtype="float32", device=cuda, fused=False)
    assert not takes_boundaries(model, auto, dtype="bfloat16", device=cpu, fused=False)


def test_rows_whose_scores_exceed_gpu_memory_are_refused() -> None:
    from types import SimpleNamespace

    from nemo_rl_core.backends.training.megatron.attention import refuse_dense_rows

    gib = 2**30
    # Qwen2.5-7B in bfloat16: 28 heads x 8192^2 pairs x (2 + 4 + 2) bytes are 14 GiB per layer.
    config = SimpleNamespace(
        num_layers=28,
        num_attention_heads=28,
        params_dtype=torch.bfloat16,
        recompute_granularity="full",
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        context_parallel_size=1,
    )
    refuse_dense_rows(config, [(1, 8192)], memory_bytes=14 * gib)
    with pytest.raises(ConfigError, match="14 GiB for 1 x 8192 tokens in 1 of 28 layers"):
        refuse_dense_rows(config, [(8, 64), (1, 8192)], memory_bytes=14 * gib - 1)
    config.recompute_granularity = None
    with pytest.raises(ConfigError, match="392 GiB for 1 x 8192 tokens in 28 of 28 layers"):
        refuse_dense_rows(config, [(1, 8192)], memory_bytes=80 * gib)
    refuse_dense_rows(config, [(8, 1024)], memory_bytes=49 * gib)
    config.tensor_model_parallel_size = config.pipeline_model_parallel_size = 2
    config.context_parallel_size = 2
    refuse_dense_rows(config, [(1, 8192)], memory_bytes=49 * gib)
