"""Trained models as transformers folders."""

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
    """Writes config, tokenizer and weights as `from_pretrained` reads them.

    Not by the model's own `save_pretrained`, which gathers all weights before it writes the first.

    Args:
        folder: Made by rank 0, which alone writes.
        model: A transformers model, sharded or not.
        tokenizer: That of the model.
        named_weights: Whole tensors as `as_published` names them, tied ones once. Every rank reads
            the stream to its end, since making one tensor whole may take them all.

    Raises:
        StoreError: If the disk refuses.
    """
    if rank() != 0:
        deque(named_weights, maxlen=0)
        return
    folder.mkdir(parents=True, exist_ok=True)
    # FSDP2 changes the class of what it shards; the name is what loads the folder again.
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
    """The names and shapes that the architecture was published with, where transformers' differ.

    Undone tensor by tensor: transformers keeps several published tensors as one (the experts of a
    layer), never one as several.
    """
    from transformers.core_model_loading import revert_weight_conversion

    ignored = set(model._keys_to_ignore_on_save or ())
    for name, tensor in named_weights:
        if name not in ignored:
            yield from revert_weight_conversion(model, {name: tensor}).items()
