"""The FlashAttention versions of `varlen_attn` in torch's registry, compared with a mask."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import current_flash_attention_impl
from transformers import AutoModelForCausalLM, Gemma3TextConfig, Qwen3Config

from nemo_rl_core.backends.experimental import flash_attention
from nemo_rl_core.backends.experimental.flash_attention import Heads, active_version, choose_version
from nemo_rl_core.backends.training import packed_attention
from nemo_rl_core.backends.training.dtensor.attention import packed_attention as chosen_kernel
from nemo_rl_core.backends.training.packed_attention import Segments, reference_attention
from nemo_rl_core.config.training import DTensorTraining, MegatronTraining
from nemo_rl_core.errors import ResourceError
from tests.fake_flash_attention import installed

HOPPER, BLACKWELL, AMPERE, GEFORCE = (9, 0), (10, 3), (8, 0), (12, 0)
HEADS = Heads(torch.device("cpu"), torch.bfloat16, 64, 3, frozenset({None, 1024}))

pytestmark = [
    pytest.mark.experimental,
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="tests/gpu/test_1_attention.py does this on GPUs"
    ),
]


@pytest.fixture(autouse=True)
def _fastest_kernels() -> Any:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize(
    ("versions", "at", "expected"),
    [
        ((), HOPPER, 2),
        ((3,), HOPPER, 3),
        ((4,), HOPPER, 4),
        ((3, 4), HOPPER, 3),
        ((3, 4), BLACKWELL, 4),
        ((3,), BLACKWELL, 2),
        ((3, 4), AMPERE, 2),
        ((3, 4), GEFORCE, 2),
    ],
)
def test_auto_is_the_fastest_installed_version_for_the_gpu(
    versions: tuple[int, ...], at: tuple[int, int], expected: int
) -> None:
    with installed(*versions, at=at):
        assert choose_version("auto", HEADS) == active_version() == expected
        assert choose_version(2, HEADS) == active_version() == 2
    assert current_flash_attention_impl() is None


@pytest.mark.parametrize("version", [3, 4])
@pytest.mark.parametrize("window", [None, 1, 5, 1000])
@pytest.mark.parametrize("repeats", [1, 3])
def test_varlen_attn_calls_the_version_and_matches_a_mask(
    version: Any, window: int | None, repeats: int
) -> None:
    torch.manual_seed(0)
    shapes = [(20, 2 * repeats, 16), (20, 2, 16), (20, 2, 16)]
    parts = [torch.randn(shape).requires_grad_() for shape in shapes]
    segments = Segments(torch.tensor([0, 1, 8, 20], dtype=torch.int32), 12)
    weight = torch.randn(shapes[0])
    results = []
    with installed(version, at=HOPPER) as calls:
        choose_version(version, HEADS)
        calls.made.clear()
        # Float32, which the bridges reject, is a stricter comparison than bfloat16.
        flash = packed_attention.KERNELS["varlen"]
        supports = "_fa3_forward_support_error", "_fa4_forward_support_error"
        with pytest.MonkeyPatch.context() as patch:
            bridge = f"torch.nn.attention._fa{version}"
            patch.setattr(f"{bridge}.{supports[version - 3]}", lambda *_: None)
            patch.setattr(f"{bridge}._fa{version}_backward_support_error", lambda *_: None)
            for kernel in (flash, reference_attention):
                actual = kernel(*parts, segments, scale=0.3, window=window)
                results.append([actual, *torch.autograd.grad(actual, parts, weight)])
    assert calls.names() == [f"{version} forward", f"{version} backward"]
    (_, forward), (_, backward) = calls.made
    assert forward["scale"] == backward["scale"] == 0.3
    assert forward["left"] == backward["left"] == (None if window is None else window - 1)
    assert forward["causal"] == (window is None)
    assert forward["right"] == 0
    assert backward["deterministic"] is False
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_bfloat16_rounds_far_less_than_the_tolerance() -> None:
    for size, repeats in ((64, 1), (128, 6), (256, 2)):
        heads = Heads(torch.device("cpu"), torch.bfloat16, size, repeats)
        for window in (None, 40):
            ours = flash_attention._computed(reference_attention, heads, window)
            exact = flash_attention.Heads(heads.device, torch.float32, size, repeats)
            theirs = flash_attention._computed(reference_attention, exact, window)
            for actual, expected in zip(ours, theirs, strict=True):
                assert (actual.float() - expected).norm() / expected.norm() < 0.002


DEFECTS: dict[str, Any] = {
    "results of another scale": lambda part, found: found * 1.05 if part == "forward" else found,
    "gradients of another scale": lambda part, found: found * 0.95 if part == "backward" else found,
    "a head is lost": lambda _, found: found.index_fill(1, torch.tensor([1]), 0),
    "the last token is lost": lambda _, found: found.index_fill(0, torch.tensor([328]), 0),
    "not a number": lambda part, found: found / 0 if part == "backward" else found,
}


@pytest.mark.parametrize("version", [3, 4])
@pytest.mark.parametrize("defect", list(DEFECTS))
def test_wrong_version_is_not_used(
    version: Any, defect: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    with installed(version, at=HOPPER) as calls:
        calls.spoil = DEFECTS[defect]
        assert choose_version("auto", HEADS) == active_version() == 2
        assert len(caplog.records) == 1
        assert f"auto does not use {version}: ArithmeticError" in caplog.text
        with pytest.raises(ResourceError, match="from the reference"):
            choose_version(version, HEADS)
        assert active_version() == 2


@pytest.mark.parametrize("version", [3, 4])
def test_window_that_is_one_token_too_long_is_detected(
    version: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests import fake_flash_attention

    plain = fake_flash_attention.masked_scores

    def wider(*arguments: Any) -> Any:
        *others, options = arguments
        left = options["left"]
        return plain(*others, {**options, "left": None if left is None else left + 1})

    monkeypatch.setattr(fake_flash_attention, "masked_scores", wider)
    with (
        installed(version, at=HOPPER),
        pytest.raises(
            ResourceError, match=r"differ from the reference by 0\.(0[7-9]|1).*window 40"
        ),
    ):
        choose_version(version, HEADS)


def test_broken_package_leaves_torchs_version(caplog: pytest.LogCaptureFixture) -> None:
    def breaks(*_: Any) -> Tensor:
        raise RuntimeError("This flash attention build does not support headdim 64")

    with installed(3, 4, at=HOPPER) as calls:
        calls.spoil = breaks
        assert choose_version("auto", HEADS) == 2
        assert caplog.text.count("does not support headdim 64") == 2
        # A process has one version: another model does not bring back an unfit one.
        calls.spoil = lambda _, actual: actual
        assert choose_version("auto", HEADS) == active_version() == 2


def test_empty_wheel_is_detected() -> None:
    with installed(3, at=HOPPER), pytest.MonkeyPatch.context() as patch:
        patch.delattr(torch.ops, "flash_attn_3")
        with pytest.raises(ResourceError, match="does not expose FA3"):
            choose_version(3, HEADS)


def test_unavailable_version_is_refused_with_its_reason() -> None:
    for versions, at, setting, reason in (
        ((), HOPPER, 3, "flash-attn-3 is not installed"),
        ((3,), HOPPER, 4, "flash-attn-4 is not installed"),
        ((3,), BLACKWELL, 3, r"compute capability 9\.x, not 10\.3"),
        ((4,), GEFORCE, 4, r"compute capability 9\.x and 10\.x, not 12\.0"),
    ):
        with installed(*versions, at=at), pytest.raises(ResourceError, match=reason) as error:
            choose_version(setting, HEADS)  # type: ignore[arg-type]
        assert "leave training.flash_attention out" in str(error.value)


def test_deterministic_kernels_need_version_2() -> None:
    with installed(3, 4, at=HOPPER) as calls:
        torch.use_deterministic_algorithms(True)
        assert choose_version("auto", HEADS) == 2
        for version in (3, 4):
            with pytest.raises(ResourceError, match=r"training\.deterministic is true"):
                choose_version(version, HEADS)  # type: ignore[arg-type]
        assert calls.made == []


def test_comparison_does_not_change_torchs_generator() -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    with installed(3, at=HOPPER), torch.no_grad():
        assert choose_version("auto", HEADS) == 3
    assert torch.equal(torch.get_rng_state(), before)


SIZES: dict[str, Any] = {
    "vocab_size": 19,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


@pytest.fixture
def seen_heads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Heads]]:
    seen: list[tuple[Any, Heads]] = []
    for backend in ("dtensor", "megatron"):
        monkeypatch.setattr(
            f"nemo_rl_core.backends.training.{backend}.attention.choose_version",
            lambda setting, heads: seen.append((setting, heads)),
        )
    return seen


def test_comparison_uses_the_models_heads(seen_heads: list[tuple[Any, Heads]]) -> None:
    cuda, bf16 = torch.device("cuda"), torch.bfloat16
    kinds = ["sliding_attention", "full_attention"]
    gemma = Gemma3TextConfig(**SIZES, sliding_window=4, layer_types=kinds)
    for config, version in ((Qwen3Config(**SIZES), "auto"), (gemma, 3)):
        model = AutoModelForCausalLM.from_config(config)
        training = DTensorTraining(flash_attention=version)  # type: ignore[arg-type]
        kernel = chosen_kernel(model, training, dtype="bfloat16", device=cuda)
        assert kernel is not None and kernel.kernel == "varlen"
        # In float32 FlashAttention is not used, and a requested version is an error.
        if version == "auto":
            chosen_kernel(model, training, dtype="float32", device=cuda)
        else:
            with pytest.raises(Exception, match="16 bits, not in float32"):
                chosen_kernel(model, training, dtype="float32", device=cuda)
    assert seen_heads == [
        ("auto", Heads(cuda, bf16, 16, 2)),
        (3, Heads(cuda, bf16, 16, 2, frozenset({None, 4}))),
    ]


def test_megatrons_local_layers_use_the_same_versions(
    seen_heads: list[tuple[Any, Heads]],
) -> None:
    from types import SimpleNamespace

    from nemo_rl_core.backends.training.megatron.attention import takes_boundaries

    sizes = SimpleNamespace(kv_channels=64, num_attention_heads=12, num_query_groups=2)
    model, cuda = SimpleNamespace(config=sizes), torch.device("cuda")
    training = MegatronTraining(flash_attention=4)
    assert takes_boundaries(model, training, dtype="bfloat16", device=cuda, fused=False)
    assert seen_heads == [(4, Heads(cuda, torch.bfloat16, 64, 6))]
    with pytest.raises(Exception, match="Transformer Engine is installed"):
        takes_boundaries(model, training, dtype="bfloat16", device=cuda, fused=True)


def test_manifest_names_the_active_version() -> None:
    choices = flash_attention.attention_choices
    with installed(3, at=HOPPER):
        choose_version("auto", HEADS)
        assert choices("varlen") == {
            "training.attention": "varlen",
            "training.flash_attention": "3",
        }
        choose_version(2, HEADS)
        assert choices("varlen")["training.flash_attention"] == "2"
        assert choices("flex") == {"training.attention": "flex"}


def test_version_requires_varlen_and_is_not_an_input_by_default() -> None:
    for training in (DTensorTraining, MegatronTraining):
        assert "flash_attention" not in training().model_dump()
        assert training(flash_attention=3).model_dump()["flash_attention"] == 3
        with pytest.raises(ValueError, match="is for attention: varlen, not sdpa"):
            training(flash_attention=2, attention="sdpa")
        with pytest.raises(ValueError, match="flash_attention"):
            training(flash_attention=1)  # type: ignore[arg-type]


def test_cpu_has_no_version(tiny_model: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    with pytest.raises(Exception, match="only computes gradients on GPUs"):
        chosen_kernel(
            model,
            DTensorTraining(flash_attention=2),
            dtype="bfloat16",
            device=torch.device("cpu"),
        )
