"""A tokenizer whose class is in the model's code, in a separate worker process.

The controller encodes prompts and decodes completions, but does not run the code of a model.
"""

import io
import os
import pickle
import subprocess
import sys
import threading
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Final

from nemo_rl_core.checkpoints.model_code import (
    code_digest,
    not_run_here,
    runs_in_this_process,
    worker_environment,
)
from nemo_rl_core.errors import ModelError

_READABLE: Final = {
    "builtins": {"bytearray", "complex", "frozenset", "range", "set", "slice"},
    "collections": {"OrderedDict", "defaultdict"},
    "pathlib": {"PosixPath"},
    "numpy": {"dtype", "ndarray"},
    "numpy._core.multiarray": {"_reconstruct", "scalar"},
    "numpy._core.numeric": {"_frombuffer"},
    "tokenizers": {"AddedToken", "Encoding", "Tokenizer"},
    "tokenizers.models": {"Model"},
    "torch": {"Size"},
    "torch._utils": {"_rebuild_tensor_v2"},
    "transformers.tokenization_utils_base": {"BatchEncoding", "CharSpan", "TokenSpan"},
}
"""Names in answers of a tokenizer, none of which runs code from the answer."""
_ERRORS: Final = {
    each.__name__: each
    for each in (AttributeError, IndexError, KeyError, NotImplementedError, TypeError, ValueError)
}
"""Errors that keep their classes; for example, `getattr` with a default reads the first."""


class TokenizerProcess:
    """Passes attributes, calls and assignments on to a tokenizer in another process.

    Args:
        folder: A model folder whose code is allowed.
    """

    def __init__(self, folder: Path) -> None:
        child = subprocess.Popen(
            [sys.executable, "-m", __name__, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **worker_environment()},
        )
        vars(self).update(_folder=folder, _child=child, _lock=threading.Lock())
        len(self)  # raises the error of a tokenizer that does not load

    def _ask(self, kind: str, name: str, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            try:
                pickle.dump((kind, name, args, kwargs), self._child.stdin)
                self._child.stdin.flush()
                answer = _Unpickler(self._child.stdout).load()
            except (EOFError, BrokenPipeError) as error:
                raise ModelError(
                    f"the process of the tokenizer of {self._folder.name!r} has ended",
                    expected="a tokenizer that loads with trust_remote_code=True",
                    got=f"exit status {self._child.wait()}",
                    fix="read its error output above, and correct the model's Python files",
                ) from error
        try:  # the answer is bytes, so that the next one is read from its beginning
            failure, value = _Unpickler(io.BytesIO(answer)).load()
        except pickle.UnpicklingError as refused:
            raise ModelError(
                f"the tokenizer of {self._folder.name!r} returned what this process does not read",
                expected="plain data, arrays, tensors, or classes of transformers' tokenizers",
                got=f"{name}: {refused}",
                fix="change the model's Python files, so that they return such data",
            ) from refused
        if failure is not None:
            raise _error(*failure)
        return value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copy and pickle ask for optional methods
            raise AttributeError(name)
        is_method, value = self._ask("get", name)
        return partial(self._ask, "call", name) if is_method else value

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask("set", name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Encodes texts."""
        return self._ask("call", "__call__", *args, **kwargs)

    def __len__(self) -> int:
        return int(self._ask("call", "__len__"))

    def __reduce__(self) -> tuple[Any, ...]:
        return tokenizer_with_code, (self._folder,)

    def __del__(self) -> None:
        if (child := vars(self).get("_child")) is not None:
            child.stdin.close()
            child.stdout.close()
            child.wait()


class _Unpickler(pickle.Unpickler):
    """Reads what the process sends, which runs the model's code; refuses other classes."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return _storage
        if module == "torch" and _is_dtype(name):
            return super().find_class(module, name)
        if name not in _READABLE.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed")
        return super().find_class(module, name)


def _storage(data: bytes) -> Any:
    import torch  # whose function for this unpickles anything

    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _is_dtype(name: str) -> bool:
    import torch

    return isinstance(getattr(torch, name, None), torch.dtype)


def _error(name: str, text: str) -> Exception:
    return _ERRORS[name](text) if name in _ERRORS else RuntimeError(f"{name}: {text}")


@lru_cache(maxsize=4)
def _shared(folder: Path, digest: str | None) -> TokenizerProcess:
    return TokenizerProcess(folder)


def _shared_process(folder: Path) -> TokenizerProcess:
    # Starting one takes seconds, and a run asks for its tokenizer in every stage.
    process = _shared(folder, code_digest(folder))
    if process._child.poll() is not None:
        _shared.cache_clear()
        process = _shared(folder, code_digest(folder))
    return process


def tokenizer_with_code(folder: Path) -> Any:
    """Returns the tokenizer in a worker, and elsewhere a process that has it."""
    if not runs_in_this_process(folder):
        return _shared_process(folder)
    return _loaded(folder)


def _loaded(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, trust_remote_code=True)


def _answer(tokenizer: Any, kind: str, name: str, args: Any, kwargs: Any) -> Any:
    if kind == "set":
        return setattr(tokenizer, name, *args)
    value = getattr(tokenizer, name)
    if kind == "call":
        return value(*args, **kwargs)
    return (True, None) if callable(value) else (False, value)


def _serve(folder: Path) -> None:
    if not runs_in_this_process(folder):  # `tokenizer_with_code` would start another process
        raise not_run_here(folder)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what the code prints
    tokenizer = _loaded(folder)
    while True:
        try:
            request = pickle.load(sys.stdin.buffer)  # noqa: S301
        except EOFError:
            return
        try:
            answer = pickle.dumps((None, _answer(tokenizer, *request)))
        # Fault boundary: the other process raises the error.
        except Exception as error:  # noqa: BLE001
            answer = pickle.dumps(((type(error).__name__, str(error)), None))
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
