"""A simulated CUDA device: tensors that report `cuda:0` and store their numbers on the CPU.

    with simulated_cuda() as transfers:
        backend.setup(...)          # local_device() is cuda:0
    assert count(transfers, "sync") == ...

Code inside computes the same numbers as on the CPU, so that they can be compared with a run
outside. Every operator is checked against the rules of CUDA before it runs:

- A tensor on the GPU cannot be combined with one on the CPU, except one without dimensions, an
index of it, and the other side of `copy_`. - It cannot be converted to numpy, and a CPU generator
cannot sample on the GPU. - Under `torch.use_deterministic_algorithms(True)`, operators without a
deterministic kernel raise. - Operands of float8 products have the layouts and sizes that CUDA's
kernels accept.

Host syncs and copies to the GPU are recorded, each with the function of the project that caused it.

Not simulated: kernels (so neither FlexAttention nor varlen), their rounding, memory, streams,
several ranks, speed. Success here does not mean that a program has run on a GPU.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

Kind = Literal["sync", "upload", "pinned"]
_CPU, _CUDA = torch.device("cpu"), torch.device("cuda", 0)
_PROJECT = "nemo_rl_core"
_ASK_WHEN_IMPORTED = ("torch._dynamo.device_interface", "torch.distributed.fsdp", "torch.testing")

_MEETS_BOTH = {"copy_", "index", "index_put", "index_put_", "_index_put_impl_", "set_"}
_INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
_ALWAYS_SYNCS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2"}
_NONDETERMINISTIC: dict[str, Callable[[Sequence[Any]], bool]] = {
    "cumsum": lambda arguments: arguments[0].is_floating_point(),
    "histc": lambda arguments: arguments[0].is_floating_point(),
    "put_": lambda arguments: True,
    "median": lambda arguments: len(arguments) > 1,
    "kthvalue": lambda arguments: True,
    "nll_loss2d_forward": lambda arguments: True,
    "bincount": lambda arguments: len(arguments) > 1 and arguments[1] is not None,
}
"""Listed by `torch.use_deterministic_algorithms` (torch 2.13): conditions on the arguments."""


class CudaRuleError(RuntimeError):
    """CUDA would have refused the operation."""


@dataclass(frozen=True)
class Transfer:
    """A wait of the host for the GPU, or a copy to its memory.

    Attributes:
        kind: `sync`, where the host waits for a result or a copy of it; `upload`; or `pinned`, a
            copy from pinned memory, for which the host does not wait.
        operator: Operator that caused it.
        location: File and function of the project, such as `packed.py:_read`.
    """

    kind: Kind
    operator: str
    location: str


def count(transfers: Iterable[Transfer], kind: Kind, *, outside: str | None = None) -> int:
    """Returns the number of transfers of a kind, except those at the location `outside`."""
    return sum(each.kind == kind and each.location != outside for each in transfers)


_TRANSFERS: list[Transfer] = []
_CREATED_ON: list[torch.device] = []
"""Devices on which the current Python calls create tensors; innermost last."""


def _record(kind: Kind, operator: str) -> None:
    frame, location = sys._getframe(1), "?"
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if _PROJECT in path.parts:
            location = f"{path.name}:{frame.f_code.co_name}"
            break
        frame = frame.f_back  # type: ignore[assignment]
    _TRANSFERS.append(Transfer(kind, operator, location))


class SimulatedTensor(torch.Tensor):
    """A tensor that is on `cuda:0` for Python and on the CPU for torch's C++."""

    values: torch.Tensor

    @staticmethod
    def __new__(cls, values: torch.Tensor, requires_grad: bool = False) -> "SimulatedTensor":
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            values.size(),
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            layout=values.layout,
            device=values.device,
            requires_grad=requires_grad,
        )
        made.values = values
        return made

    device = property(lambda self: _CUDA)
    is_cuda = property(lambda self: True)
    record_stream = lambda self, stream: None  # noqa: E731  (there is one stream)
    is_cpu = property(lambda self: False)
    data = property(
        lambda self: SimulatedTensor(self.values.detach()), lambda self, new: self._set_data(new)
    )
    __torch_function__ = torch._C._disabled_torch_function_impl

    def _set_data(self, new: torch.Tensor) -> None:
        torch.Tensor.data.__set__(self, new)
        self.values = _values(new)

    def get_device(self) -> int:
        return 0

    def type(self, dtype: Any = None, *args: Any, **options: Any) -> Any:
        if dtype is None:
            return str(self.values.type()).replace("torch.", "torch.cuda.", 1)
        return torch.Tensor.type(self, dtype, *args, **options)

    def untyped_storage(self) -> Any:
        return self.values.untyped_storage()

    def data_ptr(self) -> int:
        return self.values.data_ptr()

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")

    def tolist(self) -> Any:
        _record("sync", "tolist")
        return self.values.tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"SimulatedTensor({self.values!r})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["values"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, *_: Any) -> "SimulatedTensor":
        return SimulatedTensor(inner["values"])

    def __deepcopy__(self, memo: Any) -> "SimulatedTensor":
        return SimulatedTensor(self.values.clone(), self.requires_grad)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(func, args, kwargs or {})


def _values(value: Any) -> Any:
    return value.values if isinstance(value, SimulatedTensor) else value


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, to_cuda: bool) -> torch.Tensor:
        ctx.came_from_cuda = isinstance(tensor, SimulatedTensor)
        copy = _values(tensor).detach().clone()
        return SimulatedTensor(copy) if to_cuda else copy

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return _moved(gradients[0], to_cuda=ctx.came_from_cuda), None


def _moved(tensor: torch.Tensor, *, to_cuda: bool, is_pinned: bool = False) -> torch.Tensor:
    if isinstance(tensor, SimulatedTensor) == to_cuda or tensor.is_meta:
        return tensor
    upload: Kind = "pinned" if is_pinned else "upload"
    _record(upload if to_cuda else "sync", "to")
    moved: torch.Tensor = _Move.apply(tensor, to_cuda)  # type: ignore[no-untyped-call]
    return moved


def _compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Applies CUDA's rules, then runs an operator on the CPU's numbers."""
    name = func._schema.name.removeprefix("aten::")
    leaves = tree_leaves((args, kwargs))
    on_gpu = [each for each in leaves if isinstance(each, SimulatedTensor)]
    if on_gpu:
        _apply_rules(name, args, leaves)
        _record_waits(name, args, kwargs)
    # C++ reports the CPU as the device of existing tensors.
    if name == "_to_copy" and _is_cuda(kwargs.get("device")):
        raise CudaRuleError("a move to the GPU within backward is not simulated")
    to_cuda = bool(on_gpu) or _is_cuda(kwargs.get("device"))
    if _CREATED_ON:
        to_cuda = _CREATED_ON[-1] == _CUDA
    elif name == "copy_":
        to_cuda = isinstance(args[0], SimulatedTensor)
    options = {key: _values_of_option(key, value) for key, value in kwargs.items()}
    results = func(*tree_map(_values, args), **options)
    arguments = {id(each.values): each for each in on_gpu}  # in-place operators return these

    def wrapped(result: Any) -> Any:
        if not isinstance(result, torch.Tensor) or isinstance(result, SimulatedTensor):
            return result
        if id(result) in arguments:
            return arguments[id(result)]
        return SimulatedTensor(result) if to_cuda and not result.is_meta else result

    return tree_map(wrapped, results)


def _values_of_option(name: str, value: Any) -> Any:
    if name == "pin_memory":
        return False
    if name == "device" and _is_cuda(value):
        return _CPU
    return tree_map(_values, value)


def _is_cuda(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def _is_on_cpu(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and not isinstance(value, SimulatedTensor)
        and value.device.type == "cpu"
        and value.dim() > 0
    )


def _apply_rules(name: str, args: Sequence[Any], leaves: Sequence[Any]) -> None:
    """Raises for operators with tensors on the GPU that CUDA would refuse."""
    if name not in _MEETS_BOTH and any(map(_is_on_cpu, leaves)):
        raise CudaRuleError(
            f"{name}: Expected all tensors to be on the same device, but found at least two "
            "devices, cuda:0 and cpu!"
        )
    if name in _INDEXED and _is_on_cpu(args[0]):
        raise CudaRuleError(
            f"{name}: indices should be either on cpu or on the same device as the indexed tensor"
        )
    if name.startswith(("index_put", "_index_put")) and _is_on_cpu(args[2]):
        raise CudaRuleError(f"{name}: expected self and values on the same device")
    if any(isinstance(each, torch.Generator) for each in leaves):
        raise CudaRuleError(f"{name}: Expected a 'cuda' device type for generator but found 'cpu'")
    if name == "_scaled_mm":
        _refuse_operands(_values(args[0]), _values(args[1]))
    is_refused = _NONDETERMINISTIC.get(name)
    if torch.are_deterministic_algorithms_enabled() and is_refused and is_refused(args):
        raise CudaRuleError(f"{name} does not have a deterministic implementation on CUDA")


def _refuse_operands(first: torch.Tensor, second: torch.Tensor) -> None:
    """Raises where CUDA's float8 products have requirements that the CPU's do not."""
    if first.stride(1) != 1 or second.stride(0) != 1:
        raise CudaRuleError("_scaled_mm: mat1 must be row major, and mat2 column major")
    if any(size % 16 for size in (first.shape[1], *second.shape)):
        raise CudaRuleError(
            "_scaled_mm: Expected trailing dimension of mat1, and mat2, to be divisible by 16, but "
            f"got {tuple(first.shape)} and {tuple(second.shape)}"
        )
    if first.dtype == second.dtype == torch.float8_e5m2:
        raise CudaRuleError("_scaled_mm: two Float8_e5m2 matrices cannot be multiplied")


def _record_waits(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Records the syncs and copies of an operator with tensors on the GPU."""
    has_unknown_size = name == "repeat_interleave" and kwargs.get("output_size") is None
    if name in _ALWAYS_SYNCS or has_unknown_size:
        _record("sync", name)
    elif name == "copy_" and isinstance(args[0], SimulatedTensor) != isinstance(
        args[1], SimulatedTensor
    ):
        _record("upload" if isinstance(args[0], SimulatedTensor) else "sync", name)
    elif name in _INDEXED:
        for index in (each for each in args[1] if each is not None):
            if index.dtype in (torch.bool, torch.uint8):  # CUDA looks for the set positions
                _record("sync", f"{name} by a mask")
            elif _is_on_cpu(index):
                _record("upload", f"{name} by an index of the CPU")


class _Operators(TorchDispatchMode):
    """Intercepts every operator, including those without a tensor argument."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        is_created = bool(_CREATED_ON) or _is_cuda(kwargs.get("device"))
        if is_created or any(isinstance(each, SimulatedTensor) for each in leaves):
            return _compute(func, args, kwargs)
        return func(*args, **kwargs)


class _Calls(TorchFunctionMode):
    """Intercepts Python calls that name a device before C++ looks for it.

    Torch disables it during `backward`: layers that are recomputed there may create tensors on the
    GPU, but moving tensors to it raises.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.Tensor.to, torch.Tensor.cuda, torch.Tensor.cpu):
            return _to(func, args, kwargs)
        if func is torch.Tensor.pin_memory or kwargs.pop("pin_memory", False):
            pinned = args[0] if func is torch.Tensor.pin_memory else func(*args, **kwargs)
            pinned.is_page_locked = True
            return pinned
        from_host = func in (torch.tensor, torch.as_tensor)
        if from_host and isinstance(args[0], list | tuple):
            # For tensors on the GPU, torch asks for one value at a time.
            args = (tree_map(_as_number, args[0]), *args[1:])
        if kwargs.get("device") is None or func is torch.load:
            return func(*args, **kwargs)
        device = kwargs["device"]
        device = _CUDA if isinstance(device, int) else torch.device(device)
        if device.type == "meta":
            return func(*args, **kwargs)
        generator = kwargs.get("generator")
        if device.type == "cuda" and generator is not None:
            raise CudaRuleError("Expected a 'cuda' device type for generator but found 'cpu'")
        kwargs["device"] = _CPU
        if from_host:
            made = args[0] if isinstance(args[0], SimulatedTensor) else func(*args, **kwargs)
            return _moved(made, to_cuda=device.type == "cuda")
        _CREATED_ON.append(_CUDA if device.type == "cuda" else _CPU)
        try:
            return func(*args, **kwargs)
        finally:
            _CREATED_ON.pop()


def _as_number(value: Any) -> Any:
    return value.item() if isinstance(value, SimulatedTensor) else value


def _to(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    """`Tensor.to`, `cuda` and `cpu`, with all forms of their arguments."""
    tensor, *rest = args
    device = {torch.Tensor.cuda: "cuda", torch.Tensor.cpu: "cpu"}.get(func)
    if device is not None:
        return _moved(tensor, to_cuda=device == "cuda")
    # Does nothing for pageable memory.
    is_pinned = kwargs.pop("non_blocking", False) and getattr(tensor, "is_page_locked", False)
    others: list[Any] = []
    for each in [*rest, kwargs.pop("device", None), kwargs.pop("other", None)]:
        if isinstance(each, torch.Tensor):
            device = each.device.type
            others.append(each.dtype)
        elif isinstance(each, torch.device | str):
            device = torch.device(each).type
        elif isinstance(each, torch.dtype | torch.memory_format):
            others.append(each)
        elif isinstance(each, int) and not isinstance(each, bool):
            device = "cuda"
    if device == "meta":
        return torch.Tensor.to(_values(tensor), "meta")
    to_cuda = device == "cuda"
    moved = tensor if device is None else _moved(tensor, to_cuda=to_cuda, is_pinned=bool(is_pinned))
    if others or kwargs:
        return torch.Tensor.to(moved, *others, **kwargs)
    return moved


def _replacements(uuid: str) -> Iterator[tuple[Any, str, Any]]:
    """Yields torch's device queries to replace: an owner, an attribute and its temporary value."""
    cuda = torch.cuda
    properties = SimpleNamespace(
        name="simulated", uuid=uuid, total_memory=80 * 2**30, major=9, minor=0
    )
    yield cuda, "is_available", lambda: True
    yield cuda, "is_initialized", lambda: True
    yield cuda, "_lazy_init", lambda: None
    yield cuda, "device_count", lambda: 1
    yield cuda, "current_device", lambda: 0
    yield cuda, "set_device", lambda device: None
    yield cuda, "get_device_properties", lambda device=None: properties
    yield cuda, "get_device_capability", lambda device=None: (9, 0)
    yield cuda, "is_bf16_supported", lambda *_, **__: True
    quiet = ("empty_cache", "ipc_collect", "manual_seed", "manual_seed_all")
    for name in (*quiet, "reset_peak_memory_stats"):
        yield cuda, name, lambda *_: None
    # For C++ everything is on the CPU, including autocast.
    enabled, dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
    start = torch.autocast.__init__
    yield torch, "is_autocast_enabled", lambda kind="cuda": enabled("cpu")
    yield torch, "get_autocast_dtype", lambda kind: dtype("cpu")
    yield torch, "get_autocast_gpu_dtype", lambda: dtype("cpu")

    def start_on_cpu(self: Any, device_type: str, *args: Any, **options: Any) -> None:
        start(self, "cpu", *args, **options)

    yield torch.autocast, "__init__", start_on_cpu
    yield from _order_of_work()
    yield from _groups_over_gloo()


class _Queue:
    """A stream or an event: all work is done when the call returns."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name in ("wait_stream", "wait_event", "synchronize", "record", "wait"):
            return lambda *_: None
        if name in ("record_event", "query"):
            return lambda *_: self
        raise AttributeError(name)


def _order_of_work() -> Iterator[tuple[Any, str, Any]]:
    cuda, state = torch.cuda, torch.get_rng_state()
    yield cuda, "Stream", _Queue
    yield cuda, "Event", _Queue
    yield cuda, "current_stream", lambda device=None: _Queue()
    yield cuda, "default_stream", lambda device=None: _Queue()
    yield cuda, "stream", lambda stream: nullcontext()
    yield cuda, "synchronize", lambda device=None: None
    for module in (cuda, cuda.random):
        yield module, "get_rng_state", lambda device="cuda": state.clone()
        yield module, "set_rng_state", lambda state, device="cuda": None
    yield cuda, "default_generators", (torch.Generator(),)


def _groups_over_gloo() -> Iterator[tuple[Any, str, Any]]:
    """Replaces NCCL, which needs a GPU, with gloo on the CPU."""
    from torch.distributed import distributed_c10d

    join, new = distributed_c10d.init_process_group, distributed_c10d.new_group

    def join_by_gloo(backend: Any = None, *args: Any, **options: Any) -> Any:
        return join("gloo", *args, **options)

    def new_by_gloo(
        ranks: Any = None, timeout: Any = None, backend: Any = None, **rest: Any
    ) -> Any:
        return new(ranks, timeout, "gloo", **rest)

    for module in (torch.distributed, distributed_c10d):
        yield module, "init_process_group", join_by_gloo
        yield module, "new_group", new_by_gloo


def _forget_answers() -> None:
    """Clears transformers' cached answers about devices."""
    for name, query in vars(import_module("transformers.utils.import_utils")).items():
        if name.startswith("is_torch_") and hasattr(query, "cache_clear"):
            query.cache_clear()


@contextmanager
def simulated_cuda(uuid: str = "simulated") -> Iterator[list[Transfer]]:
    """Simulates a CUDA device for this thread within the block; yields its transfers in order.

    Args:
        uuid: Id of the device; processes with the same id share it.
    """
    for name in _ASK_WHEN_IMPORTED:
        import_module(name)
    _TRANSFERS.clear()
    _forget_answers()
    with ExitStack() as stack:
        stack.callback(_forget_answers)
        for owner, name, value in _replacements(uuid):
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(_Operators())
        stack.enter_context(_Calls())
        yield _TRANSFERS
