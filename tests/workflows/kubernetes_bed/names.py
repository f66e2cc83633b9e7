"""The cluster's name server: names of services are the addresses of their pods.

There is no proxy between a service and its pods here, so a service with an address of its own has
those of its pods, too.
"""

import socket
import struct
import threading
import time

from tests.workflows.kubernetes_bed.api import Api

_DOMAIN = ".svc.cluster.local"
_HEADER, _ANSWER = "!6H", "!HHHIH4s"
_A, _INTERNET = 1, 1
_KEPT_SECONDS = 0.5


class NameServer:
    """Answers over UDP on port 53; a context manager.

    Args:
        address: Where it listens.
        api: Knows the endpoints of services.
    """

    def __init__(self, address: str, api: Api) -> None:
        self._api, self._address = api, address
        self._known: dict[str, tuple[float, list[str]]] = {}

    def __enter__(self) -> "NameServer":
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((self._address, 53))
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def addresses(self, name: str) -> list[str]:
        """Of `SERVICE.NAMESPACE.svc.cluster.local`; none for any other name."""
        if not name.endswith(_DOMAIN):
            return []
        seen_at, found = self._known.get(name, (0.0, []))
        if not found or time.monotonic() - seen_at > _KEPT_SECONDS:
            service, _, namespace = name.removesuffix(_DOMAIN).partition(".")
            endpoints = self._api.find(f"/api/v1/namespaces/{namespace}/endpoints/{service}") or {}
            found = [
                address["ip"]
                for subset in endpoints.get("subsets") or []
                for address in subset.get("addresses") or []
            ]
            self._known[name] = time.monotonic(), found
        return found

    def _serve(self) -> None:
        while True:
            try:
                query, sender = self._socket.recvfrom(512)
                self._socket.sendto(self._answer(query), sender)
            except OSError:
                if self._socket.fileno() < 0:
                    return

    def _answer(self, query: bytes) -> bytes:
        number = struct.unpack(_HEADER, query[:12])[0]
        labels, place = [], 12
        while query[place]:
            labels.append(query[place + 1 : place + 1 + query[place]].decode())
            place += 1 + query[place]
        question = query[12 : place + 5]
        (kind,) = struct.unpack("!H", question[-4:-2])
        name = ".".join(labels).lower()
        found = self.addresses(name)
        answers = b"".join(  # 0xC00C points at the name in the question
            struct.pack(_ANSWER, 0xC00C, _A, _INTERNET, 1, 4, socket.inet_aton(address))
            for address in (found if kind == _A else [])
        )
        is_unknown = 0 if found else 3
        flags = 0x8580 | is_unknown  # an answer with authority
        header = struct.pack(_HEADER, number, flags, 1, len(found) if kind == _A else 0, 0, 0)
        return header + question + answers
