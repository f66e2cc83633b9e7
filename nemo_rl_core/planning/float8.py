"""Effects of `training.float8` on the memory of a plan: gathered weights and rounding."""

from nemo_rl_core.config.training import DTensorTraining, Float8Recipe
from nemo_rl_core.planning.load import Layout, StageLoad

_ROUNDING_BYTES = 9
"""Bytes per value of an operand while it is rounded: two float32 copies and the result."""


def recipe_of(load: StageLoad) -> Float8Recipe:
    """Returns the float8 recipe of a stage; `none` without training or with another backend."""
    config = load.training and load.training.config
    return config.float8 if isinstance(config, DTensorTraining) else "none"


def bytes_less(load: StageLoad, layout: Layout, width: int) -> float:
    """Returns the bytes per layer that rounded matrices save in gathering or casting."""
    if recipe_of(load) == "none":
        return 0.0
    config = load.training and load.training.config
    assert isinstance(config, DTensorTraining)
    if layout.is_wrapped and not config.gathers_in_float8:
        return 0.0
    # Autocast would keep a copy of unsharded weights.
    return (width - layout.is_wrapped) * load.sizes.linear_weights / layout.tensor


def rounding_gib(load: StageLoad, layout: Layout) -> float:
    """Returns the additional GiB for rounding the largest operand of a layer."""
    if recipe_of(load) == "none":
        return 0.0
    assert load.training is not None and isinstance(load.training.config, DTensorTraining)
    sizes = load.sizes
    widest = sizes.queries if sizes.num_experts else sizes.mlp_width
    tokens = load.training.max_tokens_per_microbatch / layout.context
    operand = max(tokens * widest, sizes.hidden * widest) / layout.tensor
    width = 1 if load.training.config.compile else _ROUNDING_BYTES
    return operand * width / 2**30
