"""Checks of the machine: GPUs, memory, disks, limits, the clock, ports, Ray, the hub's cache."""

import itertools
import os
import resource
import shutil
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from nemo_rl_core.distributed.private_ray import ray_folder
from nemo_rl_core.distributed.resources import total_memory_gib
from nemo_rl_core.environments.sandbox import Sandbox
from nemo_rl_core.errors import ResourceError, StoreError
from nemo_rl_core.maintenance.disk import allocated
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


UI_PORT = 8321
PORTS = {
    6379: "Ray's head",
    8265: "Ray's dashboard",
    10001: "Ray's clients",
    UI_PORT: "`nemo-rl ui`",
}
"""Default ports of programs; local runs use free ports instead."""

_RAY_PROCESSES = ("raylet", "gcs_server")
_MAX_OLD_BYTES = 5 * 2**30


def check_ports(_: Store, *, ports: Mapping[int, str] = PORTS) -> Result:
    """Checks that the default ports are free."""
    taken = {port: use for port, use in ports.items() if not _is_free(port)}
    status = ", ".join(f"{port} ({use})" for port, use in taken.items())
    if not taken:
        return Result("ok", f"{', '.join(map(str, ports))} are free")
    if all(use.startswith("Ray") for use in taken.values()) and _ray_processes():
        return Result("ok", f"{status} taken by Ray on this machine")
    if taken.keys() == {UI_PORT} and _ui_processes():
        return Result("ok", f"{status} taken by `nemo-rl ui` on this machine")
    return Result("warn", f"{status} taken",
                  "end the program that listens (see `ss -ltnp`), or use another port")  # fmt: skip


_REAPERS = ("systemd",)
"""Programs that adopt processes besides process 1: the systemd of each user."""


def check_ray_processes(_: Store) -> Result:
    """Checks for processes of earlier Ray runtimes."""
    running = _ray_processes()
    orphans = [process.pid for process in running if _is_orphan(process)]
    if orphans:
        return Result("warn", f"Ray processes without the program that started them: {orphans}",
                      "`ray stop` ends them, and every other Ray of this user")  # fmt: skip
    return Result("ok", f"{len(running)}, none of them left over")


def check_ray_sessions(_: Store, *, max_old_bytes: int = _MAX_OLD_BYTES) -> Result:
    """Checks for files of earlier Ray runtimes."""
    folder = ray_folder()
    in_use = " ".join(" ".join(_command(process)) for process in _ray_processes())
    old_sessions = [path for path in folder.glob("session_2*") if path.name not in in_use]
    size = sum(map(allocated, old_sessions))
    status = f"{len(old_sessions)} old sessions, {size / 2**20:.0f} MiB, in {folder}"
    if size > max_old_bytes:
        return Result("warn", status, f"remove them while no Ray runs: rm -r {folder}/session_2*")
    return Result("ok", status if old_sessions else "nothing")


def check_hub(_: Store) -> Result:
    """Checks that the cache of models from the hub can be written."""
    home = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    offline = os.environ.get("HF_HUB_OFFLINE", "") in ("1", "true", "True", "YES", "ON")
    num_models = len(list(cache.glob("models--*")))
    status = f"{num_models} models in {cache}{', and HF_HUB_OFFLINE is set' if offline else ''}"
    folder = next(path for path in (cache, *cache.parents) if path.exists())
    if not os.access(folder, os.W_OK):
        return Result("warn", f"{status}, which cannot be written",
                      "point HF_HOME at a folder that can be written")  # fmt: skip
    return Result("ok", status)


def check_token(_: Store) -> Result:
    """Checks for a token of the hub without showing it."""
    home = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()
    if os.environ.get("HF_TOKEN"):
        return Result("ok", "HF_TOKEN is set")
    path = Path(os.environ.get("HF_TOKEN_PATH") or home / "token")
    if path.is_file():
        return Result("ok", f"there is one in {path}")
    return Result("ok", "none: public models need none; for gated ones, `hf auth login`")


def _is_free(port: int) -> bool:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def _ray_processes() -> list[psutil.Process]:
    return [each for each in psutil.process_iter(["name"]) if each.info["name"] in _RAY_PROCESSES]


def _ui_processes() -> list[psutil.Process]:
    commands = ((each, _command(each)) for each in psutil.process_iter())
    return [
        each
        for each, words in commands
        if any(Path(a).name == "nemo-rl" and b == "ui" for a, b in itertools.pairwise(words))
    ]


def _is_orphan(process: psutil.Process) -> bool:
    # `ray start` leaves its processes to init by design, with --head in their command.
    try:
        parent = process.parent()
        is_adopted = parent is None or parent.pid == 1 or parent.name() in _REAPERS
        return is_adopted and "--head" not in _command(process)
    except psutil.Error:
        return False


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


CHECKS = [
    Check("gpus", check_gpus),
    Check("memory", check_memory),
    Check("shared memory", check_shared_memory),
    Check("store", check_store),
    Check("disk", check_disk),
    Check("open files", check_open_files),
    Check("clock", check_clock),
    Check("sandbox", check_sandbox, is_slow=True),
    Check("ports", check_ports),
    Check("ray processes", check_ray_processes),
    Check("ray sessions", check_ray_sessions),
    Check("hub cache", check_hub),
    Check("hub token", check_token),
]
