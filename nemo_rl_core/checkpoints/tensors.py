"""Tensors on disk without pickle: one file of them, or the weights of a transformers folder."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_rl_core.errors import StoreError
from nemo_rl_core.store import files

if TYPE_CHECKING:
    from torch import Tensor

DEFAULT_SHARD_BYTES = 4 * 1024**3
_WEIGHTS = "model.safetensors"


def order_metadata(path: Path) -> None:
    """Puts the metadata of a safetensors file in order, so that equal content is equal bytes.

    The library keeps them in a hash table and writes them as they come, in another order every
    time.
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

    Tensors that share memory (tied embeddings) are written, and come back, as separate ones.

    Args:
        path: The file; what it held is replaced.
        tensors: By name.
        metadata: Strings for the file's header.

    Raises:
        StoreError: If the disk refuses; an older file then stays.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    plain: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        copy = tensor.detach().cpu().contiguous()
        address = copy.untyped_storage().data_ptr()
        plain[name] = copy.clone() if address in seen else copy
        seen.add(address)
    with files.written_aside(path) as aside:
        try:
            save_file(plain, aside, metadata=metadata)
        except SafetensorError as error:
            raise StoreError(
                f"cannot write the tensors of {path}",
                got=str(error),
                fix="free some space, or point NEMO_RL_HOME at another disk",
            ) from error


def load_tensors(path: Path) -> dict[str, "Tensor"]:
    """Reads a safetensors file to the CPU.

    Raises:
        StoreError: If the file is missing, or is no whole safetensors file.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return dict(load_file(path))
    except (SafetensorError, OSError) as error:
        raise StoreError(
            f"cannot read tensors from {path}",
            expected="a whole safetensors file",
            got=f"{type(error).__name__}: {error}",
            fix="remove the folder it lies in, and run the stage again",
        ) from error


def save_weights(
    folder: Path,
    named_tensors: Iterable[tuple[str, "Tensor"]],
    *,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> int:
    """Writes a model's weights as transformers reads them, from a stream.

    One file `model.safetensors`, or several with an index once they outgrow `max_shard_bytes`. No
    more than one file's tensors (or one larger tensor) are in memory at a time, besides what the
    stream itself holds.

    Args:
        folder: Made where it is missing.
        named_tensors: Whole tensors under the names of the checkpoint, tied ones once.
        max_shard_bytes: Bound on a file's size; a tensor that is larger gets one of its own.

    Returns:
        The summed size of the tensors, in bytes.

    Raises:
        ValueError: If two tensors have one name.
        StoreError: If the disk refuses.
    """
    parts: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    seen: set[str] = set()
    pending_bytes = total_bytes = 0

    def flush() -> None:
        # The number of files, which every file's name tells, is known only at the end.
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
        # Off the device at once: there it would stay until its file is full.
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
