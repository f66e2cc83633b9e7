"""Megatron-core without CUDA: each of its assumptions about a GPU, redirected to the CPU.

Functions that raise without CUDA are redirected, and so is the name `torch` inside Megatron modules
that use `device="cuda"`. Other libraries in the same process are not affected.
"""

import contextlib
import importlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

_CPU = torch.device("cpu")

# Modules that create tensors with device="cuda", or sort parameters by a CUDA type's name.
_MODULES_THAT_NAME_CUDA = (
    "distributed.param_and_grad_buffer",  # warm-up of a communicator
    "optimizer.clip_grads",  # overflow flags and norms
    "optimizer.distrib_optimizer",  # buffers of the sharded state
    "optimizer.optimizer",  # the loss scale, and flags of non-finite values
    "pipeline_parallel.schedules",  # the count of tokens in a step
    "tensor_parallel.data",  # sizes of broadcast tensors
    "transformer.moe.moe_utils",  # the log of auxiliary losses
    "utils",  # the norm of all gradients
)
_FACTORIES = ("arange", "empty", "full", "ones", "tensor", "zeros")

_applied = False


def run_on_cpu_where_cuda_is_absent() -> None:
    """Redirects Megatron-core's CUDA assumptions in this process; no-op if repeated or with CUDA.

    Call before creating the first Megatron object.
    """
    global _applied  # noqa: PLW0603  (a process is either redirected or it is not)
    if _applied or torch.cuda.is_available():
        return
    _redirect_torch()
    _redirect_random_state()
    for name in _MODULES_THAT_NAME_CUDA:
        module: Any = importlib.import_module(f"megatron.core.{name}")
        module.torch = _TorchOnCPU()
    moe_utils: Any = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    # The router of experts needs the attribute even without Transformer Engine, which defines it.
    moe_utils.te_general_gemm = None
    # Token counts per rank must be numpy arrays before tokens are sent; Megatron assumes this for
    # tensors that are not on CUDA.
    dispatcher: Any = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    dispatcher.maybe_move_tensor_to_cpu = _counts_on_host
    _applied = True


def import_uncompiled_where_cuda_is_absent() -> None:
    """Disables Megatron-core's decorator that compiles small functions.

    It applies `torch.compile` on import, which needs a C++ compiler on a CPU and takes most of the
    import time.
    """
    if torch.cuda.is_available():
        return
    library: Any = torch
    compile_, library.compile = library.compile, _uncompiled
    try:
        importlib.import_module("megatron.core.jit")
    finally:
        library.compile = compile_


def _uncompiled(function: Any) -> Any:
    return function


def _redirect_torch() -> None:
    cuda: Any = torch.cuda
    # Rotary embeddings, sequence-parallel buffers, DDP's gradient buffers, pipeline receives and
    # the router of experts call it to place tensors.
    cuda.current_device = lambda: _CPU
    # Pipeline communication and DDP synchronize kernels; there are none on a CPU.
    cuda.synchronize = lambda device=None: None
    # Recomputation of activations and the random tracker read and keep the device's generator.
    cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    # The dispatcher of tokens to experts copies counts to the host during the computation.
    cuda.Stream = _NoStream
    cuda.current_stream = lambda device=None: _NoStream()
    cuda.stream = contextlib.nullcontext
    # Tied embeddings of a pipeline, and optimizer state that is loaded, are "moved to the GPU".
    tensor: Any = torch.Tensor
    tensor.cuda = _identity
    torch.nn.Module.cuda = _identity  # type: ignore[method-assign,assignment]
    # The optimizers sort parameters by the name of their type, and clipping asserts on it.
    tensor.type = _type_as_on_cuda(torch.Tensor.type)


def _counts_on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


class _NoStream:
    def wait_stream(self, stream: "_NoStream") -> None:
        """No-op: all work is done."""

    def record_event(self, event: Any = None) -> "_NoStream":
        return self

    def synchronize(self) -> None:
        """No-op: all work is done."""


def _identity(tensor_or_module: Any, *_: Any, **__: Any) -> Any:
    return tensor_or_module


def _type_as_on_cuda(original: Callable[..., Any]) -> Callable[..., Any]:
    def type_(tensor: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            return str(original(tensor)).replace("torch.", "torch.cuda.", 1)
        return original(tensor, dtype, *args, **kwargs)

    return type_


def _redirect_random_state() -> None:
    random: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    # A fork replaces the GPU's generator with one per tensor rank, for dropout inside
    # tensor-parallel regions. Dropout is always 0, so none is needed.
    random.CudaRNGStatesTracker.fork = _no_fork
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda new_state, device=-1, graph_safe=False: None


@contextlib.contextmanager
def _no_fork(tracker: Any, name: str = "") -> Iterator[None]:
    yield


class _TorchOnCPU(types.ModuleType):
    def __init__(self) -> None:
        super().__init__("torch")
        for name in _FACTORIES:
            setattr(self, name, _on_cpu(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def make(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        return factory(*args, device=_CPU if device == "cuda" else device, **kwargs)

    return make
