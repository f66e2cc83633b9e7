"""Episode of an agent that is a Python function: `fork.py SOCKET` lets its host fork.

It lends its standard streams and environment variables to the fork, and ends with its exit code.
It starts once per episode, so it imports as little as possible; see `function.py`.
"""

import os
import socket
import sys


def main() -> int:
    """Runs an episode in the host that listens at the first argument; returns its exit code."""
    variables = b"\0".join(b"%b=%b" % each for each in os.environb.items())
    with socket.socket(socket.AF_UNIX) as host:
        host.connect(sys.argv[1])
        socket.send_fds(host, [variables], [0, 1, 2])
        return int(host.recv(8) or b"1")


if __name__ == "__main__":
    sys.exit(main())
