"""Client of Kubernetes' API that takes objects as they are written in a manifest."""

import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import urllib3
import yaml

MERGE = "application/merge-patch+json"


class ApiError(Exception):
    """A request that failed.

    Attributes:
        status: HTTP status code.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


class Api:
    """The API, accessed as one user.

    Args:
        url: URL of the server.
        token: Token of the user.
        authority: File with the CA certificate of the server.
        as_user: User to impersonate, as with `kubectl --as`.
    """

    def __init__(self, url: str, token: str, authority: Path, as_user: str = "") -> None:
        self._url, self.token, self._authority = url, token, authority
        self._headers = {"Authorization": f"Bearer {token}"}
        if as_user:
            self._headers["Impersonate-User"] = as_user
        self._pool = urllib3.PoolManager(ca_certs=str(authority), retries=False, maxsize=8)
        self._resource = cache(self._discovered)

    def acting_as(self, user: str) -> "Api":
        """Returns a client that impersonates another user."""
        return Api(self._url, self.token, self._authority, user)

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        content_type: str = "application/json",
        **query: Any,
    ) -> Any:
        """Sends one request.

        Raises:
            ApiError: If the response's status is 300 or above.
        """
        answer = self._pool.request(
            method,
            f"{self._url}{path}{'?' if query else ''}{urlencode(query)}",
            body=None if body is None else json.dumps(body).encode(),
            headers=self._headers | ({"Content-Type": content_type} if body is not None else {}),
            timeout=30,
        )
        try:
            content = json.loads(answer.data)
        except ValueError:  # the server's health pages are plain text
            content = {"message": answer.data.decode(errors="replace")}
        if answer.status >= 300:
            raise ApiError(answer.status, str(content.get("message", content)))
        return content

    def get(self, path: str, **query: Any) -> Any:
        """Returns one object or a list."""
        return self.request("GET", path, **query)

    def find(self, path: str) -> Any:
        """Returns one object, or None if it does not exist."""
        try:
            return self.get(path)
        except ApiError as error:
            if error.status != 404:
                raise
            return None

    def items(self, path: str, **query: Any) -> list[dict[str, Any]]:
        """Returns the objects of a list."""
        objects: list[dict[str, Any]] = self.get(path, **query)["items"]
        return objects

    def path_of(self, body: Mapping[str, Any], namespace: str) -> str:
        """Returns the path under which objects of this kind are created."""
        plural, is_namespaced = self._resource(body["apiVersion"], body["kind"])
        start = "/api" if body["apiVersion"] == "v1" else "/apis"
        namespace = body["metadata"].get("namespace", namespace)
        inside = f"/namespaces/{namespace}" if is_namespaced else ""
        return f"{start}/{body['apiVersion']}{inside}/{plural}"

    def create(self, body: Mapping[str, Any], namespace: str = "default", **query: Any) -> Any:
        """Creates an object."""
        return self.request("POST", self.path_of(body, namespace), body, **query)

    def apply(self, body: Mapping[str, Any], namespace: str = "default", **query: Any) -> Any:
        """Creates an object, or merges it into the existing one of the same name."""
        try:
            return self.create(body, namespace, **query)
        except ApiError as error:
            if error.status != 409:
                raise
        path = f"{self.path_of(body, namespace)}/{body['metadata']['name']}"
        return self.request("PATCH", path, body, content_type=MERGE, **query)

    def _discovered(self, group_version: str, kind: str) -> tuple[str, bool]:
        start = "/api" if group_version == "v1" else "/apis"
        for each in self.get(f"{start}/{group_version}")["resources"]:
            if each["kind"] == kind and "/" not in each["name"]:
                return each["name"], each["namespaced"]
        raise ApiError(404, f"no kind {kind} in {group_version}")


def objects_of(path: Path) -> Iterator[dict[str, Any]]:
    """Yields every object in a file of manifests."""
    for each in yaml.safe_load_all(path.read_text()):
        if each:
            yield each


def dropped(sent: Any, taken: Any, at: str = "") -> Iterator[str]:
    """Yields the paths of keys that the server dropped because it does not know them."""
    if isinstance(sent, Mapping):
        for key, value in sent.items():
            path = f"{at}.{key}".lstrip(".")
            if isinstance(taken, Mapping) and key in taken:
                yield from dropped(value, taken[key], path)
            elif value not in ({}, [], "", None, 0, False):  # Go omits empty values
                yield path
    elif isinstance(sent, list):
        for index, each in enumerate(sent):
            if index < len(taken):
                yield from dropped(each, taken[index], f"{at}[{index}]")
            else:
                yield f"{at}[{index}]"
