"""The decoder and the layers of a transformers model, whatever they are called in its class."""

import inspect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def decoder_of(model: Any) -> Any:
    """The module that computes hidden states from token ids.

    Some classes name another module in `get_decoder`, such as their head or themselves.

    Args:
        model: A transformers model around a decoder.
    """
    children = [each for each in model.children() if hasattr(each, "config")]
    candidates = (model.get_decoder(), model.base_model, *children)
    named = (each for each in candidates if each is not model and takes(each, "input_ids"))
    return next(named, model.get_decoder())


def layers_of(model: Any) -> "list[torch.nn.Module]":
    """The decoder's layers: its module list with the most weights; empty without any list."""
    import torch

    lists = [each for each in decoder_of(model).modules() if isinstance(each, torch.nn.ModuleList)]
    sizes = [sum(weight.numel() for weight in each.parameters()) for each in lists]
    return list(lists[sizes.index(max(sizes))]) if lists else []


def takes(module: Any, option: str) -> bool:
    """Whether a module's forward pass has a parameter of that name."""
    return option in inspect.signature(module.forward).parameters


def accepted(module: Any, options: dict[str, Any]) -> dict[str, Any]:
    """The options that a module's forward pass can be called with."""
    parameters = inspect.signature(module.forward).parameters.values()
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return options
    return {name: value for name, value in options.items() if takes(module, name)}
