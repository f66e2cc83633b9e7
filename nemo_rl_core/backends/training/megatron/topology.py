"""Setup and teardown of Megatron's process groups for a layout.

The order of the axes is Megatron's default, as everywhere in this project, slowest first: pipeline,
data, context, tensor. `rank = ((pp * DP + dp) * CP + cp) * TP + tp`. Experts are distributed over
data ranks: neighboring ones (after tensor ranks) have different experts.
"""

import random
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from nemo_rl_core.backends.training.megatron.cpu import run_on_cpu_where_cuda_is_absent
from nemo_rl_core.backends.training.megatron.settings import parallel_sizes
from nemo_rl_core.config.training import MegatronTraining
from nemo_rl_core.distributed.collective_check import check_collectives
from nemo_rl_core.distributed.process_group import collective_timeout, join_process_group
from nemo_rl_core.errors import ConfigError

_current_layout: tuple[object, dict[str, int | None]] | None = None
"""The process group and the sizes of the current Megatron groups."""


def initialize_topology(training: MegatronTraining, *, seed: int = 0) -> None:
    """Joins the ranks and creates Megatron's groups, unless an earlier setup created them.

    A previous, different layout is torn down. Process groups, with their connections, threads and
    buffers, exist until the process ends, so groups of the same layout are reused.
    """
    global _current_layout  # noqa: PLW0603  (Megatron's groups are global, too)
    run_on_cpu_where_cuda_is_absent()
    from megatron.core import parallel_state, tensor_parallel

    join_process_group()
    check_collectives({})  # the world first: creating Megatron's groups is a collective
    _refuse_indivisible_world(training, dist.get_world_size())
    sizes = parallel_sizes(training)
    layout = dist.group.WORLD, sizes
    if _current_layout != layout:
        tear_down_topology()
        parallel_state.initialize_model_parallel(
            **sizes,
            order="tp-cp-ep-dp-pp",
            # The optimizer does not use them, and one of them would ignore the timeout.
            create_gloo_process_groups=False,
            distributed_timeout_minutes=collective_timeout() / timedelta(minutes=1),
        )
        _current_layout = layout
        check_collectives(
            {
                "tensor": parallel_state.get_tensor_model_parallel_group(),
                "pipeline": parallel_state.get_pipeline_model_parallel_group(),
                "context": parallel_state.get_context_parallel_group(),
                "data": parallel_state.get_data_parallel_group(),
                "expert": parallel_state.get_expert_model_parallel_group(),
            }
        )
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def tear_down_topology() -> None:
    """Leaves Megatron's groups, but not the process group itself; no-op without groups."""
    global _current_layout  # noqa: PLW0603
    from megatron.core import parallel_state

    _current_layout = None
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()


def _refuse_indivisible_world(training: MegatronTraining, num_ranks: int) -> None:
    per_replica = training.ranks_per_replica
    if num_ranks % per_replica:
        raise ConfigError(
            "the ranks cannot be divided into complete replicas",
            expected=f"a multiple of {per_replica} ranks (tensor {training.tensor_parallel_size} x "
            f"pipeline {training.pipeline_parallel_size} x "
            f"context {training.context_parallel_size})",
            got=f"{num_ranks} ranks",
            fix="change the number of workers or a size of MegatronTraining",
        )
    # Experts are distributed over the data and context ranks; each is split over the tensor ranks.
    sharing = num_ranks // (training.tensor_parallel_size * training.pipeline_parallel_size)
    if sharing % training.expert_parallel_size:
        raise ConfigError(
            "the experts cannot be distributed over the data-parallel ranks",
            expected=f"an expert_parallel_size that divides {sharing}",
            got=str(training.expert_parallel_size),
            fix="change the number of workers or expert_parallel_size",
        )
