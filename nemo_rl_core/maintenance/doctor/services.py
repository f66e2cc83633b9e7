"""Checks of ports, leftovers of earlier Ray runtimes, and the cache of the model hub."""

import itertools
import os
import socket
from collections.abc import Mapping
from pathlib import Path

import psutil

from nemo_rl_core.distributed.private_ray import ray_folder
from nemo_rl_core.maintenance.disk import allocated
from nemo_rl_core.maintenance.doctor.check import Check, Result
from nemo_rl_core.store.store import Store

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
    Check("ports", check_ports),
    Check("ray processes", check_ray_processes),
    Check("ray sessions", check_ray_sessions),
    Check("hub cache", check_hub),
    Check("hub token", check_token),
]
