"""Choice of the FlashAttention version that computes torch's `varlen_attn`.

Version 2 is part of torch. Versions 3 and 4 are packages; torch's registry replaces version 2 with
them in the entire process. Wheels may be built without some head sizes, windows or the backward
pass, which their version numbers do not show, so each is compared with a reference, forward and
backward, on heads of the model's shape before it is used.
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
"""Fastest first on GPUs that support both; version 3 only supports Hopper."""

_LOG = logging.getLogger(__name__)
GENERATIONS = {3: (9,), 4: (9, 10)}
"""Major compute capabilities that torch uses a version on: 9 is Hopper, 10 Blackwell."""
_TOLERANCE = 0.03
"""Largest relative difference of norms. Rounding to bfloat16 causes less than 0.002, and kernels
also round probabilities; a window that is one token too long causes more than 0.07."""
_BORDERS = (0, 1, 8, 72, 201, 329)  # one token, and lengths around blocks of 64 and 128
_BINDING_WINDOW = 40  # short enough to mask tokens of these sequences
_UNFIT: dict[FlashAttentionVersion, str] = {}
"""Versions that failed for a model of this process, with the reason. A process uses one version,
so they are not tried again for other models."""


@dataclass(frozen=True)
class Heads:
    """The attention heads of a model.

    Attributes:
        repeats: Number of query heads per key head.
        windows: Window sizes of the layers; None means full attention.
    """

    device: torch.device
    dtype: torch.dtype
    size: int
    repeats: int
    windows: frozenset[int | None] = frozenset({None})


def installed(version: FlashAttentionVersion) -> str | None:
    """Returns the installed version of the package of FlashAttention 3 or 4, or None.

    The module is not looked up, since FlashAttention 2 may install one with the same name.
    """
    try:
        return metadata.version(f"flash-attn-{version}")
    except metadata.PackageNotFoundError:
        return None


def active_version() -> FlashAttentionVersion:
    """Returns the version that computes `varlen_attn` in this process."""
    active = attention.current_flash_attention_impl()
    return 3 if active == "FA3" else 4 if active == "FA4" else 2


def attention_choices(kernel: str) -> dict[str, str]:
    """Returns the attention kernel and, for `varlen`, its version by recipe path."""
    choices = {"training.attention": kernel}
    if kernel == "varlen":
        choices["training.flash_attention"] = str(active_version())
    return choices


def choose_version(
    setting: FlashAttentionVersion | Literal["auto"], heads: Heads
) -> FlashAttentionVersion:
    """Activates the FlashAttention version for `training.flash_attention` in this process.

    `auto` is the first of `NEWER` that is installed and computes these heads, else 2.
    """
    if setting == "auto":
        for version in NEWER:
            if installed(version) is None:
                continue
            if not (reason := _why_not(version, heads)):
                _LOG.warning("training.flash_attention: auto chose %s", version)
                return version
            _LOG.warning("training.flash_attention: auto does not use %s: %s", version, reason)
    elif setting in NEWER:
        if reason := _why_not(setting, heads):
            raise ResourceError(
                f"training.flash_attention: {setting} cannot be used",
                expected=f"flash-attn-{setting}, and a GPU, model and settings that it supports",
                got=reason,
                fix="leave training.flash_attention out; auto chooses the newest version that "
                "works here. Or install the package (docs/parallelism.md)",
            )
        return setting
    _restore()
    return 2


def _why_not(version: FlashAttentionVersion, heads: Heads) -> str | None:
    """Activates a version, or returns the reason why it cannot compute these heads."""
    if installed(version) is None:
        return f"the package flash-attn-{version} is not installed"
    if torch.are_deterministic_algorithms_enabled():
        # Wheels of version 3 silently ignore the flag, or reject heads above 192. Version 4 orders
        # its sums, but identical results of two runs have not been observed yet.
        return "training.deterministic is true, which only version 2 is known to support"
    major, minor = torch.cuda.get_device_capability(heads.device)
    if major not in GENERATIONS[version]:
        allowed = " and ".join(f"{each}.x" for each in GENERATIONS[version])
        return f"it runs on GPUs of compute capability {allowed}, not {major}.{minor}"
    if version not in _UNFIT:
        try:
            _activate(version)
            _prove(heads)
        except Exception as error:  # noqa: BLE001  (any error of a package's import or kernel)
            _restore()
            _UNFIT[version] = f"{type(error).__name__}: {error}"
    return _UNFIT.get(version)


def _activate(version: FlashAttentionVersion) -> None:
    if version == active_version():
        return
    if version == 4:
        from torch.nn.attention._fa4 import register_flash_attention_fa4

        from nemo_rl_core.backends.experimental import flash_attention_4

        register = partial(register_flash_attention_fa4, flash_attention_4.__name__)
        attention.register_flash_attention_impl("FA4", register_fn=register)
    attention.activate_flash_attention_impl(f"FA{version}")


def _restore() -> None:
    if attention.current_flash_attention_impl() is not None:
        attention.restore_flash_attention_impl()


def _prove(heads: Heads) -> None:
    """Raises unless `varlen_attn` and its gradients match the reference up to rounding."""
    for window in sorted(heads.windows, key=str):
        tested_window = window and min(window, _BINDING_WINDOW)
        actual = _computed(varlen_attention, heads, tested_window)
        exact = replace(heads, dtype=torch.float32)
        expected = _computed(reference_attention, exact, tested_window)
        for name, ours, theirs in zip(_COMPARED, actual, expected, strict=True):
            distance = float((ours.float() - theirs).norm() / theirs.norm())
            if not distance < _TOLERANCE:
                raise ArithmeticError(
                    f"{name} differ from the reference by {distance:.2g} of their norm (head size "
                    f"{heads.size}, {heads.repeats} query heads per key head, window "
                    f"{tested_window})"
                )


_COMPARED = ("results", "gradients of queries", "gradients of keys", "gradients of values")


def _computed(kernel: Kernel, heads: Heads, window: int | None) -> list[Tensor]:
    """Returns results and gradients for random inputs that are exact in bfloat16."""
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
        attended = kernel(query, key, value, segments, scale=None, window=window)
        gradients = torch.autograd.grad(attended, parts, weight.to(heads.device, heads.dtype))
    return [attended.detach(), *gradients]
