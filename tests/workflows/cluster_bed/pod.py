"""One pod: a process tree in name spaces of its own."""

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
    """Started at once; it ends with its first process, and all others with it.

    It ends, too, when the thread does that has started it.

    Args:
        network: That it joins.
        name: Its host name.
        command: Its first process.
        environment: All that the process finds there, but for the image's own.
        log: File of this machine that takes the output; it is added to.
        volume: Folder of this machine that is mounted as the shared volume; None mounts none.
        account: Folder of this machine with the token of its service account; None has none.
        port: Its place in the network, if somebody else has made it and takes it away; its own
            else.
        sees: Further folders of this machine that are in its image.
        nameserver: Asked for names; by default nobody answers, and so at once.

    Attributes:
        name: Its host name.
        address: In the network.
        pid: Of what holds the pod, as this machine counts.
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
        """Starts one more process in the pod, as its user, with the same log."""
        enter = ["nsenter", f"--target={self._first()}", "--mount", "--net", "--pid", "--ipc"]
        user = ["setpriv", "--reuid", "1000", "--regid", "1000", "--clear-groups"]
        whole = [*enter, "--uts", f"--wdns={HOME}", *user, "--no-new-privs", *command]
        return self._open(whole, self._environment | dict(environment))

    def poll(self) -> int | None:
        """The exit code of its first process; None while it runs."""
        return self._process.poll()

    def processes(self, words: str) -> list[int]:
        """Processes in the pod whose command begins with these words, as this machine counts."""
        space = Path(f"/proc/{self._first()}/ns/pid").readlink()
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                is_here = (folder / "ns/pid").readlink() == space
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:  # it has ended
                continue
            if is_here and command.startswith(words):
                found.append(int(folder.name))
        return found

    def kill(self) -> None:
        """Ends all of its processes at once, as a machine that loses power."""
        if self._process.poll() is None:
            with suppress(OSError):
                os.kill(self._first(), signal.SIGKILL)
            self._process.wait(60)

    def stop(self, hook: Sequence[str], *, grace_seconds: float) -> None:
        """Ends it as a kubelet does: its hook, a SIGTERM for its first process, then SIGKILL.

        Args:
            hook: The command of its `preStop`; empty for a pod without.
            grace_seconds: For all of it.
        """
        deadline = time.monotonic() + grace_seconds
        # What waits for the command may end the pod meanwhile.
        with suppress(subprocess.TimeoutExpired, OSError):
            if hook:
                self.run(hook, {}).wait(grace_seconds)
            os.kill(self._first(), signal.SIGTERM)
            self._process.wait(max(deadline - time.monotonic(), 0))
        self.kill()

    def remove(self) -> None:
        """Ends it and takes it off the network; may be called again."""
        if not self._is_removed:
            self._is_removed = True
            self.kill()
            if self._has_own_port:
                self._network.disconnect(self._port)

    def _first(self) -> int:
        """The first process within, which `unshare` has forked."""
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
    """What the Dockerfiles set, and where Python lies here."""
    return {
        "PATH": f"{_ENVIRONMENT / 'bin'}:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": HOME,
        "PYTHONPATH": HOME,
        "PYTHONUNBUFFERED": "1",
        "NEMO_RL_HOME": VOLUME,
        "LANG": "C.UTF-8",
    }


def _image_folders() -> list[str]:
    """The packages and the interpreter."""
    return [str(_ENVIRONMENT), sys.base_prefix]
