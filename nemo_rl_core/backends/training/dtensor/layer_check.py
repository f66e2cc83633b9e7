"""Check of a model's layers before a run, from its config.json alone."""

from pathlib import Path

from nemo_rl_core.backends.training.dtensor.loading import empty_model
from nemo_rl_core.backends.training.dtensor.lora import adapter_targets
from nemo_rl_core.backends.training.dtensor.tensor_parallel import (
    check_tensor_parallel,
    tensor_parallel_plan,
)
from nemo_rl_core.config.training import DTensorTraining


def check_layers(folder: Path, training: DTensorTraining, *, is_trained: bool) -> None:
    """Refuses a model whose layers do not fit the adapters or the tensor ranks.

    Args:
        folder: A folder with `config.json`; no weights are read.
        training: Adapters and ranks.
        is_trained: Whether the model is trained, not only a reference, which has no adapters.

    Raises:
        ConfigError: As the set-up of the training worker does.
    """
    check_tensor_parallel(folder, training)
    model = empty_model(folder, "lm")
    if training.tensor_parallel_size > 1:
        tensor_parallel_plan(model, training)
    if training.lora is not None and is_trained:
        adapter_targets(model, training.lora)
