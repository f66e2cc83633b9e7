"""Training in float8: the rounding of one layer by hand, and parts that keep their precision."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl_core.algorithms.sft.loss import NLLLoss
from nemo_rl_core.backends.training.base import TrainingSetup
from nemo_rl_core.backends.training.dtensor import float8
from nemo_rl_core.backends.training.dtensor.backend import DTensorBackend
from nemo_rl_core.config import training as training_config
from nemo_rl_core.config.optimizer import OptimizerConfig
from nemo_rl_core.config.trainer import GateConfig
from nemo_rl_core.config.training import DTensorTraining
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict, collate
from nemo_rl_core.errors import ConfigError, ConsistencyError, ResourceError
from nemo_rl_core.models.validation.gate import check_consistency

needs_torchao = pytest.mark.skipif(
    find_spec("torchao") is None, reason="needs torchao: `make test-float8`"
)
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
LENGTHS = [11, 4, 7, 2, 9, 3, 3, 8]


def numbers_of(exponent_bits: int, fraction_bits: int, largest: float) -> torch.Tensor:
    """Returns all non-negative numbers of a format, from the definition of its bits."""
    bias, steps = 2 ** (exponent_bits - 1) - 1, 2**fraction_bits
    actual = [fraction / steps * 2.0 ** (1 - bias) for fraction in range(steps)]
    actual += [
        (1 + fraction / steps) * 2.0 ** (exponent - bias)
        for exponent in range(1, 2**exponent_bits)
        for fraction in range(steps)
    ]
    return torch.tensor([each for each in actual if each <= largest], dtype=torch.float64)


FORMATS = {"e4m3": numbers_of(4, 3, 448.0), "e5m2": numbers_of(5, 2, 57344.0)}


def nearest(values: torch.Tensor, kind: str) -> torch.Tensor:
    """Rounds to the nearest number of a format; ties go to the even fraction."""
    numbers = FORMATS[kind]
    index = torch.searchsorted(numbers, values.abs().double().contiguous()).clamp(
        1, len(numbers) - 1
    )
    below, above = numbers[index - 1], numbers[index]
    to_below, to_above = values.abs() - below, above - values.abs()
    is_even = (index - 1) % 2 == 0  # fractions alternate between even and odd
    takes_below = (to_below < to_above) | ((to_below == to_above) & is_even)
    return torch.where(takes_below, below, above) * values.sign()


def rounded(values: torch.Tensor, kind: str, *, dim: int | None, to_power: bool) -> torch.Tensor:
    """Rounds values to float8 and back, scaled by the full matrix or along a dimension."""
    largest = values.abs().max() if dim is None else values.abs().amax(dim, keepdim=True)
    scale = (FORMATS[kind][-1] / largest.double()).float()
    scale = torch.exp2(torch.floor(torch.log2(scale))) if to_power else scale
    return (nearest(values * scale, kind) / scale.double()).float()


def expected_of(
    recipe: str, x: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns output and gradients of input and weight of a layer `[N, K] @ [M, K].T`."""
    if recipe == "tensorwise":
        x8, w8 = (rounded(each, "e4m3", dim=None, to_power=False) for each in (x, weight))
        g8 = rounded(gradient, "e5m2", dim=None, to_power=False)
        return x8 @ w8.T, g8 @ w8, g8.T @ x8

    def along(values: torch.Tensor, dim: int | None) -> torch.Tensor:
        return rounded(values, "e4m3", dim=dim, to_power=True)

    output = along(x, 1) @ along(weight, 1).T
    if recipe == "rowwise":
        return output, along(gradient, 1) @ along(weight, 0), along(gradient, 0).T @ along(x, 0)
    return output, along(gradient, 1) @ along(weight, None), gradient.T @ x


class OneLayer(torch.nn.Module):
    """A decoder with one block, which has a router and an odd layer, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.block = torch.nn.ModuleDict(
            {
                "proj": torch.nn.Linear(48, 32, bias=False),
                "gate": torch.nn.Linear(48, 16, bias=False),
                "odd": torch.nn.Linear(48, 1, bias=False),
            }
        )
        self.layers = torch.nn.ModuleList([self.block])
        self.lm_head = torch.nn.Linear(48, 64, bias=False)

    def get_decoder(self) -> "OneLayer":
        return self


def converted(recipe: str) -> OneLayer:
    torch.manual_seed(0)
    model, training = OneLayer(), DTensorTraining(float8=recipe)
    float8.convert_linear_layers(model, training, dtype="float32", is_sharded=False)
    return model


@needs_torchao
@pytest.mark.parametrize("recipe", RECIPES)
def test_layer_rounds_as_computed_by_hand(recipe: str) -> None:
    layer = converted(recipe).block["proj"]
    generator = torch.Generator().manual_seed(1)
    # Several magnitudes, so that some numbers are subnormal or 0 in float8.
    x = torch.randn(24, 48, generator=generator) * torch.logspace(-4, 1, 48)
    gradient = torch.randn(24, 32, generator=generator) * torch.logspace(-3, 0, 32)
    weight = layer.weight.detach().clone()
    found_input = x.clone().requires_grad_()
    output = layer(found_input)
    output.backward(gradient)
    expected = expected_of(recipe, x, weight, gradient)
    for actual, want in zip((output, found_input.grad, layer.weight.grad), expected, strict=True):
        torch.testing.assert_close(actual, want, rtol=1e-6, atol=1e-6 * want.abs().max().item())
    exact = x @ weight.T
    assert 0.001 < ((output - exact).norm() / exact.norm()).item() < 0.06
    assert torch.equal(layer.weight, weight) and layer.weight.dtype == torch.float32


@needs_torchao
def test_routers_heads_and_odd_sizes_are_not_converted() -> None:
    model = converted("rowwise")
    kinds = {name: type(each).__name__ for name, each in model.block.items()}
    assert kinds == {"proj": "Float8Linear", "gate": "Linear", "odd": "Linear"}
    assert type(model.lm_head) is torch.nn.Linear


@needs_torchao
def test_model_without_such_layers_is_refused() -> None:
    model = OneLayer()
    del model.block["proj"]
    training = DTensorTraining(float8="rowwise")
    with pytest.raises(ConfigError, match="multiples of 16"):
        float8.convert_linear_layers(model, training, dtype="float32", is_sharded=False)


def make_batch() -> BatchedDataDict:
    generator = torch.Generator().manual_seed(1)
    sequences = [torch.randint(0, 16, (n,), generator=generator).tolist() for n in LENGTHS]
    return collate(sequences, [[index >= n // 2 for index in range(n)] for n in LENGTHS])


def started(folder: Path, *, max_tokens: int = 64, **options: Any) -> DTensorBackend:
    head, dtype = options.pop("head", "lm"), options.pop("dtype", "float32")
    backend = DTensorBackend()
    backend.setup(
        TrainingSetup(
            model_folder=folder,
            optimizer=OptimizerConfig(learning_rate=1e-2, adam_epsilon=1e-3),
            max_tokens_per_microbatch=max_tokens,
            training=DTensorTraining(**options),
            reference_folder=folder if head == "lm" else None,
            head=head,
            dtype=dtype,
        )
    )
    return backend


def weights_of(backend: DTensorBackend) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in backend.named_weights()}


def gradients_of(folder: Path, **options: Any) -> dict[str, torch.Tensor]:
    backend = started(folder, **options)
    backend.forward_backward(make_batch(), NLLLoss())
    parameters = backend._policy.model.named_parameters()
    return {name: each.grad.clone() for name, each in parameters if each.grad is not None}


def assert_equal(actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


@needs_torchao
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_point_in_the_direction_of_exact_ones(
    recipe: str, dtype: str, tiny_model: Path
) -> None:
    exact = gradients_of(tiny_model)
    actual = gradients_of(tiny_model, float8=recipe, dtype=dtype)
    assert actual.keys() == exact.keys()
    both = [torch.cat([each.flatten() for each in one.values()]) for one in (actual, exact)]
    cosine = torch.nn.functional.cosine_similarity(*both, dim=0).item()
    assert 0.99 < cosine < 0.9999
    assert both[0].norm().item() == pytest.approx(both[1].norm().item(), rel=0.05)


def test_none_is_the_default_and_changes_nothing(tiny_model: Path) -> None:
    assert "float8" not in DTensorTraining().model_dump()
    assert DTensorTraining(float8="rowwise").model_dump()["float8"] == "rowwise"
    assert DTensorTraining.model_validate(DTensorTraining().model_dump()).float8 == "none"
    modules = started(tiny_model)._policy.model.modules()
    assert {type(each).__name__ for each in modules if isinstance(each, torch.nn.Linear)} == {
        "Linear"
    }


@needs_torchao
@pytest.mark.parametrize("recipe", RECIPES)
def test_sent_and_saved_weights_are_not_rounded(
    recipe: str, tiny_model: Path, tmp_path: Path
) -> None:
    plain = weights_of(started(tiny_model))
    backend = started(tiny_model, float8=recipe)
    assert_equal(weights_of(backend), plain)
    backend.train_step(make_batch(), NLLLoss())
    after = weights_of(backend)
    assert after.keys() == plain.keys()
    backend.save_checkpoint(tmp_path)
    # A run without float8 can resume from it.
    assert_equal(weights_of(started(tmp_path / "model")), after)
    gate = after["model.layers.0.mlp.gate_proj.weight"]
    assert not torch.equal(gate, gate.to(torch.float8_e4m3fn).float())


@needs_torchao
@pytest.mark.parametrize("saved", ["model", "shards"])
def test_resumed_run_is_bitwise_identical(saved: str, tiny_model: Path, tmp_path: Path) -> None:
    first = started(tiny_model, float8="tensorwise")
    first.train_step(make_batch(), NLLLoss())
    if saved == "model":
        first.start_checkpoint(tmp_path)
    else:
        first.start_sharded_checkpoint(tmp_path)
    first.finish_checkpoint()
    first.train_step(make_batch(), NLLLoss())
    resumed = started(tiny_model, float8="tensorwise")
    resumed.load_checkpoint(tmp_path)
    resumed.train_step(make_batch(), NLLLoss())
    assert_equal(weights_of(resumed), weights_of(first))


@needs_torchao
def test_recomputed_layers_round_the_same_way(tiny_model: Path) -> None:
    plain = gradients_of(tiny_model, float8="rowwise")
    assert_equal(gradients_of(tiny_model, float8="rowwise", activation_checkpointing=True), plain)


@needs_torchao
def test_policy_and_reference_agree_before_the_first_step(tiny_model: Path) -> None:
    backend, batch = started(tiny_model, float8="tensorwise"), make_batch()
    assert torch.equal(backend.get_logprobs(batch), backend.get_reference_logprobs(batch))


@needs_torchao
def test_rowwise_tokens_do_not_depend_on_neighbors(tiny_model: Path) -> None:
    def difference(recipe: str) -> float:
        one, several = (
            started(tiny_model, float8=recipe, max_tokens=tokens).get_logprobs(make_batch())
            for tokens in (1024, 11)
        )
        return (one - several).abs().max().item()

    assert difference("rowwise") < 1e-5
    # One scale is used for all tokens of a micro-batch.
    assert difference("tensorwise") > 1e-4


@needs_torchao
def test_check_of_packed_rows_does_not_round(tiny_model: Path) -> None:
    backend, batch = started(tiny_model, float8="tensorwise"), make_batch()
    exact = started(tiny_model).get_logprobs(batch)
    before = backend.get_logprobs(batch)
    with float8.in_high_precision(backend._policy.model):
        torch.testing.assert_close(backend.get_logprobs(batch), exact, rtol=0, atol=1e-5)
    assert torch.equal(backend.get_logprobs(batch), before)
    assert (before - exact).abs().max().item() > 1e-3


@needs_torchao
def test_scalar_head_stays_exact(tiny_model: Path) -> None:
    backend = started(tiny_model, head="scalar", float8="rowwise")
    assert type(backend._policy.model.score) is torch.nn.Linear
    assert backend.get_values(make_batch()).shape == (len(LENGTHS), max(LENGTHS))


def gated(folder: Path, scale: float, recipe: str) -> dict[str, float]:
    """Returns the gate over logprobs of a float8 trainer and of an engine that computes exactly.

    Args:
        folder: Folder of the model.
        scale: Factor of the logits; logprobs of a confident model differ more.
        recipe: Float8 recipe of the trainer.
    """
    batch, actual = make_batch(), []
    for training in ({}, {"float8": recipe}):
        backend = started(folder, **training)
        with torch.no_grad():
            backend._policy.model.get_decoder().norm.weight.mul_(scale)
        actual.append(backend.get_logprobs(batch))
    columns = {"generation_logprobs": actual[0], "prev_logprobs": actual[1]}
    batch = BatchedDataDict({**batch, **columns, "sample_mask": torch.ones(len(LENGTHS))})
    return check_consistency(batch, GateConfig())[1]


@needs_torchao
@pytest.mark.parametrize("recipe", RECIPES)
def test_gate_accepts_small_differences_and_stops_at_large_ones(
    recipe: str, tiny_model: Path
) -> None:
    error = gated(tiny_model, 1.0, recipe)["token_mult_prob_error"]
    assert 1.001 < error < 1.02
    with pytest.raises(ConsistencyError, match=r"token_mult_prob_error|exceed the bound"):
        gated(tiny_model, 20.0, recipe)


@needs_torchao
def test_completions_are_sampled_with_rounding(tiny_model: Path) -> None:
    prompts = BatchedDataDict(
        {"input_ids": torch.tensor([[3, 4, 5]]), "input_lengths": torch.tensor([3])}
    )
    backend = started(tiny_model, float8="rowwise")
    actual = backend.generate(prompts, greedy=True, max_new_tokens=4)
    tokens, first = actual["output_ids"], 3
    batch = collate(tokens.tolist(), [[index >= first for index in range(tokens.shape[1])]])
    assert 1 <= int(actual["generation_lengths"]) <= 4
    # One token per pass and all tokens at once agree, since each row has its own scale.
    together = backend.get_logprobs(batch)[0, first - 1 :]
    torch.testing.assert_close(actual["logprobs"][0, first:], together, rtol=0, atol=1e-5)


def test_lora_is_refused_with_the_fix() -> None:
    with pytest.raises(ValueError, match="Remove float8 or lora"):
        DTensorTraining(float8="rowwise", lora={})


def test_missing_torchao_is_named_with_its_command(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_config, "find_spec", lambda _: None)
    with pytest.raises(ResourceError, match=r"pip install --no-deps torchao==0\.18\.0"):
        started(tiny_model, float8="tensorwise")


@pytest.mark.parametrize(
    ("capability", "dtype"), [((8, 0), "bfloat16"), ((7, 5), "bfloat16"), ((9, 0), "float32")]
)
def test_gpus_that_cannot_compute_it_are_refused(
    capability: tuple[int, int], dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(float8, "_import_torchao", lambda _: None)
    monkeypatch.setattr(float8, "local_device", lambda: torch.device("cuda:0"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    training = DTensorTraining(float8="rowwise")
    with pytest.raises(ConfigError, match=r"8\.9 or later .* and model.dtype: bfloat16"):
        float8.convert_linear_layers(OneLayer(), training, dtype=dtype, is_sharded=False)


@needs_torchao
def test_supported_gpu_is_not_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float8, "local_device", lambda: torch.device("cuda:0"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
    model, training = OneLayer(), DTensorTraining(float8="tensorwise")
    float8.convert_linear_layers(model, training, dtype="bfloat16", is_sharded=True)
    config = model.block["proj"].config
    assert not config.emulate
    assert config.pad_inner_dim and config.enable_fsdp_float8_all_gather
