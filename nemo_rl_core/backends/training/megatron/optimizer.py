"""Gradient buffers and Megatron's distributed AdamW around the chunks of a model."""

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import (
    ChainedOptimizer,
    MegatronOptimizer,
    clip_grads,
    get_megatron_optimizer,
)
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.utils import local_multi_tensor_l2_norm

from nemo_rl_core.backends.training.megatron.step import sum_gradients
from nemo_rl_core.backends.training.offload import optimizer_tensors
from nemo_rl_core.config.optimizer import OptimizerConfig


def wrap(models: list[Any]) -> list[DistributedDataParallel]:
    """Adds a float32 buffer to each chunk, in which gradients are summed over ranks."""
    config = models[0].config
    config.calculate_per_token_loss = True
    config.finalize_model_grads_func = sum_gradients
    if config.virtual_pipeline_model_parallel_size:
        # With two stages, a batch of messages would contain two in each direction between the same
        # ranks, and activations could be taken for gradients. With overlap, messages are separate.
        config.overlap_p2p_comm, config.batch_p2p_comm = True, False
    for model in models:
        _mark_split_parameters(model)
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        # Also used for one rank, so that checkpoints have one layout for any number of ranks.
        use_distributed_optimizer=True,
        overlap_grad_reduce=False,
    )
    return [
        DistributedDataParallel(config, ddp, model, disable_bucketing=index > 0)
        for index, model in enumerate(models)
    ]


def _mark_split_parameters(model: Any) -> None:
    """Marks parameters as split or replicated, for the gradient norm.

    Megatron only marks split parameters on initialization, which is disabled.
    """
    split_rows = (ColumnParallelLinear, VocabParallelEmbedding)
    for module in model.modules():
        if isinstance(module, (*split_rows, RowParallelLinear)) and module.weight is not None:
            dimension = 0 if isinstance(module, split_rows) else 1
            if not hasattr(module.weight, "tensor_model_parallel"):
                set_tensor_model_parallel_attributes(module.weight, True, dimension, 1)


def step_with_norm(optimizer: Any, norm: float) -> None:
    """Updates the weights without computing the gradient norm again, which waits for the GPU."""
    optimizer.get_grad_norm = lambda: norm
    try:
        optimizer.step()
    finally:
        del optimizer.get_grad_norm


def _l2_norm(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: list[list[torch.Tensor]], *_: Any
) -> tuple[torch.Tensor, None]:
    """Computes the `[1]` norm of all tensors, with the signature of `amp_C.multi_tensor_l2norm`."""
    norms = torch._foreach_norm(tensor_lists[0])
    return torch.linalg.vector_norm(torch.stack(norms)).reshape(1), None


def make_optimizer(
    chunks: list[DistributedDataParallel], options: OptimizerConfig, dtype: torch.dtype
) -> MegatronOptimizer:
    """Creates AdamW over the shards of all parameters, equal to `torch.optim.AdamW`.

    Weight decay includes biases and norms, as in torch and the dtensor backend, unlike Megatron's
    default.

    Args:
        dtype: Dtype of the parameters; with bfloat16 the optimizer also keeps float32 copies.
    """
    # Megatron's default, without Transformer Engine and apex, waits for the GPU for each tensor.
    if clip_grads.l2_norm_impl is local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = _l2_norm
    config = MegatronOptimizerConfig(
        optimizer="adam",
        lr=options.learning_rate,
        weight_decay=options.weight_decay,
        adam_beta1=options.adam_beta1,
        adam_beta2=options.adam_beta2,
        adam_eps=options.adam_epsilon,
        clip_grad=options.max_grad_norm,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=True,
    )
    return get_megatron_optimizer(
        config, chunks, config_overrides={}, use_gloo_process_groups=False
    )


def state_tensors(optimizer: MegatronOptimizer) -> Iterator[torch.Tensor]:
    """Yields the moments of all parameters and the copies that the optimizer updates."""
    if isinstance(optimizer, ChainedOptimizer):
        for part in optimizer.chained_optimizers:
            yield from state_tensors(part)
        return
    if optimizer.optimizer is None:  # this rank has no parameters
        return
    for group in optimizer.optimizer.param_groups:
        yield from group["params"]
    yield from optimizer_tensors(optimizer.optimizer)
