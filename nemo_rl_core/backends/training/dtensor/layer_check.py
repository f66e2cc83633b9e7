"""Checks of a model's layers before a run, from its config.json only."""

from pathlib import Path

from nemo_rl_core.backends.training.dtensor.lora import adapter_targets
from nemo_rl_core.backends.training.dtensor.router_loss import refuse_router_loss
from nemo_rl_core.backends.training.dtensor.tensor_parallel import (
    check_tensor_parallel,
    tensor_parallel_plan,
)
from nemo_rl_core.config.training import DTensorTraining, Head
from nemo_rl_core.model_files.loading import empty_model, require_scalar_head


def check_layers(folder: Path, training: DTensorTraining, trained_heads: list[Head]) -> None:
    """Raises the error that a training worker's setup would raise for a model's layers."""
    check_tensor_parallel(folder, training)
    model = empty_model(folder, "lm")
    if training.tensor_parallel_size > 1:
        tensor_parallel_plan(model, training)
    if training.lora is not None and trained_heads:
        adapter_targets(model, training.lora)
    if training.router_aux_loss_coef and trained_heads:
        refuse_router_loss(model, has_adapters=training.lora is not None)
    if "scalar" in trained_heads:
        require_scalar_head(folder)
