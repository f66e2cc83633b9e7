"""Checks a model's layers before a run; reads only its config.json."""

from pathlib import Path

from nemo_rl_core.backends.training.dtensor.loading import empty_model, refuse_other_heads
from nemo_rl_core.backends.training.dtensor.lora import adapter_targets
from nemo_rl_core.backends.training.dtensor.router_loss import refuse_router_loss
from nemo_rl_core.backends.training.dtensor.tensor_parallel import (
    check_tensor_parallel,
    tensor_parallel_plan,
)
from nemo_rl_core.config.training import DTensorTraining, Head


def check_layers(folder: Path, training: DTensorTraining, trained_heads: list[Head]) -> None:
    """Refuses a model whose layers do not fit the settings of its training.

    Args:
        folder: A folder with `config.json`; no weights are read.
        training: Adapters, ranks and the load-balancing loss.
        trained_heads: The heads with which the model is trained; none for a reference.

    Raises:
        ConfigError: As the set-up of the training worker does.
        ModelError: If a trained head is not in transformers.
    """
    check_tensor_parallel(folder, training)
    model = empty_model(folder, "lm")
    if training.tensor_parallel_size > 1:
        tensor_parallel_plan(model, training)
    if training.lora is not None and trained_heads:
        adapter_targets(model, training.lora)
    if training.router_aux_loss_coef and trained_heads:
        refuse_router_loss(model, has_adapters=training.lora is not None)
    if "scalar" in trained_heads:
        refuse_other_heads(folder)
