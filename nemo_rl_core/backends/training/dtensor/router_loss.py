"""The load-balancing loss of a mixture of experts."""

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from nemo_rl_core.errors import ConfigError
from nemo_rl_core.planning.model_parts import decoder_of

_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")
_OTHER_LOSSES: Final = ("doge", "llama4_text")
"""Model types with a coefficient in the config, but without the loss of Switch Transformer."""


def refuse_router_loss(model: Any, *, has_adapters: bool) -> None:
    """Raises `ConfigError` if a model has no load-balancing loss in transformers."""
    text = model.config.get_text_config()
    recorders = _recorders(model)
    has_loss = any(hasattr(text, name) for name in _COEFFICIENTS)
    if (
        not has_loss
        or text is not model.config
        or text.model_type in _OTHER_LOSSES
        or not any(_has_router(model, each) for each in recorders)
    ):
        raise ConfigError(
            f"{type(model).__name__} has no load-balancing loss that can be trained",
            expected="a text model with experts whose config in transformers has a "
            "router_aux_loss_coef, such as mixtral, qwen3_moe or gpt_oss",
            got=f"model_type {text.model_type}, {'with' if has_loss else 'without'} that field",
            fix="leave training.router_aux_loss_coef out",
        )
    if has_adapters and any(each.target_class is torch.nn.Linear for each in recorders):
        raise ConfigError(
            f"{type(model).__name__} cannot be trained with both lora and a load-balancing loss",
            expected="one of the two: transformers would record the outputs of the router's "
            "adapters as router logits",
            got=f"model_type {text.model_type}",
            fix="leave training.router_aux_loss_coef or training.lora out",
        )


def _recorders(model: Any) -> list[Any]:
    recorders = (decoder_of(model)._can_record_outputs or {}).get("router_logits", [])
    return recorders if isinstance(recorders, list) else [recorders]


def _has_router(model: Any, recorder: Any) -> bool:
    return any(
        isinstance(module, recorder.target_class)
        and f".{recorder.layer_name or name}." in f".{name}."
        for name, module in decoder_of(model).named_modules()
    )


def load_balancing_losses(
    router_logits: Sequence[Tensor], sequence_ids: Tensor, *, num_sequences: int, top_k: int
) -> Tensor:
    """Returns the load-balancing loss of each sequence, as transformers does for a batch of one.

    It is `E * sum_e f_e * p_e`, where `f_e` is how often expert e is among the `top_k` most likely
    experts of a token and `p_e` is the mean probability of expert e, both per token and layer:
    Switch Transformer (Fedus et al., 2021), equations 4 to 6, per sequence as in DeepSeek-V3
    (2024), section 2.1.2. It does not depend on other sequences, and therefore neither on
    micro-batches nor on ranks.

    Args:
        router_logits: `[N, E]` logits of each layer with experts.
        sequence_ids: `[N]` sequence of each token, or `num_sequences` for padding.

    Returns:
        `[B]` float32; `top_k` if all experts are used equally, larger otherwise.
    """
    num_experts = router_logits[0].shape[-1]
    sums = torch.zeros(2, num_sequences + 1, num_experts, device=sequence_ids.device)
    for logits in router_logits:
        probs = logits.float().softmax(-1)
        chosen = torch.zeros_like(probs).scatter(-1, probs.topk(top_k).indices, 1.0)
        sums = sums.index_add(1, sequence_ids, torch.stack([chosen, probs]))
    # Probabilities of a token sum to 1.
    frequencies, probabilities = sums[:, :num_sequences] / sums[1, :num_sequences].sum(-1)[:, None]
    losses: Tensor = num_experts * (frequencies * probabilities).sum(-1)
    return losses
