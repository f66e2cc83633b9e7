"""FlashAttention 3 and 4 without their packages: the wheels' signatures, computed on the CPU.

    with installed(3, at=(9, 0)) as calls:      # or 4, or both
        choose_version("auto", heads)

Torch's own registry, its bridge to each package and its `varlen_attn` run; the functions they call
compute with a dense mask. The calls are those of flash-attn-3 3.0.0 (positional, in the order of
torch's bridge) and flash-attn-4 4.0.0b36, which returns five tensors. The bridges register for the
CPU what they would register for CUDA.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.library import Library
from torch.nn.attention import _fa3, _fa4, _registry

from nemo_rl_core.backends.experimental import flash_attention

BRIDGES = {3: _fa3, 4: _fa4}


@dataclass
class Calls:
    """Calls that the packages received.

    Attributes:
        made: Name and options of each call.
        spoil: Function that changes the result of a call, like a kernel defect.
    """

    made: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    spoil: Callable[[str, Tensor], Tensor] = lambda _, result: result

    def names(self) -> list[str]:
        return [name for name, _ in self.made]


def masked_scores(
    query: Tensor, key: Tensor, borders: Tensor, options: dict[str, Any]
) -> tuple[Tensor, float]:
    """Returns scores `[H, N, N]` under a mask of all pairs, in float32, and their scale."""
    positions = torch.arange(len(query))
    owner = torch.bucketize(positions, borders[1:], right=True)
    distance = positions[:, None] - positions
    allowed = owner[:, None] == owner
    left, right = options["left"], options["right"]
    if options["causal"] or right is not None:
        allowed &= distance >= -(right or 0)
    if left is not None:
        allowed &= distance <= left
    scale = options["scale"] or query.shape[-1] ** -0.5
    scores = torch.einsum("qhe,khe->hqk", query.float(), key.float()) * scale
    return scores.masked_fill(~allowed, -torch.inf), scale


def _repeated(query: Tensor, *parts: Tensor) -> list[Tensor]:
    return [part.float().repeat_interleave(query.shape[1] // part.shape[1], 1) for part in parts]


def _forward(calls: Calls, name: str, parts: Any, borders: Tensor, **options: Any) -> Any:
    calls.made.append((f"{name} forward", options))
    query = parts[0]
    key, value = _repeated(query, *parts[1:])
    scores, _ = masked_scores(query, key, borders, options)
    out = torch.einsum("hqk,khe->qhe", scores.softmax(-1), value)
    return calls.spoil("forward", out.to(query.dtype)), scores.logsumexp(-1)


def _backward(calls: Calls, name: str, dout: Any, parts: Any, borders: Any, **options: Any) -> Any:
    """Returns gradients of queries, keys and values: operators cannot call autograd."""
    calls.made.append((f"{name} backward", options))
    query, dout = parts[0].float(), dout.float()
    key, value = _repeated(query, *parts[1:])
    scores, scale = masked_scores(query, key, borders, options)
    weights = scores.softmax(-1)
    d_weights = torch.einsum("qhe,khe->hqk", dout, value)
    d_scores = weights * (d_weights - (weights * d_weights).sum(-1, keepdim=True)) * scale
    gradients = [
        torch.einsum("hqk,khe->qhe", d_scores, key),
        torch.einsum("hqk,qhe->khe", d_scores, query),
        torch.einsum("hqk,qhe->khe", weights, dout),
    ]
    gradients[1:] = [each.unflatten(1, (parts[1].shape[1], -1)).sum(2) for each in gradients[1:]]
    return [calls.spoil("backward", each.to(parts[0].dtype)) for each in gradients]


def _unless_negative(side: int | None) -> int | None:
    return None if side is None or side < 0 else side


def _version_3(calls: Calls) -> SimpleNamespace:
    """The operators `torch.ops.flash_attn_3`."""

    def fwd(*arguments: Any) -> Any:
        assert len(arguments) == 34
        borders, scale, causal = arguments[7], *arguments[23:25]
        sides = {"left": arguments[25], "right": arguments[26]}
        sides = {name: _unless_negative(side) for name, side in sides.items()}
        results = _forward(calls, "3", arguments[:3], borders, scale=scale, causal=causal, **sides)
        return *results, None, None

    def bwd(*arguments: Any) -> None:
        assert len(arguments) == 22
        dout, *parts = arguments[:4]
        borders, scale, causal = arguments[9], *arguments[15:17]
        sides = {"left": arguments[17], "right": arguments[18]}
        options = {name: _unless_negative(side) for name, side in sides.items()}
        options |= {"scale": scale, "causal": causal, "deterministic": arguments[20]}
        gradients = _backward(calls, "3", dout, parts, borders, **options)
        for output, gradient in zip(arguments[6:9], gradients, strict=True):
            output.copy_(gradient)

    return SimpleNamespace(fwd=fwd, bwd=bwd)


def _version_4(calls: Calls) -> ModuleType:
    """The module `flash_attn.cute.interface`."""

    def _flash_attn_fwd(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        qv: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        seqused_q: Tensor | None = None,
        seqused_k: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        min_seqlen_k: int | None = None,
        page_table: Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        softcap: float | None = None,
        window_size_left: int | None = None,
        window_size_right: int | None = None,
        *,
        num_splits: int = 1,
        return_lse: bool = False,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, None, None, None]:
        assert cu_seqlens_q is not None and return_lse and softcap is None and out is None
        sides = {"left": window_size_left, "right": window_size_right}
        results = _forward(
            calls, "4", (q, k, v), cu_seqlens_q, scale=softmax_scale, causal=causal, **sides
        )
        return *results, None, None, None

    def _flash_attn_bwd(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        dout: Tensor,
        lse: Tensor,
        softmax_scale: float | None = None,
        causal: bool = False,
        softcap: float = 0.0,
        window_size_left: int | None = None,
        window_size_right: int | None = None,
        *,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        deterministic: bool = False,
    ) -> tuple[Tensor, ...]:
        options = {"scale": softmax_scale, "causal": causal, "deterministic": deterministic}
        sides = {"left": window_size_left, "right": window_size_right}
        return tuple(_backward(calls, "4", dout, (q, k, v), cu_seqlens_q, **options, **sides))

    module = ModuleType("flash_attn.cute.interface")
    module.__dict__.update(_flash_attn_fwd=_flash_attn_fwd, _flash_attn_bwd=_flash_attn_bwd)
    return module


class _OnTheCpu:
    """Torch's `Library`, but registers for the CPU what is meant for CUDA."""

    def __init__(self, *names: str) -> None:
        self.library = Library(*names[:2], "CPU")

    def impl(self, name: str, function: Callable[..., Any], _: str) -> None:
        self.library.impl(name, function, "CPU")


@contextmanager
def installed(*versions: int, at: tuple[int, int]) -> Iterator[Calls]:
    """Installs FlashAttention packages and simulates a GPU of a compute capability."""
    calls, real_version = Calls(), metadata.version
    with ExitStack() as stack:
        enter = stack.enter_context

        def version_of(name: str) -> str:
            number = name.removeprefix("flash-attn-")
            if number not in "34":
                return real_version(name)
            if int(number) not in versions:
                raise metadata.PackageNotFoundError(name)
            return {"3": "3.0.0", "4": "4.0.0b36"}[number]

        enter(mock.patch.object(metadata, "version", version_of))
        enter(mock.patch.object(torch.cuda, "get_device_capability", lambda _=None: at))
        enter(mock.patch.dict(flash_attention._UNFIT, clear=True))
        enter(mock.patch.dict(_registry._FLASH_ATTENTION_IMPLS))
        enter(mock.patch.object(torch._C, "_set_sdp_use_fa3", lambda _: None, create=True))
        for number, bridge in BRIDGES.items():
            enter(mock.patch.object(bridge, "Library", _OnTheCpu))
            enter(
                mock.patch.object(
                    bridge, f"_fa{number}_common_support_error", lambda *_, **__: None
                )
            )
            enter(mock.patch.object(bridge, "_get_device_major", lambda _: at[0]))
        modules: dict[str, ModuleType] = {}
        if 3 in versions:
            modules["flash_attn_interface"] = ModuleType("flash_attn_interface")
            enter(mock.patch.object(torch.ops, "flash_attn_3", _version_3(calls), create=True))
        if 4 in versions:
            interface = _version_4(calls)
            cute = ModuleType("flash_attn.cute")
            cute.interface = interface  # type: ignore[attr-defined]
            modules |= {"flash_attn": ModuleType("flash_attn"), "flash_attn.cute": cute}
            modules["flash_attn.cute.interface"] = interface
        enter(mock.patch.dict(sys.modules, modules))
        sys.modules.pop("nemo_rl_core.backends.experimental.flash_attention_4", None)
        stack.callback(_fa4._fa4_import_module.cache_clear)
        stack.callback(flash_attention._restore)
        yield calls
