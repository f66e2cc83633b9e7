"""Saving of trained models as transformers folders."""

from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from nemo_rl_core.checkpoints.tensors import save_weights
from nemo_rl_core.distributed.process_group import rank


def save_model(
    folder: Path, model: Any, tokenizer: Any, named_weights: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """Writes config, tokenizer and weights in the layout of `from_pretrained`.

    The model's `save_pretrained` is not used, since it gathers all weights before writing.

    Args:
        folder: Created by rank 0, the only writer.
        model: A transformers model, sharded or not.
        tokenizer: The model's tokenizer.
        named_weights: Whole tensors under the names of `as_published`, tied ones once. Every rank
            iterates to the end, since gathering is a collective.

    Raises:
        StoreError: If writing fails.
    """
    if rank() != 0:
        deque(named_weights, maxlen=0)
        return
    folder.mkdir(parents=True, exist_ok=True)
    # FSDP2 changes class names, which are needed to load the folder again.
    model.config.architectures = [type(model).__name__.removeprefix("FSDP")]
    model.config.dtype = "float32"
    model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    save_weights(folder, named_weights)


def as_published(
    model: Any, named_weights: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Converts weights to the names and shapes of the published architecture.

    Converted tensor by tensor: transformers merges several published tensors into one (the experts
    of a layer), but never splits one.
    """
    from transformers.core_model_loading import revert_weight_conversion

    ignored = set(model._keys_to_ignore_on_save or ())
    for name, tensor in named_weights:
        if name not in ignored:
            yield from revert_weight_conversion(model, {name: tensor}).items()
