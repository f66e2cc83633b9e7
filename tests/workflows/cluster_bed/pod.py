"""One pod: a process tree in separate namespaces."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tests.commands import REPOSITORY
from tests.workflows.cluster_bed.network import Network, Port

_SCRIPT = Path(__file__).with_name("pod.sh")
_ENVIRONMENT = Path(sys.prefix)
VOLUME = "/var/nemo_rl"
HOME = "/home/nemo"


class Pod:
    """A pod, started on construction. All of its processes end when its first one does.

    It also ends with the thread that started it.

    Args:
        network: Network to join.
        name: Host name.
        command: Command of its first process.
        environment: Environment variables, in addition to those of the image.
        log: File on this machine that the output is appended to.
        volume: Folder on this machine to mount as the shared volume; None mounts none.
        account: Folder on this machine with the token of its service account, if it has one.
        port: Connection to the network that the caller has made and will remove; by default the
            pod makes one.
        sees: Additional folders of this machine that belong to its image.
        nameserver: Address of the name server; by default lookups fail immediately.

    Attributes:
        name: Host name.
        address: Address in the network.
        pid: Id, on this machine, of the process that contains the pod.
    """

    def __init__(
        self,
        network: Network,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        log: Path,
        volume: Path | None = None,
        account: Path | None = None,
        port: Port | None = None,
        sees: Sequence[Path] = (),
        nameserver: str = "127.0.0.1",
    ) -> None:
        self._network, self._has_own_port = network, port is None
        self._port = port or network.connect()
        self.name, self.address = name, self._port.address
        self._environment, self._log = image_environment() | dict(environment), log
        spaces = ["--mount", "--pid", "--mount-proc", "--ipc", "--uts", "--fork", "--kill-child"]
        inside = [name, self.address, nameserver, str(volume or "-"), str(account or "-")]
        inside += [str(REPOSITORY), *_image_folders(), *map(str, sees), "--"]
        self._process = self._open(
            [
                *("setpriv", "--pdeathsig", "KILL"),  # should this process be killed
                *("nsenter", f"--net=/run/netns/{self._port.namespace}"),
                *("unshare", *spaces, "--propagation", "private", "bash", str(_SCRIPT)),
                *inside,
                *command,
            ],
            self._environment,
        )
        self.pid = self._process.pid
        self._is_removed = False

    def run(
        self, command: Sequence[str], environment: Mapping[str, str]
    ) -> "subprocess.Popen[bytes]":
        """Starts another process in the pod, with the same user and log."""
        enter = ["nsenter", f"--target={self._first()}", "--mount", "--net", "--pid", "--ipc"]
        user = ["setpriv", "--reuid", "1000", "--regid", "1000", "--clear-groups"]
        command = [*enter, "--uts", f"--wdns={HOME}", *user, "--no-new-privs", *command]
        return self._open(command, self._environment | dict(environment))

    def poll(self) -> int | None:
        """Returns the exit code of its first process, or None while it runs."""
        return self._process.poll()

    def processes(self, words: str) -> list[int]:
        """Returns this machine's ids of the pod's processes whose command begins with `words`."""
        space = Path(f"/proc/{self._first()}/ns/pid").readlink()
        numbers = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                is_here = (folder / "ns/pid").readlink() == space
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:  # it has ended
                continue
            if is_here and command.startswith(words):
                numbers.append(int(folder.name))
        return numbers

    def kill(self) -> None:
        """Kills all of its processes at once, as if the machine lost power."""
        if self._process.poll() is None:
            with suppress(OSError):
                os.kill(self._first(), signal.SIGKILL)
            self._process.wait(60)

    def stop(self, hook: Sequence[str], *, grace_seconds: float) -> None:
        """Ends it as a kubelet does: its hook, SIGTERM to its first process, then SIGKILL.

        Args:
            hook: Command of its `preStop` hook; empty if it has none.
            grace_seconds: Time limit for all of these together.
        """
        deadline = time.monotonic() + grace_seconds
        # Whoever waits for the command may end the pod meanwhile.
        with suppress(subprocess.TimeoutExpired, OSError):
            if hook:
                self.run(hook, {}).wait(grace_seconds)
            os.kill(self._first(), signal.SIGTERM)
            self._process.wait(max(deadline - time.monotonic(), 0))
        self.kill()

    def remove(self) -> None:
        """Ends it and disconnects it from the network; may be called again."""
        if not self._is_removed:
            self._is_removed = True
            self.kill()
            if self._has_own_port:
                self._network.disconnect(self._port)

    def _first(self) -> int:
        """Returns the id of the first process inside, which `unshare` has forked."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        return int(children[0]) if children else self.pid

    def _open(
        self, command: Sequence[str], environment: Mapping[str, str]
    ) -> "subprocess.Popen[bytes]":
        with self._log.open("ab") as log:
            return subprocess.Popen(
                command,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )


def image_environment() -> dict[str, str]:
    """Returns the variables that the Dockerfiles set, and the PATH of this Python."""
    return {
        "PATH": f"{_ENVIRONMENT / 'bin'}:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": HOME,
        "PYTHONPATH": HOME,
        "PYTHONUNBUFFERED": "1",
        "NEMO_RL_HOME": VOLUME,
        "LANG": "C.UTF-8",
    }


def _image_folders() -> list[str]:
    return [str(_ENVIRONMENT), sys.base_prefix]
