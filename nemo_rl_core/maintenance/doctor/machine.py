"""Checks of GPUs, memory, disks, limits, the clock and the sandbox."""

import os
import resource
import shutil
import stat
import subprocess
import tempfile
import time
from pathlib import Path

import psutil

from nemo_rl_core.distributed.resources import total_memory_gib
from nemo_rl_core.environments.sandbox import Sandbox
from nemo_rl_core.errors import ResourceError, StoreError
from nemo_rl_core.maintenance.doctor.check import Check, Result
from nemo_rl_core.store.store import Store

_GIB = 2**30
_MIN_MEMORY_GIB = 4.0  # training and the engine of the smallest recipe together
_MIN_SHARED_GIB = 1.0
_MIN_DISK_GIB = 5.0
_MIN_OPEN_FILES = 1024
_QUERY = "name,memory.total,memory.used,driver_version"


def check_gpus(_: Store) -> Result:
    """Checks the number and kind of GPUs and whether they are free."""
    try:
        listed = subprocess.run(
            ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"],
            capture_output=True, text=True, timeout=30, check=True,
        )  # fmt: skip
    except FileNotFoundError:
        if Path("/dev/nvidia0").exists():
            return Result("warn", "there is a GPU, but no nvidia-smi", "install NVIDIA's driver")
        return Result("ok", "none: choose `cluster: {shape: laptop}`, which needs none")
    except (subprocess.SubprocessError, OSError) as error:
        message = str(getattr(error, "stdout", "") or error).strip().splitlines()[:1]
        return Result("fail", f"nvidia-smi fails: {' '.join(message)[:200]}",
                      "repair or restart NVIDIA's driver")  # fmt: skip
    rows = [[cell.strip() for cell in line.split(",")] for line in listed.stdout.splitlines()]
    if not rows:
        return Result("ok", "none")
    status = f"{len(rows)} x {rows[0][0]}, {rows[0][1]} MiB each, driver {rows[0][3]}"
    busy = [
        str(index)
        for index, row in enumerate(rows)
        if row[1].isdigit() and row[2].isdigit() and int(row[2]) > 0.5 * int(row[1])
    ]
    if busy:
        return Result("warn", f"{status}; over half of the memory of {', '.join(busy)} is used",
                      "end the programs that `nvidia-smi` lists")  # fmt: skip
    return Result("ok", status)


def check_memory(_: Store) -> Result:
    """Checks for enough memory for training together with generation."""
    total, free = total_memory_gib(), psutil.virtual_memory().available / _GIB
    status = f"{total:.1f} GiB, {min(free, total):.1f} GiB free, {os.cpu_count()} cores"
    if min(free, total) < _MIN_MEMORY_GIB:
        return Result("warn", status, f"close programs until {_MIN_MEMORY_GIB:.0f} GiB are free")
    return Result("ok", status)


def check_shared_memory(_: Store) -> Result:
    """Checks the size of /dev/shm, which Ray's processes use to share tensors."""
    folder = Path("/dev/shm")
    fix = "start the container with --shm-size=8g"
    if not folder.is_dir():
        return Result("warn", "no /dev/shm: Ray uses files instead, slowly", fix)
    usage = shutil.disk_usage(folder)
    status = f"{usage.free / _GIB:.1f} of {usage.total / _GIB:.1f} GiB free"
    if usage.free < _MIN_SHARED_GIB * _GIB:
        return Result("warn", status, fix)
    return Result("ok", status)


def check_store(store: Store) -> Result:
    """Checks that runs can write to the store."""
    try:
        if store.root.exists():
            store.check_writable()
            mode = stat.S_IMODE(store.root.stat().st_mode)
            if mode & stat.S_IRWXO:
                problem = f"every user of this machine can open {store.root} ({mode:o})"
                return Result("warn", problem, f"chmod o-rwx {store.root}")
            return Result("ok", f"{store.root} can be written")
        parent = next(path for path in store.root.parents if path.exists())
        with tempfile.TemporaryFile(dir=parent) as file:
            file.write(b"\0" * 4096)
            os.fsync(file.fileno())
    except StoreError as error:
        return Result("fail", error.in_one_line, error.fix or "")
    except OSError as error:
        return Result("fail", f"{store.root} cannot be created: {error}",
                      "point NEMO_RL_HOME at a folder that can be written")  # fmt: skip
    return Result("ok", f"{store.root} will be created by the first run")


def check_disk(store: Store) -> Result:
    """Checks the free disk space for checkpoints."""
    folder = next(path for path in (store.root, *store.root.parents) if path.exists())
    usage = shutil.disk_usage(folder)
    status = f"{usage.free / _GIB:.1f} of {usage.total / _GIB:.1f} GiB free at {folder}"
    if usage.free < _MIN_DISK_GIB * _GIB:
        return Result("warn", status, "`nemo-rl gc --max-size` frees some, or set NEMO_RL_HOME")
    return Result("ok", status)


def check_open_files(_: Store) -> Result:
    """Checks the limit of open files, which Ray and vLLM need."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < _MIN_OPEN_FILES:
        return Result("fail", f"at most {soft} open files (hard limit {hard})", "`ulimit -n 65536`")
    return Result("ok", f"{soft} (hard limit {hard})")


def check_clock(store: Store) -> Result:
    """Checks that the times of files are not in the future."""
    # Runs and manifests are sorted by time. There may be no network to ask.
    paths = [Path(__file__), store.root, *store.runs.glob("*"), *store.artifacts.glob("*")]
    newest = max(path.stat().st_mtime for path in paths if path.exists())
    ahead = newest - time.time()
    status = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    if ahead > 60:
        return Result("warn", f"{status}: files of the store are {ahead:.0f} s ahead",
                      "set the clock (`timedatectl set-ntp true`)")  # fmt: skip
    return Result("ok", status)


def check_sandbox(_: Store) -> Result:
    """Checks that the policy's programs can run in a sandbox of namespaces."""
    try:
        Sandbox()
    except ResourceError as error:
        return Result("warn", f"{error.in_one_line}: environments that run programs are refused",
                      error.fix or "")  # fmt: skip
    return Result("ok", "the policy's programs can run in a sandbox")


CHECKS = [
    Check("gpus", check_gpus),
    Check("memory", check_memory),
    Check("shared memory", check_shared_memory),
    Check("store", check_store),
    Check("disk", check_disk),
    Check("open files", check_open_files),
    Check("clock", check_clock),
    Check("sandbox", check_sandbox, is_slow=True),
]
