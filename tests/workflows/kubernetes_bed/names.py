"""The cluster's name server, which resolves names of services to the addresses of their pods.

Services have no proxy here, so a service with a cluster IP also resolves to the addresses of its
pods.
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
        address: Address that the server listens on.
        api: Client to look up the endpoints of services with.
    """

    def __init__(self, address: str, api: Api) -> None:
        self._api, self._address = api, address
        self._cache: dict[str, tuple[float, list[str]]] = {}

    def __enter__(self) -> "NameServer":
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((self._address, 53))
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def addresses(self, name: str) -> list[str]:
        """Returns the addresses of `SERVICE.NAMESPACE.svc.cluster.local`; none for other names."""
        if not name.endswith(_DOMAIN):
            return []
        seen_at, addresses = self._cache.get(name, (0.0, []))
        if not addresses or time.monotonic() - seen_at > _KEPT_SECONDS:
            service, _, namespace = name.removesuffix(_DOMAIN).partition(".")
            endpoints = self._api.find(f"/api/v1/namespaces/{namespace}/endpoints/{service}") or {}
            addresses = [
                address["ip"]
                for subset in endpoints.get("subsets") or []
                for address in subset.get("addresses") or []
            ]
            self._cache[name] = time.monotonic(), addresses
        return addresses

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
        labels, offset = [], 12
        while query[offset]:
            labels.append(query[offset + 1 : offset + 1 + query[offset]].decode())
            offset += 1 + query[offset]
        question = query[12 : offset + 5]
        (kind,) = struct.unpack("!H", question[-4:-2])
        name = ".".join(labels).lower()
        addresses = self.addresses(name)
        answers = b"".join(  # 0xC00C points at the name in the question
            struct.pack(_ANSWER, 0xC00C, _A, _INTERNET, 1, 4, socket.inet_aton(address))
            for address in (addresses if kind == _A else [])
        )
        error_code = 0 if addresses else 3
        flags = 0x8580 | error_code  # an authoritative answer
        header = struct.pack(_HEADER, number, flags, 1, len(addresses) if kind == _A else 0, 0, 0)
        return header + question + answers
