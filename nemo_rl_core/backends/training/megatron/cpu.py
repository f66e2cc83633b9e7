"""Megatron-core without CUDA: each of its assumptions about a GPU, redirected to the CPU.

Nothing here changes a machine that has CUDA. What is redirected is either of no meaning without
CUDA (it would raise), or the name `torch` inside those Megatron modules that write `device="cuda"`,
so that code of other libraries in the same process runs as before, in every thread.
"""

import contextlib
import importlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

_CPU = torch.device("cpu")

# Modules that make tensors with the words device="cuda", or sort parameters by a CUDA type's name.
_MODULES_THAT_NAME_CUDA = (
    "distributed.param_and_grad_buffer",  # warm-up of a communicator
    "optimizer.clip_grads",  # overflow flags and norms
    "optimizer.distrib_optimizer",  # buffers of the sharded state
    "optimizer.optimizer",  # the loss scale, and flags of what is not finite
    "pipeline_parallel.schedules",  # the count of tokens in a step
    "tensor_parallel.data",  # sizes of what is broadcast
    "transformer.moe.moe_utils",  # the log of auxiliary losses
    "utils",  # the norm of all gradients
)
_FACTORIES = ("arange", "empty", "full", "ones", "tensor", "zeros")

_applied = False


def run_on_cpu_where_cuda_is_absent() -> None:
    """Redirects Megatron-core's CUDA assumptions in this process; again, or with CUDA: nothing.

    To be called before the first Megatron object is made.
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
    # Asked for by the router of experts even where Transformer Engine, which has it, is absent.
    moe_utils.te_general_gemm = None
    # How many tokens go to which rank must leave the tensor before tokens are sent; what is no
    # CUDA tensor is taken to have done so.
    dispatcher: Any = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    dispatcher.maybe_move_tensor_to_cpu = _counts_on_host
    _applied = True


def import_uncompiled_where_cuda_is_absent() -> None:
    """Imports Megatron-core's decorator for small functions so that it compiles none of them.

    It hands them to `torch.compile` as their modules are imported: on a CPU that needs a C++
    compiler when they are called, and loads the compiler's modules, most of the import.
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
    # the router of experts ask for it where they put a tensor.
    cuda.current_device = lambda: _CPU
    # Pipeline communication and DDP wait for kernels that are still running; there are none.
    cuda.synchronize = lambda device=None: None
    # Recomputation of activations and the random tracker read and keep the device's generator.
    cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    # The dispatcher of tokens to experts copies counts to the host beside the computation.
    cuda.Stream = _NoStream
    cuda.current_stream = lambda device=None: _NoStream()
    cuda.stream = contextlib.nullcontext
    # Tied embeddings of a pipeline, and optimizer state that is loaded, are "moved to the GPU".
    tensor: Any = torch.Tensor
    tensor.cuda = _itself
    torch.nn.Module.cuda = _itself  # type: ignore[method-assign,assignment]
    # The optimizers sort parameters by the name of their type, and clipping asserts on it.
    tensor.type = _type_as_on_cuda(torch.Tensor.type)


def _counts_on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


class _NoStream:
    """A stream of work on the CPU: all of it is done when the call returns."""

    def wait_stream(self, stream: "_NoStream") -> None:
        """Nothing is left to wait for."""

    def record_event(self, event: Any = None) -> "_NoStream":
        """The event is over already."""
        return self

    def synchronize(self) -> None:
        """Nothing is left to wait for."""


def _itself(tensor_or_module: Any, *_: Any, **__: Any) -> Any:
    return tensor_or_module


def _type_as_on_cuda(original: Callable[..., Any]) -> Callable[..., Any]:
    def type_(tensor: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            return str(original(tensor)).replace("torch.", "torch.cuda.", 1)
        return original(tensor, dtype, *args, **kwargs)

    return type_


def _redirect_random_state() -> None:
    random: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    # A fork swaps the GPU's generator for one that differs over tensor ranks, for dropout inside
    # tensor-parallel regions. Dropout is always 0 here, so that nothing is ever drawn in one.
    random.CudaRNGStatesTracker.fork = _no_fork
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda new_state, device=-1, graph_safe=False: None


@contextlib.contextmanager
def _no_fork(tracker: Any, name: str = "") -> Iterator[None]:
    yield


class _TorchOnCPU(types.ModuleType):
    """`torch`, but what is made on "cuda" is made on the CPU."""

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
