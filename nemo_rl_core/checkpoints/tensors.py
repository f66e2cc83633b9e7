"""Tensors on disk without pickle: a safetensors file, or the weights in a transformers folder."""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_rl_core.errors import StoreError
from nemo_rl_core.store import files

if TYPE_CHECKING:
    from torch import Tensor

DEFAULT_SHARD_BYTES = 4 * 1024**3
_WEIGHTS = "model.safetensors"


def order_metadata(path: Path) -> None:
    """Sorts the metadata of a safetensors file, so that equal content gives equal bytes.

    The library writes its entries in the random order of a hash table.
    """
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header.get("__metadata__", {}).items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        assert len(text) <= size, path
        file.seek(8)
        file.write(text.ljust(size))


def save_tensors(
    path: Path, tensors: Mapping[str, "Tensor"], *, metadata: dict[str, str] | None = None
) -> None:
    """Writes tensors of any shape and device to a safetensors file, atomically.

    Tensors that share memory (tied embeddings) are written, and read back, as separate tensors.

    Args:
        path: The file; it is replaced.
        tensors: Tensors by name.
        metadata: Strings for the file's header.

    Raises:
        StoreError: If writing fails; an older file is then kept.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    copies: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        copy = tensor.detach().cpu().contiguous()
        address = copy.untyped_storage().data_ptr()
        copies[name] = copy.clone() if address in seen else copy
        seen.add(address)
    with files.written_aside(path) as aside:
        try:
            save_file(copies, aside, metadata=metadata)
        except SafetensorError as error:
            raise StoreError(
                f"cannot write the tensors of {path}",
                got=str(error),
                fix="free some space, or point NEMO_RL_HOME at another disk",
            ) from error


def write_float32(
    path: Path, shapes: Mapping[str, tuple[int, ...]], read: Callable[[str], "Tensor"]
) -> None:
    """Writes a safetensors file of float32 tensors, with one tensor in memory at a time.

    Writes the same bytes as `safetensors.torch.save_file`, which takes all tensors at once.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in sorted(shapes):
        start, end = end, end + 4 * math.prod(shapes[name])
        header[name] = {
            "dtype": "F32",
            "shape": list(shapes[name]),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(-(-len(text) // 8) * 8)  # tensors begin at a multiple of 8
    with files.storage_errors(path), files.written_aside(path) as aside, aside.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in sorted(shapes):
            tensor = read(name).contiguous()
            assert tuple(tensor.shape) == shapes[name], name
            assert str(tensor.dtype) == "torch.float32", name
            file.write(tensor.reshape(-1).numpy().data)


def load_tensors(path: Path) -> dict[str, "Tensor"]:
    """Reads a safetensors file to the CPU."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return dict(load_file(path))
    except (SafetensorError, OSError) as error:
        raise StoreError(
            f"cannot read tensors from {path}",
            expected="a valid safetensors file",
            got=f"{type(error).__name__}: {error}",
            fix="remove its folder, and run the stage again",
        ) from error


def save_weights(
    folder: Path,
    named_tensors: Iterable[tuple[str, "Tensor"]],
    *,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> int:
    """Writes a model's weights in the transformers layout, from a stream; returns their bytes.

    Writes one file `model.safetensors`, or several with an index if they exceed `max_shard_bytes`.
    At most one file's tensors (or one larger tensor) are in memory at a time, in addition to those
    of the stream.
    """
    parts: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    seen: set[str] = set()
    pending_bytes = total_bytes = 0

    def flush() -> None:
        # The number of files is part of each name, and known only at the end.
        path = folder / f"{_WEIGHTS}.{len(parts)}{files.ASIDE}"
        save_tensors(path, pending, metadata={"format": "pt"})
        parts.append(list(pending))
        pending.clear()

    for name, tensor in named_tensors:
        if name in seen:
            raise ValueError(f"the stream of weights has two tensors named {name!r}")
        seen.add(name)
        num_bytes = tensor.numel() * tensor.element_size()
        if pending and pending_bytes + num_bytes > max_shard_bytes:
            flush()
            pending_bytes = 0
        # Copied now, as it would otherwise stay on the device until its file is full.
        pending[name] = tensor.detach().cpu()
        pending_bytes += num_bytes
        total_bytes += num_bytes
    if pending or not parts:
        flush()
    _name_parts(folder, parts, total_bytes)
    return total_bytes


def _name_parts(folder: Path, parts: list[list[str]], total_bytes: int) -> None:
    stem, count = _WEIGHTS.removesuffix(".safetensors"), len(parts)
    weight_map: dict[str, str] = {}
    with files.storage_errors(folder):
        for number, names in enumerate(parts):
            several = f"{stem}-{number + 1:05d}-of-{count:05d}.safetensors"
            file = _WEIGHTS if count == 1 else several
            (folder / f"{_WEIGHTS}.{number}{files.ASIDE}").replace(folder / file)
            weight_map |= dict.fromkeys(names, file)
        if count > 1:
            index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
            files.write_atomic(folder / f"{_WEIGHTS}.index.json", json.dumps(index, indent=1))
