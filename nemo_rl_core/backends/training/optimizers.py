"""AdamW over named parameters, and its learning-rate schedule."""

import math
from collections.abc import Callable, Iterable
from importlib import import_module

import torch
from torch.distributed.tensor import DTensor

from nemo_rl_core.config.optimizer import (
    ConstantSchedule,
    CosineSchedule,
    LinearSchedule,
    OptimizerConfig,
)
from nemo_rl_core.errors import ConfigError, ConsistencyError
from nemo_rl_core.model_files.quantized import require_bitsandbytes


def build_optimizer(
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]], config: OptimizerConfig
) -> torch.optim.Optimizer:
    """Creates AdamW (Loshchilov and Hutter, 2019) over the trained parameters, in one group.

    Weight decay applies to all of them. Set the learning rate before each update; see
    `learning_rate_at`.
    """
    trained = [parameter for _, parameter in named_parameters if parameter.requires_grad]
    if not trained:
        raise ConfigError("the model has no parameter that takes gradients", fix="unfreeze some")
    betas = (config.adam_beta1, config.adam_beta2)
    if config.moments == "float32":
        return torch.optim.AdamW(
            trained,
            lr=config.learning_rate,
            betas=betas,
            eps=config.adam_epsilon,
            weight_decay=config.weight_decay,
            fused=True,
        )
    if any(isinstance(parameter, DTensor) for parameter in trained):
        raise ConfigError(
            "8-bit moments are not supported for parameters that are sharded over ranks",
            expected="moments: float32, or one rank",
            got="moments: 8bit",
            fix="set moments: float32; sharding already splits them over the ranks",
        )
    require_bitsandbytes("moments: 8bit")
    # Imported by name, since it is installed only on machines with a GPU.
    adamw: Callable[..., torch.optim.Optimizer] = import_module("bitsandbytes.optim").AdamW8bit
    return adamw(
        trained,
        lr=config.learning_rate,
        betas=betas,
        eps=config.adam_epsilon,
        weight_decay=config.weight_decay,
    )


def clip_gradients(
    parameters: Iterable[torch.nn.Parameter], max_norm: float, *, step: int
) -> float:
    """Scales gradients in place to a norm of at most `max_norm`; returns the previous norm."""
    trained = [parameter for parameter in parameters if parameter.grad is not None]
    total = torch.nn.utils.get_total_norm([p.grad for p in trained if p.grad is not None])
    total = total.full_tensor() if isinstance(total, DTensor) else total
    norm = float(total.item())
    require_finite_norm(norm, step=step)
    torch.nn.utils.clip_grads_with_norm_(trained, max_norm, total)
    return norm


def require_finite_norm(norm: float, *, step: int) -> None:
    """Raises `ConsistencyError` if the gradient norm of an optimizer step is not finite."""
    if not norm < float("inf"):
        raise ConsistencyError(
            f"the gradient of optimizer step {step} is not finite",
            expected="a finite norm",
            got=str(norm),
            fix="lower learning_rate, or check whether this step has rewards or logprobs that are "
            "not finite",
        )


def learning_rate_at(update: int, config: OptimizerConfig) -> float:
    """Returns the learning rate of an update, counted from 1: linear warm-up, then the schedule.

    The last warm-up update has the full rate, from which the decay starts.

    Example:
        >>> config = OptimizerConfig(
        ...     learning_rate=1.0,
        ...     num_warmup_steps=2,
        ...     schedule=LinearSchedule(num_decay_steps=4, final_fraction=0.2),
        ... )
        >>> [round(learning_rate_at(update, config), 3) for update in range(1, 9)]
        [0.5, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2]
    """
    warmup = min(1.0, update / max(config.num_warmup_steps, 1))
    schedule = config.schedule
    if isinstance(schedule, ConstantSchedule):
        return config.learning_rate * warmup
    done = min(max(update - config.num_warmup_steps, 0) / schedule.num_decay_steps, 1.0)
    match schedule:
        case LinearSchedule():
            decay_left = 1.0 - done
        case CosineSchedule():
            decay_left = (1.0 + math.cos(math.pi * done)) / 2.0
    floor = schedule.final_fraction
    return config.learning_rate * warmup * (floor + (1.0 - floor) * decay_left)
