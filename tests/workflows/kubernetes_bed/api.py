"""Requests to Kubernetes' API, with any object as it is written in a manifest."""

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
    """A request that was not granted.

    Attributes:
        status: Of HTTP.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


class Api:
    """The API, as one user sees it.

    Args:
        url: Of the server.
        token: Of the user.
        authority: File with the certificate that the server's is signed with.
        as_user: Whom the user stands for, as `kubectl --as` does.
    """

    def __init__(self, url: str, token: str, authority: Path, as_user: str = "") -> None:
        self._url, self.token, self._authority = url, token, authority
        self._headers = {"Authorization": f"Bearer {token}"}
        if as_user:
            self._headers["Impersonate-User"] = as_user
        self._pool = urllib3.PoolManager(ca_certs=str(authority), retries=False, maxsize=8)
        self._resource = cache(self._discovered)

    def acting_as(self, user: str) -> "Api":
        """The same for another user."""
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
            ApiError: For an answer that is no success.
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
        except ValueError:  # a page of the server's health is a word
            content = {"message": answer.data.decode(errors="replace")}
        if answer.status >= 300:
            raise ApiError(answer.status, str(content.get("message", content)))
        return content

    def get(self, path: str, **query: Any) -> Any:
        """One object, or a list."""
        return self.request("GET", path, **query)

    def find(self, path: str) -> Any:
        """One object; None where there is none."""
        try:
            return self.get(path)
        except ApiError as error:
            if error.status != 404:
                raise
            return None

    def items(self, path: str, **query: Any) -> list[dict[str, Any]]:
        """The objects of a list."""
        found: list[dict[str, Any]] = self.get(path, **query)["items"]
        return found

    def path_of(self, body: Mapping[str, Any], namespace: str) -> str:
        """Where objects of its kind are created."""
        plural, is_namespaced = self._resource(body["apiVersion"], body["kind"])
        start = "/api" if body["apiVersion"] == "v1" else "/apis"
        own = body["metadata"].get("namespace", namespace)
        inside = f"/namespaces/{own}" if is_namespaced else ""
        return f"{start}/{body['apiVersion']}{inside}/{plural}"

    def create(self, body: Mapping[str, Any], namespace: str = "default", **query: Any) -> Any:
        """Creates an object."""
        return self.request("POST", self.path_of(body, namespace), body, **query)

    def apply(self, body: Mapping[str, Any], namespace: str = "default", **query: Any) -> Any:
        """Creates an object, or lays it over the one of its name."""
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
    """Every object of a file of manifests."""
    for each in yaml.safe_load_all(path.read_text()):
        if each:
            yield each


def dropped(sent: Any, taken: Any, at: str = "") -> Iterator[str]:
    """Paths of what the server did not keep: keys that it does not know."""
    if isinstance(sent, Mapping):
        for key, value in sent.items():
            path = f"{at}.{key}".lstrip(".")
            if isinstance(taken, Mapping) and key in taken:
                yield from dropped(value, taken[key], path)
            elif value not in ({}, [], "", None, 0, False):  # Go leaves out what is empty
                yield path
    elif isinstance(sent, list):
        for place, each in enumerate(sent):
            if place < len(taken):
                yield from dropped(each, taken[place], f"{at}[{place}]")
            else:
                yield f"{at}[{place}]"
