"""The bound of the load check follows the effect of rounding to bfloat16 on the model."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from nemo_rl_core.backends.training.dtensor.model import LogprobModel
from nemo_rl_core.backends.training.megatron.probe import refuse_unless_faithful
from nemo_rl_core.backends.training.rounding import _rounded, rounding_bound
from nemo_rl_core.config.model import DType
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.distributed.packing.plan import Microbatch
from nemo_rl_core.errors import ModelError


def test_six_significant_bits_are_left() -> None:
    values = torch.tensor([1.0, 1 + 1 / 128, 1 + 1 / 64, 1 + 3 / 64, -3.1, 1000.0, 0.0])
    expected = torch.tensor([1.0, 1.0, 1 + 1 / 32, 1 + 1 / 16, -3.125, 1008.0, 0.0])
    assert torch.equal(_rounded(values), expected)
    assert torch.equal(_rounded(values.bfloat16()), expected.bfloat16())
    ids = torch.tensor([129])
    assert _rounded(ids) is ids


def _llama(num_layers: int, *, scale: float) -> Any:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.mul_(scale)
    return model


@pytest.mark.parametrize("num_layers", [2, 8, 24])
@pytest.mark.parametrize("scale", [1.0, 8.0])
@torch.no_grad()
def test_bound_follows_the_effect_of_bfloat16(num_layers: int, scale: float) -> None:
    model = _llama(num_layers, scale=scale)
    ids = torch.arange(40)[None] % 23

    def logprobs(dtype: torch.dtype) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            return model(input_ids=ids).logits.float().log_softmax(-1)

    changed = (logprobs(torch.bfloat16) - logprobs(torch.float32)).abs().mean()
    bound = rounding_bound(lambda: logprobs(torch.bfloat16), model.get_decoder().layers, "bfloat16")
    assert changed * 0.8 < bound < 10 * changed + 1e-3
    layers = model.get_decoder().layers
    assert rounding_bound(lambda: ids, layers, "float32") == 1e-3
    half = rounding_bound(lambda: torch.tensor([-0.5, 0.5, -0.5, 0.5]), layers, "float32")
    assert half == pytest.approx(1e-3 * (1 / 3) ** 0.5)  # the deviation of four halves
    assert rounding_bound(lambda: torch.zeros(4), layers, "float32") == pytest.approx(5e-5)
    assert not any(layer._forward_hooks for layer in model.get_decoder().layers)


def _lets_packed_sequences_attend_to_each_other(model: Any) -> None:
    def without_restarts(_: Any, args: Any, options: dict[str, Any]) -> Any:
        return args, {**options, "position_ids": None}

    model.get_decoder().register_forward_pre_hook(without_restarts, with_kwargs=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_sequences_that_would_attend_to_each_other_get_separate_rows(
    dtype: DType, scale: float
) -> None:
    model = _llama(4, scale=scale)
    policy = LogprobModel(model, temperature=1.0, dtype=dtype)
    policy.choose_layout()
    _lets_packed_sequences_attend_to_each_other(model)
    policy.choose_layout()
    assert not policy.shares_rows


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@torch.no_grad()
def test_probe_of_megatron_has_the_same_bound(dtype: DType) -> None:
    model = _llama(4, scale=1.0)
    policy = LogprobModel(model, temperature=1.0, dtype=dtype)

    def logprobs(batch: BatchedDataDict) -> torch.Tensor:
        rows = ((0,),) if batch.size == 1 else ((0,), (1, 2))
        return policy.logprobs(batch, policy.packed(batch, Microbatch(rows=rows, row_length=9)))

    layers = model.get_decoder().layers
    refuse_unless_faithful(logprobs, layers, dtype=dtype)
    _lets_packed_sequences_attend_to_each_other(model)
    with pytest.raises(ModelError, match="different logprobs for packed sequences"):
        refuse_unless_faithful(logprobs, layers, dtype=dtype)
