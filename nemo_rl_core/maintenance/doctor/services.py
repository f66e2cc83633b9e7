"""Ports, what earlier Ray runtimes have left, and the hub of models."""

import os
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path

import psutil

from nemo_rl_core.maintenance.disk import allocated
from nemo_rl_core.maintenance.doctor.check import Check, Result
from nemo_rl_core.store.store import Store

PORTS = {6379: "Ray's head", 8265: "Ray's dashboard", 10001: "Ray's clients", 8321: "`nemo-rl ui`"}
"""Ports that programs ask for by default; a local run takes free ones instead."""

_RAY_PROCESSES = ("raylet", "gcs_server")
_MAX_LEFT_BYTES = 5 * 2**30


def check_ports(_: Store, *, ports: Mapping[int, str] = PORTS) -> Result:
    """Are the ports free that servers here ask for?"""
    taken = {port: use for port, use in ports.items() if not _is_free(port)}
    told = ", ".join(f"{port} ({use})" for port, use in taken.items())
    if not taken:
        return Result("ok", f"{', '.join(map(str, ports))} are free")
    if all(use.startswith("Ray") for use in taken.values()) and _ray_processes():
        return Result("ok", f"{told} taken, and a Ray runs here")
    return Result("warn", f"{told} taken",
                  "end what listens there (`ss -ltnp` names it), or choose another")  # fmt: skip


def check_ray_processes(_: Store) -> Result:
    """Have earlier Ray runtimes left processes?"""
    running = _ray_processes()
    orphans = [process.pid for process in running if _is_orphan(process)]
    if orphans:
        return Result("warn", f"Ray processes without the program that started them: {orphans}",
                      "`ray stop` ends them, and every other Ray of this user")  # fmt: skip
    return Result("ok", f"{len(running)}, none of them left over")


def check_ray_sessions(_: Store, *, max_left_bytes: int = _MAX_LEFT_BYTES) -> Result:
    """Have earlier Ray runtimes left files?"""
    folder = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()) / "ray"
    in_use = " ".join(" ".join(_command(process)) for process in _ray_processes())
    left = [path for path in folder.glob("session_2*") if path.name not in in_use]
    size = sum(map(allocated, left))
    told = f"{len(left)} old sessions, {size / 2**20:.0f} MiB, in {folder}"
    if size > max_left_bytes:
        return Result("warn", told, f"remove them while no Ray runs: rm -r {folder}/session_2*")
    return Result("ok", told if left else "nothing")


def check_hub(_: Store) -> Result:
    """Where are models from the hub kept, and can they be?"""
    home = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    offline = os.environ.get("HF_HUB_OFFLINE", "") in ("1", "true", "True", "YES", "ON")
    num_models = len(list(cache.glob("models--*")))
    told = f"{num_models} models in {cache}{', and HF_HUB_OFFLINE is set' if offline else ''}"
    place = next(path for path in (cache, *cache.parents) if path.exists())
    if not os.access(place, os.W_OK):
        return Result("warn", f"{told}, which cannot be written",
                      "point HF_HOME at a folder that can be written")  # fmt: skip
    return Result("ok", told)


def check_token(_: Store) -> Result:
    """Is there a token of the hub? It is never shown."""
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


def _is_orphan(process: psutil.Process) -> bool:
    # `ray start` leaves its processes to init by design, and says so in their command.
    try:
        return process.ppid() == 1 and "--head" not in _command(process)
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
