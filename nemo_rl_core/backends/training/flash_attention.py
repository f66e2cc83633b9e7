"""Which version of FlashAttention computes torch's `varlen_attn`.

Version 2 is a part of torch. Versions 3 and 4 are packages, which torch's registry puts in its
place in the whole process. Wheels may be built without some head sizes, windows or the backward
pass, and their versions do not tell: each is compared, forward and backward, on heads of the
model's shape before it is used. Kernels from the hub (`kernels-community/...`) are not taken: the
registry does not know them, and a download is in no lock and no manifest.
"""

import logging
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor
from torch.nn import attention

from nemo_rl_core.backends.training.packed_attention import (
    Kernel,
    Segments,
    reference_attention,
    varlen_attention,
)
from nemo_rl_core.errors import ResourceError

FlashAttentionVersion = Literal[2, 3, 4]
NEWER: tuple[FlashAttentionVersion, ...] = (3, 4)
"""Fastest first, where a GPU runs both: version 3 is written for Hopper alone."""

_LOG = logging.getLogger(__name__)
GENERATIONS = {3: (9,), 4: (9, 10)}
"""Major compute capabilities that torch gives a version to: 9 is Hopper, 10 Blackwell."""
_TOLERANCE = 0.03
"""Of a norm. Numbers in bfloat16 alone are below 0.002, and kernels round probabilities as well; a
window that is one token too long is above 0.07."""
_BORDERS = (0, 1, 8, 72, 201, 329)  # a token, and lengths around blocks of 64 and 128
_BINDING_WINDOW = 40  # which masks something within these sequences
_UNFIT: dict[FlashAttentionVersion, str] = {}
"""Versions that could not compute a model of this process. A process has one version: no other
model of it may bring them back."""


@dataclass(frozen=True)
class Heads:
    """The attention heads of a model.

    Attributes:
        device: Where they are computed.
        dtype: Of queries, keys and values.
        size: Of a head.
        repeats: Heads of queries for one of keys.
        windows: Of the layers; None stands for full attention.
    """

    device: torch.device
    dtype: torch.dtype
    size: int
    repeats: int
    windows: frozenset[int | None] = frozenset({None})


def installed(version: FlashAttentionVersion) -> str | None:
    """The installed version of the package of FlashAttention 3 or 4; None without one.

    Its module is not asked for: FlashAttention 2 may leave one of the same name.
    """
    try:
        return metadata.version(f"flash-attn-{version}")
    except metadata.PackageNotFoundError:
        return None


def active_version() -> FlashAttentionVersion:
    """What computes `varlen_attn` in this process."""
    active = attention.current_flash_attention_impl()
    return 3 if active == "FA3" else 4 if active == "FA4" else 2


def attention_choices(kernel: str) -> dict[str, str]:
    """What attends, for the manifest, by paths in a recipe: `varlen` with its FlashAttention."""
    found = {"training.attention": kernel}
    if kernel == "varlen":
        found["training.flash_attention"] = str(active_version())
    return found


def choose_version(
    wanted: FlashAttentionVersion | Literal["auto"], heads: Heads
) -> FlashAttentionVersion:
    """Activates, in this process, the FlashAttention that `training.flash_attention` chooses.

    Args:
        wanted: `auto` is the first of `NEWER` that is installed and computes these heads, else 2.
        heads: Of the model.

    Returns:
        The version.

    Raises:
        ResourceError: If a version is asked for that this machine or these heads do not allow.
    """
    if wanted == "auto":
        for version in NEWER:
            if installed(version) is None:
                continue
            if not (reason := _why_not(version, heads)):
                _LOG.warning("training.flash_attention: auto is %s", version)
                return version
            _LOG.warning("training.flash_attention: auto is not %s: %s", version, reason)
    elif wanted in NEWER:
        if reason := _why_not(wanted, heads):
            raise _refused(wanted, reason)
        return wanted
    _restore()
    return 2


def _why_not(version: FlashAttentionVersion, heads: Heads) -> str | None:
    """Activates a version, or says why it cannot compute these heads."""
    if installed(version) is None:
        return f"the package flash-attn-{version} is not installed"
    if torch.are_deterministic_algorithms_enabled():
        # Wheels of version 3 drop the flag without a word, or refuse heads above 192; version 4
        # orders its sums, which has never been seen to give the same bits twice.
        return "training.deterministic is true, which version 2 alone is known to keep"
    major, minor = torch.cuda.get_device_capability(heads.device)
    if major not in GENERATIONS[version]:
        allowed = " and ".join(f"{each}.x" for each in GENERATIONS[version])
        return f"it runs on GPUs of compute capability {allowed}, not {major}.{minor}"
    if version not in _UNFIT:
        try:
            _activate(version)
            _prove(heads)
        except Exception as error:  # noqa: BLE001  (of a package, at import or in a kernel)
            _restore()
            _UNFIT[version] = f"{type(error).__name__}: {error}"
    return _UNFIT.get(version)


def _refused(version: FlashAttentionVersion, reason: str) -> ResourceError:
    return ResourceError(
        f"training.flash_attention: {version} cannot be used",
        expected=f"flash-attn-{version} and a GPU, a model and settings that it computes with",
        got=reason,
        fix="leave training.flash_attention out: auto takes the newest that works here; or install "
        "the package (docs/parallelism.md)",
    )


def _activate(version: FlashAttentionVersion) -> None:
    if version == active_version():
        return
    if version == 4:
        from torch.nn.attention._fa4 import register_flash_attention_fa4

        from nemo_rl_core.backends.training import flash_attention_4

        register = partial(register_flash_attention_fa4, flash_attention_4.__name__)
        attention.register_flash_attention_impl("FA4", register_fn=register)
    attention.activate_flash_attention_impl(f"FA{version}")


def _restore() -> None:
    if attention.current_flash_attention_impl() is not None:
        attention.restore_flash_attention_impl()


def _prove(heads: Heads) -> None:
    """Raises unless `varlen_attn` and its gradients are the reference's, but for rounding."""
    for window in sorted(heads.windows, key=str):
        binding = window and min(window, _BINDING_WINDOW)
        found = _computed(varlen_attention, heads, binding)
        exact = replace(heads, dtype=torch.float32)
        wanted = _computed(reference_attention, exact, binding)
        for name, ours, theirs in zip(_COMPARED, found, wanted, strict=True):
            distance = float((ours.float() - theirs).norm() / theirs.norm())
            if not distance < _TOLERANCE:
                raise ArithmeticError(
                    f"{name} of heads of {heads.size}, {heads.repeats} for one of keys, window "
                    f"{binding}, are {distance:.2g} of their norm from the reference"
                )


_COMPARED = ("results", "gradients of queries", "gradients of keys", "gradients of values")


def _computed(kernel: Kernel, heads: Heads, window: int | None) -> list[Tensor]:
    """Results and gradients of numbers that fit 16 bits; torch's generators stay as they are."""
    generator = torch.Generator().manual_seed(0)
    num_tokens = _BORDERS[-1]
    query, key, value, weight = (
        torch.randn(num_tokens, number, heads.size, generator=generator).bfloat16()
        for number in (2 * heads.repeats, 2, 2, 2 * heads.repeats)
    )
    parts = [each.to(heads.device, heads.dtype).requires_grad_() for each in (query, key, value)]
    boundaries = torch.tensor(_BORDERS, dtype=torch.int32, device=heads.device)
    longest = max(end - first for first, end in pairwise(_BORDERS))
    segments, (query, key, value) = Segments(boundaries, longest), parts
    with torch.enable_grad():
        found = kernel(query, key, value, segments, scale=None, window=window)
        gradients = torch.autograd.grad(found, parts, weight.to(heads.device, heads.dtype))
    return [found.detach(), *gradients]
