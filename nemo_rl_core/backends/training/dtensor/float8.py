"""Matrix products of linear layers in float8, forward and backward, with torchao.

Parameters, gradients and the optimizer's state stay in float32. On a CPU the operands are rounded
in the same way and multiplied in float32 (torchao's emulation).
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear

from nemo_rl_core.config.model import DType
from nemo_rl_core.config.training import DTensorTraining, require_torchao
from nemo_rl_core.distributed.process_group import local_device
from nemo_rl_core.errors import ConfigError
from nemo_rl_core.planning.model_parts import layers_of

_LOG = logging.getLogger(__name__)
_CAPABILITY = (8, 9)
_MULTIPLE = 16
"""Divisor of both dimensions of a matrix that the kernels support."""
_ROUTERS = ("gate", "router")
"""Names of the layers that choose experts; rounding their scores could change the choice."""


def convert_linear_layers(
    model: Any, training: DTensorTraining, *, dtype: DType, is_sharded: bool
) -> None:
    """Converts the linear layers of the decoder to float8, in place; call it before sharding.

    Modules outside the decoder's layers (such as embedding and head), routers, and layers with a
    dimension that is not a multiple of 16 times the tensor-parallel ranks are not converted.
    Neither are experts that share one parameter, which are not linear layers.
    """
    if training.float8 == "none":
        return
    _import_torchao(training.float8)
    device = local_device()
    _refuse_device(training.float8, dtype=dtype, device=device)
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = replace(
        Float8LinearConfig.from_recipe_name(training.float8),
        emulate=device.type == "cpu",
        # Gradients of weights are products over a micro-batch's tokens, whose number varies.
        pad_inner_dim=True,
        enable_fsdp_float8_all_gather=is_sharded and training.gathers_in_float8,
    )
    multiple = _MULTIPLE * training.tensor_parallel_size
    selected = _chosen_layers(model, multiple)
    if not selected:
        raise ConfigError(
            f"training.float8: {training.float8} applies to no layer of {type(model).__name__}",
            expected=f"linear layers whose sizes are multiples of {multiple}",
            got="none in the decoder's layers",
            fix="leave training.float8 out",
        )
    convert_to_float8_training(
        model, config=config, module_filter_fn=lambda _, name: name in selected
    )
    if config.emulate:
        for layer in _float8_layers(model):
            layer.forward = partial(_emulated, layer)
    _LOG.info(
        "training.float8: %s in %d linear layers%s",
        training.float8,
        len(selected),
        ", emulated on the CPU" if config.emulate else "",
    )


def refresh_scales(model: Any) -> None:
    """Updates the scales of weights that are gathered in float8; call it when they have changed.

    Reduces all scales at once instead of one per matrix. A collective if the model is sharded.
    """
    if any(
        isinstance(layer.weight, DTensor) and _is_wrapped(layer.weight._local_tensor)
        for layer in _float8_layers(model)
    ):
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

        precompute_float8_dynamic_scale_for_fsdp(model)


@contextmanager
def in_high_precision(model: Any) -> Iterator[None]:
    """Context in which float8 layers multiply without rounding; not for training.

    Weights that were gathered in float8 are rounded already and stay so.
    """
    layers = list(_float8_layers(model))
    forwards = [vars(layer).get("forward") for layer in layers]
    for layer in layers:
        layer.forward = partial(_exact, layer)
    try:
        yield
    finally:
        for layer, forward in zip(layers, forwards, strict=True):
            if forward is None:
                del layer.forward
            else:
                layer.forward = forward


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a parameter without the wrapper for float8 gathering, over the same memory."""
    if not isinstance(tensor, DTensor):
        return tensor
    shard: Any = tensor._local_tensor
    if not _is_wrapped(shard):
        return tensor
    return DTensor.from_local(
        shard._tensor,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def _import_torchao(recipe: str) -> None:
    require_torchao(recipe)
    before = logging.root.manager.disable
    # It warns about kernels for other machines, which float8 does not use.
    logging.disable(logging.WARNING)
    try:
        import torchao.float8  # noqa: F401
    finally:
        logging.disable(before)


def _chosen_layers(model: Any, multiple: int) -> set[str]:
    layers = layers_of(model)
    in_layers = {id(module) for layer in layers for module in layer.modules()}
    return {
        name
        for name, module in model.named_modules()
        if id(module) in in_layers
        and isinstance(module, torch.nn.Linear)
        and name.rpartition(".")[2] not in _ROUTERS
        and all(size % multiple == 0 for size in module.weight.shape)
    }


def _refuse_device(recipe: str, *, dtype: DType, device: torch.device) -> None:
    if device.type == "cpu":
        return
    capability = torch.cuda.get_device_capability(device)
    if capability >= _CAPABILITY and dtype == "bfloat16":
        return
    raise ConfigError(
        f"training.float8: {recipe} cannot be computed here",
        expected="a GPU of compute capability 8.9 or later (L4, L40S, H100), and model.dtype: "
        "bfloat16",
        got=f"compute capability {'.'.join(map(str, capability))}, {dtype}",
        fix="leave training.float8 out",
    )


def _float8_layers(model: Any) -> Iterator[Any]:
    return (each for each in model.modules() if type(each).__name__ == "Float8Linear")


def _emulated(layer: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Applies CPU autocast, which torchao only does on GPUs."""
    if torch.is_autocast_enabled("cpu"):
        hidden = hidden.to(torch.get_autocast_dtype("cpu"))
    result: torch.Tensor = type(layer).forward(layer, hidden)
    return result


def _exact(layer: Any, hidden: torch.Tensor) -> torch.Tensor:
    return linear(hidden, _in_high_precision(layer.weight), layer.bias)


def _in_high_precision(weight: Any) -> torch.Tensor:
    if isinstance(weight, DTensor):  # gathered over data ranks, and split over tensor ranks
        local = _in_high_precision(weight._local_tensor)
        return DTensor.from_local(local, weight.device_mesh, weight.placements, run_check=False)
    is_rounded = hasattr(weight, "to_original_precision")
    exact: torch.Tensor = weight.to_original_precision() if is_rounded else weight
    return exact


def _is_wrapped(shard: torch.Tensor) -> bool:
    return type(shard).__name__ == "WeightWithDynamicFloat8CastTensor"
