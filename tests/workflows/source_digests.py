"""Computes digests of the stages' source in a copy of the tree after each of several edits.

`python source_digests.py COPY < {"modules": [...], "edits": {name: [files, old, new]}}` prints
one line per edit. It parses sources without importing them, so it needs neither flytekit nor torch.
Each edit is made in a process forked from one that has parsed all files that no edit touches.
"""

import json
import os
import sys
import types
from pathlib import Path


def main(root: Path) -> None:
    """Prints `[edit, {module: digest}]` for each edit, and for no edit."""
    request = json.load(sys.stdin)
    sys.path.insert(0, str(root))
    package = types.ModuleType("tasks")  # without the imports of its `__init__`
    package.__path__ = [str(root / "tasks")]
    sys.modules["tasks"] = package
    from nemo_rl_core.store import source_digest as caching

    touched = {file for files, _, _ in request["edits"].values() for file in files}
    for path in (*root.glob("nemo_rl_core/**/*.py"), *root.glob("tasks/**/*.py")):
        file = path.relative_to(root)
        module = ".".join(part for part in file.with_suffix("").parts if part != "__init__")
        if str(file) not in touched:
            caching._reached(module)
    for name, (files, old, new) in {"nothing": ([], "", ""), **request["edits"]}.items():
        if os.fork() == 0:
            before = {file: (root / file).read_text() for file in files}
            for file, text in before.items():
                changed = text.replace(old, new, 1) if old else text + new
                assert changed != text, file
                (root / file).write_text(changed)
            digests = {module: caching.source_digest(module) for module in request["modules"]}
            for file, text in before.items():
                (root / file).write_text(text)
            os.write(1, f"{json.dumps([name, digests])}\n".encode())
            os._exit(0)
        _, status = os.wait()
        assert status == 0, name


if __name__ == "__main__":
    main(Path(sys.argv[1]))
