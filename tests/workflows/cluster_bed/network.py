"""A bridge on this machine and the network namespaces that are connected to it."""

import itertools
import os
import random
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_PREFIX = "nrl"


@dataclass(frozen=True)
class Port:
    """A pod's connection to the network.

    Attributes:
        namespace: Name of its network namespace in `ip netns`.
        address: Address of its only interface besides the loopback one.
    """

    namespace: str
    address: str


class Network:
    """The bridge; a context manager.

    Attributes:
        address: Address of this machine. Pods reach only each other and servers on this address.
    """

    def __init__(self) -> None:
        # Two networks on one machine must not collide.
        self._name = f"{_PREFIX}{os.getpid()}"
        self._subnet = f"10.213.{random.SystemRandom().randrange(256)}"
        self.address = f"{self._subnet}.1"
        self._numbers = itertools.count(2)

    def __enter__(self) -> "Network":
        _remove_abandoned()
        _ip("link", "add", self._name, "type", "bridge")
        _ip("address", "add", f"{self.address}/24", "dev", self._name)
        _ip("link", "set", self._name, "up")
        return self

    def __exit__(self, *_: object) -> None:
        _ip("link", "delete", self._name)

    def connect(self) -> Port:
        """Returns a new namespace with an address that was never used before."""
        number = next(self._numbers)
        port = Port(f"{self._name}-{number}", f"{self._subnet}.{number}")
        outside = f"{self._name}p{number}"
        _ip("netns", "add", port.namespace)
        pair = ("type", "veth", "peer", "name", "eth0", "netns", port.namespace)
        _ip("link", "add", outside, *pair)
        _ip("link", "set", outside, "master", self._name, "up")
        inside = ("-netns", port.namespace)
        _ip(*inside, "address", "add", f"{port.address}/24", "dev", "eth0")
        _ip(*inside, "link", "set", "eth0", "up")
        _ip(*inside, "link", "set", "lo", "up")
        # Programs learn their address from the route to a remote one, which need not be reachable.
        _ip(*inside, "route", "add", "default", "dev", "eth0")
        return port

    def disconnect(self, port: Port) -> None:
        """Removes the interface, then its namespace.

        Without the first step, the kernel would remove the interface some time after the namespace,
        and its name would not be free for a later network of this process.
        """
        _ip("-netns", port.namespace, "link", "delete", "eth0")
        _ip("netns", "delete", port.namespace)


@cache
def why_no_pods() -> str | None:
    """Returns why namespaces cannot be created here, or None if they can."""
    lacking = [each for each in ("ip", "unshare", "nsenter", "setpriv") if not shutil.which(each)]
    if lacking:
        return f"pods need the programs {', '.join(lacking)} (iproute2, util-linux)"
    if os.geteuid() != 0:
        return "namespaces of network and mounts need root"
    probe = ["unshare", "--mount", "--net", "--pid", "--ipc", "--uts", "--fork"]
    mount = "mount -t tmpfs tmpfs /mnt && ip link add probe type veth peer name other"
    tried = subprocess.run([*probe, "sh", "-c", mount], check=False, capture_output=True, text=True)
    return f"namespaces are refused: {tried.stderr.strip()}" if tried.returncode else None


def _remove_abandoned() -> None:
    """Removes namespaces and bridges of killed processes, whose ids are in the names."""
    for space in Path("/run/netns").glob(f"{_PREFIX}*-*"):
        if not _runs(space.name.removeprefix(_PREFIX).partition("-")[0]):
            _ip("netns", "delete", space.name)
    for link in Path("/sys/class/net").glob(f"{_PREFIX}*"):
        number = link.name.removeprefix(_PREFIX)
        if number.isdigit() and not _runs(number):
            _ip("link", "delete", link.name)


def _runs(process: str) -> bool:
    return Path("/proc", process).exists()


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], check=False, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
