"""Plans with float8, computed by hand for Qwen2.5-7B."""

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nemo_rl_core.config.training import DTensorTraining, MegatronTraining
from nemo_rl_core.planning import float8_speed
from nemo_rl_core.planning.accelerators import ACCELERATORS
from nemo_rl_core.planning.float8 import recipe_of
from nemo_rl_core.planning.load import StageLoad, layout_of, untried
from nemo_rl_core.planning.memory import MemoryPlan, plan_memory
from nemo_rl_core.planning.speed import plan_speed
from tests.unit.planning.layouts import stage

H100, A100 = ACCELERATORS["nvidia-h100"], ACCELERATORS["nvidia-a100-80gb"]
LAYER = 2 * 3584 * 3584 + 2 * 3584 * 512 + 3 * 3584 * 18944 + 3584 + 2 * 512
"""Of linear layers, with the biases, which plans count among them."""
INPUTS = 5 * 3584 + 3584 + 18944  # of queries, keys, values, gate and up; of the other two
OUTPUTS = 3584 + 2 * 512 + 3584 + 2 * 18944 + 3584


def load_of(
    num_ranks: int = 8, *, dtype: str = "bfloat16", tokens: int = 8192, **training: Any
) -> StageLoad:
    settings = {"activation_checkpointing": False, "gradient_sync": "every_microbatch", **training}
    config = DTensorTraining(**settings)
    return stage("qwen2.5-7b", num_ranks, training=config, dtype=dtype, tokens=tokens)


def memory_of(num_ranks: int = 8, **training: Any) -> MemoryPlan:
    return plan_memory(load_of(num_ranks, **training), H100.memory_gib)


def saved(num_ranks: int, *, forward_passes: int = 1, **training: Any) -> float:
    load = load_of(num_ranks, **training)
    assert load.training is not None
    return float8_speed.saved_seconds(
        load,
        layout_of(load.training.config, num_ranks),
        H100,
        share=0.7,
        forward_passes=forward_passes,
        is_training=True,
    )


def seconds(*, products: int, rounded: float, bytes_each: int) -> float:
    """By the data sheet of an H100: 989 and 1979 TFLOP/s, 3350 GB/s."""
    flops = 28 * 2 * LAYER * products
    return flops / 0.7 * (1 / 989e12 - 1 / 1979e12) - 28 * rounded * bytes_each / 3350e9


def test_products_are_saved_and_rounding_is_paid() -> None:
    # Inputs in both passes, gradients for both products of the second one, weights in both.
    rounded = 2 * INPUTS + 2 * OUTPUTS
    one = seconds(products=3, rounded=rounded + 2 * LAYER / 8192, bytes_each=33)
    assert saved(1, float8="rowwise") == pytest.approx(one)
    assert saved(8, float8="rowwise") == pytest.approx(one)
    # A rank rounds only its shard if weights are sent in 8 bits.
    shard = seconds(products=3, rounded=rounded + 2 * LAYER / 8 / 8192, bytes_each=5)
    assert saved(8, float8="tensorwise", compile=True) == pytest.approx(shard)
    again = seconds(products=4, rounded=rounded + INPUTS + 3 * LAYER / 8192, bytes_each=5)
    assert saved(8, forward_passes=2, float8="rowwise", compile=True) == pytest.approx(again)
    exact = seconds(products=2, rounded=INPUTS + OUTPUTS + 2 * LAYER / 8192, bytes_each=5)
    assert saved(8, float8="rowwise_with_gw_hp", compile=True) == pytest.approx(exact)
    assert saved(8) == 0


def speed_of(load: StageLoad) -> float:
    plan = plan_speed(load, plan_memory(load, H100.memory_gib), H100)
    assert plan is not None and plan.trained is not None
    return plan.trained


def test_it_is_faster_compiled_and_slower_where_it_is_not() -> None:
    plain = speed_of(load_of())
    ratios = {
        (recipe, compiled): speed_of(load_of(float8=recipe, compile=compiled)) / plain
        for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp")
        for compiled in (False, True)
    }
    assert all(0.7 < ratio < 1 for (_, compiled), ratio in ratios.items() if not compiled)
    assert 1.1 < ratios["rowwise_with_gw_hp", True] < ratios["rowwise", True]
    assert ratios["rowwise", True] < ratios["tensorwise", True] < 1.4


def test_layers_are_gathered_in_8_bits_where_all_shards_share_a_scale() -> None:
    sizes = load_of().sizes
    rest = 2 * (sizes.layer_weights - LAYER) + sizes.outer_weights  # of two layers
    expected = {"none": 2 * LAYER * 2, "rowwise": 2 * LAYER * 2, "tensorwise": 2 * LAYER}
    for recipe, layers in expected.items():
        plan = memory_of(float8=recipe).parts["gathered weights"]
        assert plan == pytest.approx((layers + 2 * rest) / 2**30), recipe
    host = memory_of(float8="tensorwise", cpu_offload=True).parts["gathered weights"]
    assert host == pytest.approx((expected["none"] + 2 * rest) / 2**30)


def test_one_rank_keeps_no_casts_of_matrices_that_are_rounded() -> None:
    sizes = load_of().sizes
    rest = 28 * (sizes.layer_weights - LAYER) + sizes.outer_weights
    plan = memory_of(1, float8="rowwise").parts["gathered weights"]
    assert plan == pytest.approx(2 * rest / 2**30)
    assert memory_of(1).parts["gathered weights"] == pytest.approx(2 * (28 * LAYER + rest) / 2**30)


def test_rounding_the_largest_operand_needs_memory() -> None:
    tokens = 16384  # of which a layer takes more than the head
    plain = memory_of(tokens=tokens)
    eager, compiled = (
        memory_of(tokens=tokens, float8="rowwise", compile=each) for each in (False, True)
    )
    operand = tokens * 18944  # larger than a matrix
    assert eager.training - compiled.training == pytest.approx(8 * operand / 2**30)
    assert compiled.training - plain.training == pytest.approx(operand / 2**30)


def test_kinds_of_gpus_without_it_and_float32_are_named() -> None:
    load = load_of(float8="tensorwise")
    assert float8_speed.problem_of(load, H100) is None
    assert float8_speed.problem_of(load_of(), A100) is None
    assert "nvidia-a100-80gb is older" in str(float8_speed.problem_of(load, A100))
    wide = load_of(float8="tensorwise", dtype="float32")
    assert "model.dtype: bfloat16" in str(float8_speed.problem_of(wide, H100))
    assert [name for name, each in ACCELERATORS.items() if each.flops("float8")] == [
        name for name in ACCELERATORS if not any(old in name for old in ("a100", "a10g", "t4"))
    ]


def test_float8_is_listed_as_never_run_except_for_other_backends() -> None:
    assert "training.float8" in untried(load_of(float8="rowwise"))
    assert "training.float8" not in untried(load_of())
    megatron = stage("qwen2.5-7b", 8, training=MegatronTraining())
    assert recipe_of(megatron) == "none"


class Moved(TorchDispatchMode):
    """Bytes that operators read and write of large tensors."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func._schema.name.endswith(("view", "::t", "::detach")):
            leaves = tree_leaves((args, kwargs or {}, result))
            tensors = [each for each in leaves if isinstance(each, torch.Tensor)]
            self.total += sum(each.nbytes for each in tensors if each.numel() > 2**16)
        return result


@pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao: `make test-float8`")
def test_the_bytes_of_rounding_are_those_of_torchaos_operators() -> None:
    from torchao.float8.config import e4m3_dtype
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import LinearMMConfig

    values = torch.randn(512, 512, dtype=torch.bfloat16)
    with Moved() as moved:
        hp_tensor_to_float8_dynamic(values, e4m3_dtype, LinearMMConfig())
    assert moved.total == float8_speed.ROUNDING_BYTES * values.numel()
