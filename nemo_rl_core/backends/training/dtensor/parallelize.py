"""Parallelization of a single-device model over the ranks, in one ordered function."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from nemo_rl_core.backends.training.dtensor.context_parallel import apply_context_parallel
from nemo_rl_core.backends.training.dtensor.float8 import convert_linear_layers, unwrapped
from nemo_rl_core.backends.training.dtensor.mesh import RankMesh
from nemo_rl_core.backends.training.dtensor.tensor_parallel import apply_tensor_parallel
from nemo_rl_core.checkpoints.weights import keeps_float32
from nemo_rl_core.config.model import DType
from nemo_rl_core.config.training import DTensorTraining
from nemo_rl_core.distributed.process_group import local_device
from nemo_rl_core.model_files.loading import SCALAR_HEAD
from nemo_rl_core.model_files.weights import allocate, plain_name
from nemo_rl_core.planning.model_parts import layers_of

_WITHIN = "call_within_root"


def parallelize(
    model: Any, training: DTensorTraining, mesh: RankMesh | None, *, dtype: DType
) -> Any:
    """Splits the model over context and tensor ranks, then shards it over data ranks, in place.

    The order matters: float8 replaces unsplit layers, recomputation and compilation apply to split
    ones, and FSDP2 shards the remaining dimensions of each weight.
    """
    convert_linear_layers(model, training, dtype=dtype, is_sharded=mesh is not None)
    if mesh is not None and training.context_parallel_size > 1:
        # Before tensor parallelism, so that sequence parallelism splits a part of the row further.
        apply_context_parallel(model, mesh.context_group)
    if mesh is not None and training.tensor_parallel_size > 1:
        apply_tensor_parallel(model, training, mesh.parameters["tensor"])
    for layer in layers_of(model):
        # Wraps `forward` only, so that FSDP2's hooks gather the weights before recomputation.
        if training.compile:
            # Compiled inside the checkpoint, since Dynamo skips a checkpoint and everything it
            # calls. Lengths of micro-batches differ, so a graph with static shapes would be wasted.
            layer.forward = torch.compile(layer.forward, dynamic=True)
        if training.recomputes:
            layer.forward = partial(
                checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
            )
    if mesh is None:
        # Quantized weights are on the device already, and cannot be moved.
        return model if getattr(model, "is_quantized", False) else model.to(local_device())
    return _shard(model, training, mesh, dtype)


def _shard(model: Any, training: DTensorTraining, mesh: RankMesh, dtype: DType) -> Any:
    axes = ("replica", "shard") if training.num_copies > 1 else ("shard",)
    options: dict[str, Any] = {
        "mesh": mesh.parameters[axes],
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=None if dtype == "float32" else getattr(torch, dtype),
            reduce_dtype=getattr(torch, training.reduce_dtype),
            cast_forward_inputs=False,  # autocast casts, but keeps the residual's dtype
        ),
        "offload_policy": CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
        if training.cpu_offload
        else OffloadPolicy(),
    }
    exact = {
        weight
        for name, weight in model.named_parameters()
        if name.startswith(f"{SCALAR_HEAD}.") or keeps_float32(model, plain_name(name))
    }
    for module in (*layers_of(model), model):
        _shard_module(module, exact, options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # The loss is divided by counts of the full step, so gradients are summed.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sums
    for group in _groups(model):
        group.reduce_scatter_unused_params = True
        group.post_backward = partial(_after_backward, group)
    allocate(model, torch.device("cpu") if training.cpu_offload else local_device())
    setattr(model, _WITHIN, MethodType(_within, model))
    register_fsdp_forward_method(model, _WITHIN)
    return model if training.cpu_offload else model.to(local_device())


def _shard_module(module: Any, exact: set[torch.nn.Parameter], options: dict[str, Any]) -> None:
    """Shards the weights of a module.

    Weights that stay in float32 get a second group, since FSDP2 uses one dtype per group.
    """
    second = [weight for weight in module.parameters() if weight in exact]
    fully_shard(module, ignored_params=exact, **options)
    if second:
        state, reduce_dtype = module._get_fsdp_state(), options["mp_policy"].reduce_dtype
        (group,) = state._fsdp_param_groups
        sizes = group.mesh_info, group.post_forward_mesh_info, group.device, None
        policies = MixedPrecisionPolicy(reduce_dtype=reduce_dtype), group.offload_policy
        state._fsdp_param_groups.append(FSDPParamGroup(second, group.modules, *sizes, *policies))


def _after_backward(group: Any) -> None:
    """Marks the weights that a pass has used on this rank, before FSDP2 gives the others zeros."""
    for parameter in group.fsdp_params:
        gathered = getattr(parameter, "_unsharded_param", None)
        if gathered is not None and gathered.grad is not None:
            parameter.is_used = True
    type(group).post_backward(group)


def _groups(model: Any) -> list[Any]:
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    return [group for module in modules for group in module._get_fsdp_state()._fsdp_param_groups]


def _within(_: Any, function: Any) -> Any:
    """Calls `function` while the weights outside the layers (embedding, head) are gathered."""
    return function()


def run_within(model: Any, function: Any) -> Any:
    """Calls a function that uses parts of the model, such as decoder and head.

    FSDP2 only gathers the weights of modules that are called. `function` may use all modules
    outside of the decoder's layers. It must return one tensor or a tuple of tensors.
    """
    return getattr(model, _WITHIN)(function) if isinstance(model, FSDPModule) else function()


def release(model: Any) -> None:
    """Frees weights that a forward pass without a backward pass left gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@contextmanager
def gathered_in_float32(model: Any) -> Iterator[None]:
    """Context in which ranks gather weights in float32, for comparisons before training.

    FSDP2 fixes the dtype when it sets up a group of weights, so each group is set up again.
    """
    groups = _groups(model)
    policies = [group.mp_policy for group in groups]
    _set_up_groups(model, groups, [MixedPrecisionPolicy() for _ in groups])
    try:
        yield
    finally:
        _set_up_groups(model, groups, policies)


def _set_up_groups(model: Any, groups: list[Any], policies: list[MixedPrecisionPolicy]) -> None:
    release(model)
    for group, policy in zip(groups, policies, strict=True):
        group.mp_policy = policy
        group._init_mp_dtypes()
        for parameter in group.fsdp_params:
            parameter.all_gather_outputs = []  # their dtype is the previous one
            vars(parameter).pop("_unsharded_param", None)


def sync_gradients(model: Any, training: DTensorTraining, *, is_last: bool) -> None:
    """Sets whether ranks exchange the gradients of the next backward pass or accumulate them.

    HSDP replicas accumulate their shards, which need no more memory than the final gradients.
    Gathered weights, the full model in 16 bits, are not kept between micro-batches.
    """
    model.set_requires_gradient_sync(is_last or training.gradient_sync != "last_microbatch")
    if training.num_copies > 1 and training.reduce_dtype == "float32":
        model.set_requires_all_reduce(is_last)


def drop_gradients(model: Any) -> None:
    """Drops accumulated gradients of an interrupted step that ranks have not exchanged."""
    for group in _groups(model):
        group._partial_reduce_output = None
        for parameter in group.fsdp_params:
            parameter.is_used = False
            parameter.unsharded_accumulated_grad = None
            if (unsharded := getattr(parameter, "_unsharded_param", None)) is not None:
                unsharded.grad = None


def drop_unused_gradients(model: Any) -> None:
    """Drops gradients of weights that no rank has used, so that AdamW does not decay them."""
    parameters = [parameter for group in _groups(model) for parameter in group.fsdp_params]
    used = torch.tensor([each.is_used for each in parameters], device=local_device()).int()
    dist.all_reduce(used, dist.ReduceOp.MAX)
    for parameter, is_used in zip(parameters, used.tolist(), strict=True):
        if not is_used:
            parameter.sharded_param.grad = None


def full_tensor(tensor: DTensor, dtype: torch.dtype) -> torch.Tensor:
    """Gathers a sharded tensor, as a collective of all ranks.

    Each rank rounds its shard to `dtype` before gathering; partial sums are reduced first.
    """
    shards = unwrapped(tensor).detach()
    if not any(each.is_partial() for each in tensor.placements):
        shards = shards.to(dtype)
    # Shards on the CPU are sent through the mesh's device.
    shards = shards.to(tensor.device_mesh.device_type)
    assert isinstance(shards, DTensor)
    return shards.full_tensor().to(dtype)
