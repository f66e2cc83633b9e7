"""Servers that receive notices: HTTP and mail, over real sockets."""

import json
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any


@contextmanager
def hook(status: int = 200, host: str = "127.0.0.1") -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yields the address of a webhook with a secret path, and the list of posts to it."""
    posted: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            posted.append({"path": self.path, **json.loads(body)})
            self.send_response(status)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Says nothing."""

    server = HTTPServer((host, 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://{host}:{server.server_port}/services/T0/secret", posted
    finally:
        server.shutdown()
        server.server_close()


@dataclass
class Mailbox:
    """A mail server and the messages it received.

    Attributes:
        address: Host and port.
        kept: Sender, recipients and text of each message.
        logins: Credentials sent by AUTH PLAIN.
    """

    address: str = ""
    kept: list[tuple[str, list[str], str]] = field(default_factory=list)
    logins: list[str] = field(default_factory=list)


@contextmanager
def mail_server(host: str = "127.0.0.1", *, refuses: bool = False) -> Iterator[Mailbox]:
    """Implements as much of RFC 5321 as a client needs to send one message, with AUTH PLAIN.

    Args:
        host: Address to listen on.
        refuses: Whether every sender is refused, like by a server that does not relay for
            strangers.
    """
    box = Mailbox()

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            sender, to = "", []
            self._say("220 mail.test ESMTP")
            while line := self.rfile.readline().decode().strip():
                verb = line.upper()
                if verb.startswith("EHLO"):
                    self._say("250-mail.test")
                    self._say("250 AUTH PLAIN")
                elif verb.startswith("AUTH PLAIN"):
                    box.logins.append(line.split()[2])
                    self._say("235 ok")
                elif verb.startswith("MAIL FROM:"):
                    sender = line[10:].split()[0].strip("<>")
                    self._say("550 relaying denied" if refuses else "250 ok")
                elif verb.startswith("RCPT TO:"):
                    to.append(line[8:].strip("<>"))
                    self._say("250 ok")
                elif verb == "DATA":
                    self._say("354 continue")
                    box.kept.append((sender, to, self._data()))
                    self._say("250 kept")
                elif verb in ("QUIT", "RSET"):
                    self._say("221 bye")
                    return
                else:
                    self._say("502 not known")

        def _data(self) -> str:
            lines = []
            while (line := self.rfile.readline().decode().rstrip("\r\n")) != ".":
                lines.append(line)
            return "\n".join(lines)

        def _say(self, text: str) -> None:
            self.wfile.write(f"{text}\r\n".encode())

    server = socketserver.ThreadingTCPServer((host, 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    box.address = f"{host}:{server.server_address[1]}"
    try:
        yield box
    finally:
        server.shutdown()
        server.server_close()
