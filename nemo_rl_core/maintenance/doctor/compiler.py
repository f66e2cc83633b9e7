"""Whether Triton can compile here: on GPUs it makes a C library for each kernel's first call.

The file imports nothing of the project, so that any Python runs it before anything is installed:

    python nemo_rl_core/maintenance/doctor/compiler.py
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

_SECONDS = 60.0


def compiler() -> str | None:
    """The C compiler, as Triton chooses it: `CC`, else gcc, else clang."""
    named = os.environ.get("CC")
    return named or shutil.which("gcc") or shutil.which("clang")


def why_nothing_compiles() -> str | None:
    """Compiles an extension of Python; None if that works, else what is missing."""
    found = compiler()
    if found is None:
        return "there is no C compiler: neither gcc nor clang is on the PATH, and CC is not set"
    include = Path(sysconfig.get_path("include", "posix_prefix"))
    if not (include / "Python.h").is_file():
        return f"{include}/Python.h is missing"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "extension.c"
        source.write_text("#include <Python.h>\nint version(void) { return PY_VERSION_HEX; }\n")
        command = [found, str(source), "-O3", "-shared", "-fPIC", f"-I{include}"]
        try:
            done = subprocess.run(
                [*command, "-o", str(source.with_suffix(".so"))],
                capture_output=True, text=True, timeout=_SECONDS, check=False,
            )  # fmt: skip
        except (OSError, subprocess.SubprocessError) as error:
            return f"{found} does not run: {error}"
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or ["no message"]
        return f"{found} compiles no extension of Python: {lines[0][:200]}"
    return None


def fix() -> str:
    """The packages of Debian and Ubuntu that bring all of it."""
    version = ".".join(map(str, sys.version_info[:2]))
    return f"`apt install gcc libc6-dev python{version}-dev`"


def main() -> int:
    """Prints the finding; the exit code is 1 if nothing compiles."""
    missing = why_nothing_compiles()
    print(f"{missing}; fix: {fix()}" if missing else f"{compiler()} compiles")  # noqa: T201
    return int(missing is not None)


if __name__ == "__main__":
    raise SystemExit(main())
