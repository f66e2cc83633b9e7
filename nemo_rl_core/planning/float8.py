"""What `training.float8` changes in the memory of a plan: what is gathered, and the rounding."""

from nemo_rl_core.config.float8 import Float8Recipe
from nemo_rl_core.config.training import DTensorTraining
from nemo_rl_core.planning.load import Layout, StageLoad

_ROUNDED_AT_ONCE = 9
"""Bytes of the largest operand while it is rounded: two copies in float32, and the result."""


def recipe_of(load: StageLoad) -> Float8Recipe:
    """The recipe of a stage; `none` where nothing is trained, or another backend trains it."""
    config = load.training and load.training.config
    return config.float8 if isinstance(config, DTensorTraining) else "none"


def bytes_less(load: StageLoad, layout: Layout, width: int) -> float:
    """Bytes of a layer that are not gathered or cast for products, since its matrices are rounded.

    Args:
        load: The stage.
        layout: Of its ranks.
        width: Bytes of a number in the type of products.
    """
    if recipe_of(load) == "none":
        return 0.0
    config = load.training and load.training.config
    assert isinstance(config, DTensorTraining)
    if layout.is_wrapped and not config.gathers_in_float8:
        return 0.0
    # Of weights that are whole, autocast would keep a copy.
    return (width - layout.is_wrapped) * load.sizes.linear_weights / layout.tensor


def rounding_gib(load: StageLoad, layout: Layout) -> float:
    """What the largest operand of a layer takes besides, while it is rounded."""
    if recipe_of(load) == "none":
        return 0.0
    assert load.training is not None and isinstance(load.training.config, DTensorTraining)
    sizes = load.sizes
    widest = sizes.queries if sizes.num_experts else sizes.mlp_width
    tokens = load.training.max_tokens_per_microbatch / layout.context
    operand = max(tokens * widest, sizes.hidden * widest) / layout.tensor
    each = 1 if load.training.config.compile else _ROUNDED_AT_ONCE
    return operand * each / 2**30
