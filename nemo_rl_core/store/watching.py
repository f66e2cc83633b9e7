"""Records what user code opens, imports and reads from the environment in this process.

Importing this module installs an audit hook (`sys.addaudithook`) and a recording `os.environ`. Each
read is attributed to the files of user code on the stack, up to the first frame of this project.
Reads by the project and by the top level of a user's script do not count: the former are part of
the source digest, the values of the latter are part of the object's digest.

`absorb` merges reads in other processes. Files that C code (pyarrow, SQLite) or a started program
opens are not detected.
"""

import functools
import importlib
import os
import re
import site
import stat
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Literal, NamedTuple

from nemo_rl_core.store.reads import Reads, digest_of_variable, present_digest
from nemo_rl_core.store.source_files import OWN_PACKAGES
from nemo_rl_core.store.store import Store
from nemo_rl_core.store.user_source import read_user_source

_ROOT = Path(__file__).resolve().parents[2]
_PROJECT = tuple(f"{_ROOT / name}{os.sep}" for name in OWN_PACKAGES)
_LIBRARIES = tuple(
    f"{folder}{os.sep}"
    for folder in {
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        *(sys.prefix, sys.base_prefix, site.getusersitepackages()),
    }
    if folder not in ("/", "/usr", "/usr/local")
)
_PACKAGES = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("purelib", "platlib"))
_SYSTEM = ("/proc/", "/sys/", "/dev/", "/etc/", "/usr/", "/lib/", "/lib64/", "/bin/", "/run/")
_VOLATILE_VARIABLE = re.compile(
    r"(RAY|FLYTE|NEMO_RL|PYTHON|VIRTUAL_ENV|CONDA|SLURM|SSH|XDG|LC|TERM|VLLM|TORCH|OMP)(_.*)?"
    r"|PATH|HOME|USER|LOGNAME|HOSTNAME|SHELL|SHLVL|PWD|OLDPWD|_|LANG|DISPLAY|COLUMNS|LINES|EDITOR"
    r"|TMP|TEMP|TMPDIR|PID|PPID|RANK|LOCAL_RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT"
    r"|CUDA_VISIBLE_DEVICES|PYTEST_.*|.*_PROXY|.*(KEY|TOKEN|SECRET|PASSWORD|CREDENTIALS)",
    re.IGNORECASE,
)
"""Variables of the machine, the session or an account, which do not affect results."""
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_IS_WORKER = sys.argv[:1] != [] and sys.argv[0].endswith("default_worker.py")
"""Whether this process is a Ray worker, which runs only stages."""
_MAX_HASHED_AT_ONCE = 16 * 2**20
_CHANGED = "changed while it was read"
_VIEWS = ("<frozen os>", "<frozen _collections_abc>", os.__file__)
"""Files of the methods that read `os.environ` for their caller."""

_DEPTH = 4
"""Number of frames of this module between a function that walks the stack and the observed code."""

Who = Literal["user", "library", "project"]


class Report(NamedTuple):
    """All inputs that user code of a process read, and its written files.

    Attributes:
        readers: Inputs by file of the code.
        counts: Number of reads by file of the code.
    """

    readers: dict[str, set[str]]
    digests: Reads
    written: set[str]
    counts: dict[str, int]


class Watch:
    """The user code (names of modules and paths of files) that a stage runs."""

    def __init__(self, code: Collection[str]) -> None:
        self.code = set(code)

    def reads(self) -> Reads:
        """Returns the inputs that this code and the modules it imports read in this process."""
        files = {file for each in list(self.code) for file in _files_of(each)}
        names = {name for file in files for name in list(_readers.get(file, ()))}
        kept = [name for name in sorted(names) if name.partition(" ")[2] not in _written]
        return {_relative(name): _settled(name) for name in kept}


_readers: dict[str, set[str]] = {}
_counts: dict[str, int] = {}
_reported: dict[str, dict[str, int]] = {}
"""The last counts that each worker reported."""
_digests: Reads = {}
_states: dict[str, tuple[int, int, int]] = {}
"""Size, time and inode of each file when it was last read."""
_written: set[str] = set()
_watches: list[Watch] = []
_thread = threading.local()


@contextmanager
def watching(code: Collection[str] = ()) -> Iterator[Watch]:
    """Yields the watch of a stage; code that reads inputs in the body is added to it."""
    watch = Watch(code)
    _watches.append(watch)
    try:
        yield watch
    finally:
        _watches.remove(watch)


def report() -> Report:
    """Returns the inputs that user code of this process read, for its parent process."""
    return Report(
        {reader: set(names) for reader, names in list(_readers.items())},
        {name: _settled(name) for name in list(_digests)},
        set(_written),
        dict(_counts),
    )


def absorb(worker: Report, name_of_worker: str) -> None:
    """Merges the reads of a worker.

    Inputs that only the worker has are left out, such as variables set by its launcher, since they
    cannot be compared here. A worker may serve several stages: code belongs to a stage if it has
    read since the worker's last report, or if the stage names it.
    """
    earlier, _reported[name_of_worker] = _reported.get(name_of_worker, {}), worker.counts
    active = {each for each, count in worker.counts.items() if count > earlier.get(each, 0)}
    shared: set[str] = set()
    for name, digest in worker.digests.items():
        present = _digests.get(name) or present_digest(name)
        is_variable = name.startswith("variable ")
        if (present == digest) if is_variable else (present or not digest):
            shared.add(name)
            _digests[name] = digest
    _written.update(worker.written)
    for reader, names in worker.readers.items():
        if names & shared:
            _readers.setdefault(reader, set()).update(names & shared)
            for watch in _watches if reader in active else ():
                watch.code.add(reader)


def _files_of(code: str) -> list[str]:
    module, files_of_code = code, []
    if os.sep in code or code.startswith("<"):
        files_of_code = [_file_of(code)]
        main = getattr(sys.modules["__main__"], "__file__", None)
        module = "__main__" if main is not None and files_of_code == [_absolute(main)] else ""
    files = read_user_source(module, without=OWN_PACKAGES).files if module else []
    return [*files_of_code, *(_absolute(each) for each in files)]


def _file_of(name: str) -> str:
    """Returns the path in a code object; cells of a notebook may have a name instead."""
    return name if name.startswith("<") else _absolute(name)


def _absolute(path: Any) -> str:
    """Returns an absolute path with unresolved links, since a link may get another target."""
    return os.path.abspath(os.fsdecode(path))  # noqa: PTH100


def _relative(name: str) -> str:
    """Returns the name of an input, with a relative path if below the current directory."""
    kind, _, path = name.partition(" ")
    relative_path = path.removeprefix(f"{Path.cwd()}/")
    return name if relative_path == path else f"{kind} ./{relative_path}"


def _settled(name: str) -> str:
    digest = _digests.get(name, "")
    if not digest and name in _states:
        is_same = _state(name.partition(" ")[2]) == _states[name]
        digest = _digests[name] = present_digest(name) if is_same else _CHANGED
    return digest


def _state(path: str) -> tuple[int, int, int] | None:
    """Returns size, time and inode of a file; None for folders, devices and missing files."""
    try:
        status = Path(path).stat()
    except OSError:
        return None
    is_file = stat.S_ISREG(status.st_mode)
    return (status.st_size, status.st_mtime_ns, status.st_ino) if is_file else None


def _note(name: str, readers: Collection[str], digest: Callable[[], str] | None = None) -> None:
    if name not in _digests:
        _digests[name] = present_digest(name) if digest is None else digest()
    for reader in readers:
        _counts[reader] = _counts.get(reader, 0) + 1
        _readers.setdefault(reader, set()).add(name)
        for watch in _watches:
            watch.code.add(reader)


def _opened(path: Any, mode: Any = None, flags: Any = 0) -> None:
    if isinstance(path, int):
        return
    path = _absolute(path)
    if flags & _WRITES if mode is None else set(mode) & {*"wax+"}:
        _wrote(path)
        return
    readers, is_import = _code_on_stack()
    if not readers or is_import or path in _written or _is_noise(path):
        return
    name, state = f"file {path}", _state(path)
    if state is None and Path(path).exists():
        return
    if state is not None and _states.get(name) != state:
        _digests.pop(name, None)
        _states[name] = state
    is_small = state is not None and state[0] <= _MAX_HASHED_AT_ONCE
    _note(name, readers, None if is_small else str)


def _missed(path: Any) -> None:
    if isinstance(path, int):
        return
    readers, _ = _code_on_stack()
    path = _absolute(path)
    if readers and path not in _written and not _is_noise(path):
        _note(f"file {path}", readers, str)


def _renamed(_source: Any, target: Any, *_: Any) -> None:
    _wrote(_absolute(target))


def _wrote(path: str) -> None:
    """Records a written file: files written during a stage are not inputs, earlier ones are."""
    if _watches or _IS_WORKER:
        _written.add(path)
    else:
        _written.discard(path)


def _listed(path: Any = None, *_: Any) -> None:
    if isinstance(path, int):
        return
    readers, is_import = _code_on_stack()
    folder = _absolute(path or ".")
    if readers and not is_import and not _is_noise(folder + os.sep):
        _digests.pop(f"folder {folder}", None)  # it may have changed since it was listed last
        _note(f"folder {folder}", readers)


def _executed(code: Any) -> None:
    if not isinstance(code, CodeType) or code.co_name != "<module>":
        return
    readers, _ = _code_on_stack()
    if not readers:
        return
    file = _absolute(code.co_filename)
    if _who(file) == "user" and Path(file).is_file():
        _note(f"module {file}", readers)
    elif _imports_directly():
        folder = next((each for each in _PACKAGES if file.startswith(each)), file)
        top = file.removeprefix(folder).partition(os.sep)[0].removesuffix(".py")
        if top:
            _note(f"package {top}", readers)


def _read_variable(name: Any) -> None:
    frame = _caller()
    if frame is None or not isinstance(name, str) or _is_volatile(name):
        return
    if getattr(_thread, "copied", None) == (frame.f_code, frame.f_lasti):
        return  # a copy of the environment, such as for another process
    readers, _ = _code_on_stack()
    if readers:
        _digests.pop(f"variable {name}", None)
        _note(f"variable {name}", readers, lambda: digest_of_variable(name, _value(name)))


@functools.lru_cache(maxsize=1024)
def _is_volatile(name: str) -> bool:
    return _VOLATILE_VARIABLE.fullmatch(name) is not None


def _value(name: str) -> str | None:
    raw = os.environ._data.get(os.environ.encodekey(name))  # type: ignore[attr-defined]
    return None if raw is None else os.fsdecode(raw)


def _caller() -> FrameType | None:
    """Returns the frame that reads `os.environ`, if it is user code."""
    frame: FrameType | None = sys._getframe(_DEPTH)
    while frame is not None and frame.f_code.co_filename in _VIEWS:
        frame = frame.f_back
    return frame if frame is not None and _who_runs(frame) == "user" else None


def _code_on_stack() -> tuple[list[str], bool]:
    """Returns files of the running user code, and whether it runs the import system."""
    frame: FrameType | None = sys._getframe(_DEPTH)
    code: list[str] = []
    is_import = False
    while frame is not None:
        who = _who_runs(frame)
        if who == "project":
            break
        if who == "user":
            is_script = frame.f_globals.get("__name__") == "__main__"
            if not (is_script and frame.f_code.co_name == "<module>"):
                code.append(_file_of(frame.f_code.co_filename))
        elif not code and frame.f_code.co_filename.startswith("<frozen importlib"):
            is_import = True
        frame = frame.f_back
    return code, is_import


def _imports_directly() -> bool:
    """Whether the innermost frame outside of the import system is user code."""
    frame: FrameType | None = sys._getframe(_DEPTH)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith("<frozen importlib") and name != importlib.__file__:
            return _who_runs(frame) == "user"
        frame = frame.f_back
    return False


def _who_runs(frame: FrameType) -> Who:
    name = frame.f_code.co_filename
    if name[:1] == "<" and frame.f_globals.get("__name__") == "__main__":
        return "user"  # a cell, or the text of `python -c`
    return _who(name)


@functools.cache
def _who(file: str) -> Who:
    if file.startswith("<"):
        return "library"
    path = _absolute(file)
    if path.startswith(_PROJECT):
        return "project"
    return "library" if path.startswith(_LIBRARIES) else "user"


def _is_noise(path: str) -> bool:
    """Whether a file belongs to the machine, a cache, a library, the store or the project."""
    return _is_noise_from(path, str(Path.cwd()), _value("NEMO_RL_HOME"))


@functools.lru_cache(maxsize=4096)
def _is_noise_from(path: str, folder: str, _store: str | None) -> bool:
    if path.startswith((*_LIBRARIES, *_PROJECT)) or "/__pycache__/" in path:
        return True
    # The current folder may be one of these: images often have programs in /usr/src.
    if path.startswith(_SYSTEM) and (folder == "/" or not path.startswith(folder + os.sep)):
        return True
    root = Store.default().root
    if path.startswith(f"{Path.home()}/.") or Path(path).resolve().is_relative_to(root):
        return True
    searched = [folder, *map(_absolute, sys.path)]
    is_near = any(path.startswith(each.rstrip(os.sep) + os.sep) for each in searched if each != "/")
    return path.startswith(tempfile.gettempdir() + os.sep) and not is_near


_EVENTS: dict[str, Callable[..., None]] = {
    "open": _opened,
    "exec": _executed,
    "os.listdir": _listed,
    "os.scandir": _listed,
    "os.rename": _renamed,
}


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    note = _EVENTS.get(event)
    if note is not None:
        _safely(note, *arguments)


def _safely(note: Callable[..., None], *arguments: Any) -> None:
    """Records a read, except files that are read for the digest itself."""
    if getattr(_thread, "is_noting", False):
        return
    _thread.is_noting = True
    try:
        note(*arguments)
    # Broad on purpose: an observer must not end the program.
    except Exception:  # noqa: BLE001
        pass
    finally:
        _thread.is_noting = False


class _RecordingEnviron(os._Environ[str]):
    """`os.environ` that records which variables user code reads."""

    def __getitem__(self, key: str) -> str:
        _safely(_read_variable, key)
        return super().__getitem__(key)

    def __iter__(self) -> Iterator[str]:
        _safely(_copied)
        return super().__iter__()


def _copied() -> None:
    frame = _caller()
    if frame is not None:
        _thread.copied = (frame.f_code, frame.f_lasti)


def _recording_stat(stat: Callable[..., os.stat_result]) -> Callable[..., os.stat_result]:
    @functools.wraps(stat)
    def recorded(path: Any, **options: Any) -> os.stat_result:
        try:
            return stat(path, **options)
        except FileNotFoundError:
            _safely(_missed, path)
            raise

    recorded.__module__ = "os"  # where pickle finds it
    for supports in (os.supports_fd, os.supports_dir_fd, os.supports_follow_symlinks):
        supports.add(recorded)
    return recorded


os.environ.__class__ = _RecordingEnviron
os.stat = _recording_stat(os.stat)
sys.addaudithook(_hook)
