"""What `training.float8` changes in the speed of a plan, and which GPUs have it.

Nothing of it is measured on a GPU: products take the same share of the peak as in 16 bits, and the
rounding the time of its bytes. This stands apart from the memory, which chooses settings and so is
in the keys of stages.
"""

from nemo_rl_core.config.training import DTensorTraining
from nemo_rl_core.planning.accelerators import Accelerator
from nemo_rl_core.planning.float8 import recipe_of
from nemo_rl_core.planning.load import Layout, StageLoad

ROUNDING_BYTES = 33
"""Read and written for each number that torchao rounds, one operator after the other: its absolute
value, the largest of them, float32, scale, limits and type. Counted of its operators."""
_COMPILED_BYTES = 5
"""In two compiled kernels: 16 bits twice, and the result."""


def problem_of(load: StageLoad, gpu: Accelerator) -> str | None:
    """What keeps a kind of GPU from computing a stage in float8; None if nothing does."""
    recipe = recipe_of(load)
    if recipe == "none":
        return None
    if load.dtype != "bfloat16":
        return f"training.float8: {recipe} needs model.dtype: bfloat16 on GPUs"
    if gpu.flops("bfloat16") is not None and gpu.flops("float8") is None:
        return (
            f"training.float8: {recipe} needs GPUs of compute capability 8.9 or later (L4, L40S, "
            f"H100), and {gpu.name} has no such products; leave it out"
        )
    return None


def saved_seconds(
    load: StageLoad,
    layout: Layout,
    gpu: Accelerator,
    *,
    share: float,
    forward_passes: int,
    is_training: bool,
) -> float:
    """Of a token on one rank of tensor parallelism 1, less the rounding; negative where it is more.

    Args:
        load: The stage.
        layout: Of its ranks.
        gpu: Their kind.
        share: Of the peak, in products of either type.
        forward_passes: Of layers, one that computes them again counted.
        is_training: Whether there is a backward pass.
    """
    recipe, peak, exact = recipe_of(load), gpu.flops("float8"), gpu.flops(load.dtype)
    if recipe == "none" or peak is None or exact is None:
        return 0.0
    keeps_one = recipe == "rowwise_with_gw_hp"  # the gradient of weights
    products = forward_passes + (2 - keeps_one) * is_training
    flops = 2.0 * load.sizes.num_layers * load.sizes.linear_weights * products
    saved = flops / share * (1 / exact - 1 / peak)
    moved = _rounded(load, layout, forward_passes, is_training=is_training) * _bytes_each(load)
    return saved - moved / (gpu.memory_gb_per_second * 1e9)


def _rounded(load: StageLoad, layout: Layout, forward_passes: int, *, is_training: bool) -> float:
    """Numbers that are rounded for a token: of activations, gradients and weights."""
    assert load.training is not None
    config, sizes = load.training.config, load.sizes
    assert isinstance(config, DTensorTraining)
    is_dense = not sizes.num_experts
    inputs = 3 * sizes.hidden + sizes.queries + (2 * sizes.hidden + sizes.mlp_width) * is_dense
    outputs = sizes.queries + 2 * sizes.keys + sizes.hidden
    outputs += (2 * sizes.mlp_width + sizes.hidden) * is_dense
    rounds_all = config.float8 != "rowwise_with_gw_hp"
    backward = (inputs + 2 * outputs if rounds_all else outputs) * is_training
    weights = sizes.linear_weights * (forward_passes + is_training)
    if layout.is_wrapped and config.gathers_in_float8:
        weights /= layout.shards
    of_weights = weights / (load.training.max_tokens_per_microbatch / layout.context)
    return sizes.num_layers * (inputs * forward_passes + backward + of_weights)


def _bytes_each(load: StageLoad) -> int:
    config = load.training and load.training.config
    assert isinstance(config, DTensorTraining)
    return _COMPILED_BYTES if config.compile else ROUNDING_BYTES
