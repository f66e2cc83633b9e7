"""Effects of `training.float8` on the speed of a plan, and the GPUs that support it.

Not measured on a GPU: products are assumed to reach the same fraction of the peak as in 16 bits,
and rounding to take the time of its bytes. This is separate from the memory, which affects chosen
settings and therefore the keys of stages.
"""

from nemo_rl_core.config.training import DTensorTraining
from nemo_rl_core.planning.accelerators import Accelerator
from nemo_rl_core.planning.float8 import recipe_of
from nemo_rl_core.planning.load import Layout, StageLoad

ROUNDING_BYTES = 33
"""Bytes read and written per value that torchao rounds, operator by operator: absolute value,
maximum, float32, scale, limits and dtype. Counted from its operators."""
_COMPILED_BYTES = 5
"""The same with two compiled kernels: both read 2 bytes, and one writes the result of 1 byte."""


def problem_of(load: StageLoad, gpu: Accelerator) -> str | None:
    """Returns the reason why a kind of GPU cannot compute a stage in float8, else None."""
    recipe = recipe_of(load)
    if recipe == "none":
        return None
    if load.dtype != "bfloat16":
        return f"training.float8: {recipe} needs model.dtype: bfloat16 on GPUs"
    if gpu.flops("bfloat16") is not None and gpu.flops("float8") is None:
        return (
            f"training.float8: {recipe} needs GPUs of compute capability 8.9 or later (L4, L40S, "
            f"H100), and {gpu.name} is older; remove the setting"
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
    """Returns the saved seconds per token, minus rounding, on a rank without tensor parallelism.

    `share` is the fraction of the peak that products of either dtype reach; `forward_passes`
    includes recomputation.
    """
    recipe, peak, exact = recipe_of(load), gpu.flops("float8"), gpu.flops(load.dtype)
    if recipe == "none" or peak is None or exact is None:
        return 0.0
    keeps_one = recipe == "rowwise_with_gw_hp"  # the gradient of weights
    products = forward_passes + (2 - keeps_one) * is_training
    flops = 2.0 * load.sizes.num_layers * load.sizes.linear_weights * products
    saved = flops / share * (1 / exact - 1 / peak)
    moved_bytes = _rounding_bytes(load, layout, forward_passes, is_training=is_training)
    return saved - moved_bytes / (gpu.memory_gb_per_second * 1e9)


def _rounding_bytes(
    load: StageLoad, layout: Layout, forward_passes: int, *, is_training: bool
) -> float:
    """Returns the bytes moved to round activations, gradients and weights, per token."""
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
    weights_per_token = weights / (load.training.max_tokens_per_microbatch / layout.context)
    num_values = sizes.num_layers * (inputs * forward_passes + backward + weights_per_token)
    return num_values * (_COMPILED_BYTES if config.compile else ROUNDING_BYTES)
