"""A server with the part of the hub's API that an upload uses, as strict as the hub."""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_secret_of_the_test"
_SMALL = 1000
"""Larger files must go through the store of large files, as weights do."""


@dataclass
class FakeHub:
    """Contents of the fake server.

    Attributes:
        private: By repository.
        files: Committed contents, by repository and path.
        refuses: Paths of requests to answer with 403.
    """

    private: dict[str, bool] = field(default_factory=dict)
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refuses: str | None = None
    objects: dict[str, bytes] = field(default_factory=dict)
    num_requests: int = 0
    url: str = ""


class _HubHandler(BaseHTTPRequestHandler):
    hub: FakeHub

    def log_message(self, *_: Any) -> None:
        pass

    def _answer(self, status: int, body: Any = None, **more: str) -> None:
        body = {"error": body, **more} if status >= 400 else body
        data = json.dumps(body if body is not None else {}).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        if status >= 400:
            self.send_header("x-error-message", str(body["error"]))
        self.end_headers()
        self.wfile.write(data)

    def _handle(self) -> None:
        self.hub.num_requests += 1
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        is_object = self.path.startswith("/objects/")
        if not is_object and self.headers.get("authorization") != f"Bearer {TOKEN}":
            self._answer(401, "Invalid credentials")
        elif self.hub.refuses and re.search(self.hub.refuses, self.path):
            self._answer(403, "You have no right to write here")
        else:
            self._route(body)

    def _route(self, body: bytes) -> None:
        if self.path == "/api/repos/create":
            self._create(json.loads(body))
        elif self.path.startswith("/objects/"):
            self._store(self.path.rpartition("/")[2], body)
        elif self.path.startswith("/verify/"):
            payload = json.loads(body)
            stored = self.hub.objects.get(payload["oid"], b"")
            self._answer(200 if len(stored) == payload["size"] else 422)
        elif found := re.fullmatch(r"/(.+)\.git/info/lfs/objects/batch", self.path):
            self._batch(json.loads(body), found[1])
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(/.*)?", self.path):
            self._model(found[1], found[2] or "", body)
        elif self.path == "/api/whoami-v2":
            self._answer(200, {"name": "me", "type": "user", "orgs": []})
        else:
            self._answer(404, f"no route {self.path}")

    def _create(self, given: dict[str, Any]) -> None:
        repo = f"{given.get('organization') or 'me'}/{given['name']}"
        if repo in self.hub.private:
            self._answer(409, "You already created this model repo", url=f"{self.hub.url}/{repo}")
            return
        # A repository is public unless the request says otherwise.
        private = given.get("private") is True or given.get("visibility") == "private"
        self.hub.private[repo] = private
        self.hub.files[repo] = {}
        self._answer(200, {"url": f"{self.hub.url}/{repo}", "name": repo, "id": repo})

    def _store(self, oid: str, body: bytes) -> None:
        if hashlib.sha256(body).hexdigest() != oid:
            self._answer(422, "the content does not have this hash")
            return
        self.hub.objects[oid] = body
        self._answer(200)

    def _batch(self, given: dict[str, Any], repo: str) -> None:
        assert repo in self.hub.private
        objects = [
            {
                **each,
                "actions": {
                    "upload": {"href": f"{self.hub.url}/objects/{each['oid']}"},
                    "verify": {"href": f"{self.hub.url}/verify/{repo}"},
                },
            }
            for each in given["objects"]
        ]
        self._answer(200, {"transfer": "basic", "objects": objects})

    def _model(self, repo: str, rest: str, body: bytes) -> None:
        if repo not in self.hub.private:
            self._answer(404, "Repository Not Found")
        elif rest.startswith("/preupload/"):
            files = [
                {
                    "path": each["path"],
                    "uploadMode": "lfs" if each["size"] > _SMALL else "regular",
                    "shouldIgnore": False,
                }
                for each in json.loads(body)["files"]
            ]
            self._answer(200, {"files": files})
        elif rest.startswith("/commit/"):
            self._commit(repo, [json.loads(line) for line in body.splitlines() if line])
        else:
            private = self.hub.private[repo]
            self._answer(200, {"id": repo, "private": private, "siblings": [], "tags": []})

    def _commit(self, repo: str, lines: list[dict[str, Any]]) -> None:
        results = {}
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                content = base64.b64decode(value["content"])
                if len(content) > _SMALL:
                    self._answer(413, f"{value['path']} is too large for a commit")
                    return
                results[value["path"]] = content
            elif line["key"] == "lfsFile":
                if value["oid"] not in self.hub.objects:
                    self._answer(422, f"{value['path']} was never uploaded")
                    return
                results[value["path"]] = self.hub.objects[value["oid"]]
        self.hub.files[repo] = results
        self._answer(200, {"commitUrl": f"{self.hub.url}/{repo}/commit/abc", "commitOid": "abc"})


for _verb in ("GET", "POST", "PUT"):
    setattr(_HubHandler, f"do_{_verb}", _HubHandler._handle)


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """A hub on loopback, as long as it is needed."""
    hub = FakeHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_HubHandler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
