"""Records the files that every Python process of a stage opens and runs; can falsify reports.

Python imports this module at startup if its folder is on `PYTHONPATH`: in the process of the stage,
in Ray's workers and in everything that they start. `OPENED_LOG` is the folder of the records, and
`OPENED_ROOTS` the folders whose files are recorded. A line of a record is `[file, reader]`, both
below a root; the reader is the nearest file on the stack that is below a root.

`WRONG_REPORTS` is a list of modules whose functions then return wrong texts and numbers.
"""

import inspect
import json
import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path

_ROOTS = tuple(os.environ["OPENED_ROOTS"].split(os.pathsep)) if "OPENED_LOG" in os.environ else ()
_KEY_ANALYSIS = "/nemo_rl_core/store/source_files.py"
_seen = set()
_record = [-1]


def _hook(event, arguments):
    if event == "exec":
        _note(getattr(arguments[0], "co_filename", ""))
    elif event == "open":
        _note(arguments[0])
    elif event == "subprocess.Popen":  # an isolated program does not run this hook
        for each in arguments[1] or ():
            _note(each)


def _note(file):
    if isinstance(file, bytes):
        file = os.fsdecode(file)
    if not isinstance(file, str) or not file.startswith(_ROOTS) or "/__pycache__/" in file:
        return  # running or writing a compiled file is a separate event
    reader = _reader(file)
    if reader is None or (file, reader) in _seen:
        return
    _seen.add((file, reader))
    line = json.dumps([file, reader]) + "\n"
    try:
        os.write(_record[0], line.encode())
    except OSError:  # a fork that has closed all files
        _record[0] = _opened()
        os.write(_record[0], line.encode())


def _reader(file):
    """Returns the file that opens `file`: empty outside the roots, None for the key's analysis."""
    frame, nearest = sys._getframe(2), ""
    while frame is not None:
        name = frame.f_code.co_filename
        if name.endswith(_KEY_ANALYSIS):
            return None
        if not nearest and name.startswith(_ROOTS) and name != file:
            nearest = name
        frame = frame.f_back
    return nearest


def _opened():
    path = Path(os.environ["OPENED_LOG"], f"{os.getpid()}.jsonl")
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)


class _WrongReports(MetaPathFinder):
    def __init__(self, modules):
        self._modules = modules

    def find_spec(self, name, path, target=None):
        if name not in self._modules:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if isinstance(spec.loader, SourceFileLoader) and not spec.submodule_search_locations:
            spec.loader = _Wrong(name, spec.origin)
        return spec


class _Wrong(SourceFileLoader):
    def exec_module(self, module):
        super().exec_module(module)
        for name, function in list(vars(module).items()):
            if inspect.isfunction(function) and function.__module__ == module.__name__:
                wrong = _WRONG.get(str(function.__annotations__.get("return")).split(" ")[0])
                if wrong is not None:
                    setattr(module, name, _always(wrong))
        Path(os.environ["OPENED_LOG"], f"{module.__name__}.wrong").touch()


_WRONG = {"<class 'str'>": "wrong", "<class 'float'>": 12345.0, "<class 'int'>": 12345}
_WRONG |= {"str": "wrong", "float": 12345.0, "int": 12345, "tuple[str,": ("wrong", "wrong")}


def _always(value):
    return lambda *arguments, **named: value


if _ROOTS:
    _record[0] = _opened()
    sys.addaudithook(_hook)
    if "WRONG_REPORTS" in os.environ:
        sys.meta_path.insert(0, _WrongReports(frozenset(json.loads(os.environ["WRONG_REPORTS"]))))
