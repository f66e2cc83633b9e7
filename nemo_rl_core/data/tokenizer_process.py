"""A tokenizer whose class is in the model's code, in a separate worker process.

The controller encodes prompts and decodes completions, but does not run the code of a model.
"""

import os
import pickle
import subprocess
import sys
import threading
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from nemo_rl_core.checkpoints.model_code import is_run_here, worker_environment
from nemo_rl_core.errors import ModelError


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
                is_error, value = pickle.load(self._child.stdout)  # noqa: S301
            except (EOFError, BrokenPipeError) as error:
                raise ModelError(
                    f"the process of the tokenizer of {self._folder.name!r} has ended",
                    expected="a tokenizer that loads with trust_remote_code=True",
                    got=f"exit status {self._child.wait()}",
                    fix="read its error output above, and correct the model's Python files",
                ) from error
        if is_error:
            raise value
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


# Starting one takes seconds, and a run asks for its tokenizer in every stage.
_shared = lru_cache(maxsize=4)(TokenizerProcess)


def tokenizer_with_code(folder: Path) -> Any:
    """Returns the tokenizer in a worker, and elsewhere a process that has it."""
    if not is_run_here(folder):
        return _shared(folder)
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
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what the code prints
    tokenizer = tokenizer_with_code(folder)
    while True:
        try:
            request = pickle.load(sys.stdin.buffer)  # noqa: S301
        except EOFError:
            return
        try:
            answer = pickle.dumps((False, _answer(tokenizer, *request)))
        # Fault boundary: the other process raises the error.
        except Exception as error:  # noqa: BLE001
            answer = pickle.dumps((True, error))
        answers.write(answer)
        answers.flush()


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
