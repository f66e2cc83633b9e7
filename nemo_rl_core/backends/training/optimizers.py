"""AdamW over named parameters."""

from collections.abc import Iterable

import torch

from nemo_rl_core.config.training import OptimizerConfig


def build_optimizer(
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]], config: OptimizerConfig
) -> torch.optim.Optimizer:
    """AdamW over the parameters that take gradients, in one group."""
    return torch.optim.AdamW(
        [parameter for _, parameter in named_parameters if parameter.requires_grad],
        lr=config.learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_epsilon,
        weight_decay=config.weight_decay,
        fused=True,
    )
