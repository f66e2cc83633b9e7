"""Checks that Triton can compile the C launcher of a kernel, as it does on GPUs at the first call.

The file imports nothing from the project, so any Python can run it before anything is installed:

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
    """Returns the C compiler in Triton's order: `CC`, else gcc, else clang."""
    return os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")


def compiler_problem() -> str | None:
    """Compiles a Python extension; returns None if that works, else the problem."""
    program = compiler()
    if program is None:
        return "there is no C compiler: neither gcc nor clang is on the PATH, and CC is not set"
    include = Path(sysconfig.get_path("include", "posix_prefix"))
    if not (include / "Python.h").is_file():
        return f"{include}/Python.h is missing"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "extension.c"
        source.write_text("#include <Python.h>\nint version(void) { return PY_VERSION_HEX; }\n")
        arguments = [program, str(source), "-O3", "-shared", "-fPIC", f"-I{include}"]
        try:
            done = subprocess.run(
                [*arguments, "-o", str(source.with_suffix(".so"))],
                capture_output=True, text=True, timeout=_SECONDS, check=False,
            )  # fmt: skip
        except (OSError, subprocess.SubprocessError) as error:
            return f"{program} does not run: {error}"
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or ["no message"]
        return f"{program} cannot compile a Python extension: {lines[0][:200]}"
    return None


def fix() -> str:
    """Returns the command that installs the packages on Debian and Ubuntu."""
    version = ".".join(map(str, sys.version_info[:2]))
    return f"`apt install gcc libc6-dev python{version}-dev`"


def main() -> int:
    """Prints the result; returns exit code 1 if compiling fails."""
    problem = compiler_problem()
    print(f"{problem}; fix: {fix()}" if problem else f"{compiler()} compiles")  # noqa: T201
    return int(problem is not None)


if __name__ == "__main__":
    raise SystemExit(main())
