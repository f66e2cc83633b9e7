"""Which ranks share what: Megatron's process groups for one layout, set up and torn down.

The order of the axes is Megatron's own default, which is that of the whole project, slowest first:
pipeline, data, context, tensor. `rank = ((pp * DP + dp) * CP + cp) * TP + tp`. Experts lie over the
data ranks: neighbouring ones (after tensor ranks) hold different experts.
"""

import random

import numpy as np
import torch
import torch.distributed as dist

from nemo_rl_core.backends.training.megatron.cpu import run_on_cpu_where_cuda_is_absent
from nemo_rl_core.config.training import MegatronTraining
from nemo_rl_core.distributed.process_group import join_process_group
from nemo_rl_core.errors import ConfigError

_standing: tuple[object, dict[str, int | None]] | None = None
"""The process group and the sizes for which Megatron's groups stand."""


def initialize_topology(training: MegatronTraining, *, seed: int = 0) -> None:
    """Joins the ranks and makes Megatron's groups, unless they are there from an earlier set-up.

    Another layout that was there before is torn down. Its groups, with their connections, threads
    and buffers, last as long as the process does, which is why the same ones are kept.

    Args:
        training: The sizes of the axes; data parallelism takes the ranks that are left.
        seed: Of every random generator, Megatron's own included.

    Raises:
        ConfigError: If the number of ranks is no multiple of what one replica takes.
    """
    global _standing  # noqa: PLW0603  (Megatron's groups are global, too)
    run_on_cpu_where_cuda_is_absent()
    from megatron.core import parallel_state, tensor_parallel

    join_process_group()
    _refuse_indivisible_world(training, dist.get_world_size())
    # Megatron's word for a plain pipeline is None.
    virtual_stages = training.virtual_pipeline_size if training.virtual_pipeline_size > 1 else None
    sizes = {
        "tensor_model_parallel_size": training.tensor_parallel_size,
        "pipeline_model_parallel_size": training.pipeline_parallel_size,
        "virtual_pipeline_model_parallel_size": virtual_stages,
        "context_parallel_size": training.context_parallel_size,
        "expert_model_parallel_size": training.expert_parallel_size,
    }
    layout = dist.group.WORLD, sizes
    if _standing != layout:
        tear_down_topology()
        parallel_state.initialize_model_parallel(**sizes, order="tp-cp-ep-dp-pp")
        _standing = layout
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def tear_down_topology() -> None:
    """Leaves Megatron's groups, but not the process group itself; without any, does nothing."""
    global _standing  # noqa: PLW0603
    from megatron.core import parallel_state

    _standing = None
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()


def _refuse_indivisible_world(training: MegatronTraining, num_ranks: int) -> None:
    per_replica = training.ranks_per_replica
    if num_ranks % per_replica:
        raise ConfigError(
            "the ranks cannot be divided into whole replicas",
            expected=f"a multiple of {per_replica} ranks (tensor {training.tensor_parallel_size} x "
            f"pipeline {training.pipeline_parallel_size} x "
            f"context {training.context_parallel_size})",
            got=f"{num_ranks} ranks",
            fix="change the number of workers or a size of MegatronTraining",
        )
    # Experts are spread over the data and context ranks; each is split over the tensor ranks.
    sharing = num_ranks // (training.tensor_parallel_size * training.pipeline_parallel_size)
    if sharing % training.expert_parallel_size:
        raise ConfigError(
            "the experts cannot be spread over the data-parallel ranks",
            expected=f"an expert_parallel_size that divides {sharing}",
            got=str(training.expert_parallel_size),
            fix="change the number of workers or expert_parallel_size",
        )
