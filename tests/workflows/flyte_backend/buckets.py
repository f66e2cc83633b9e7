"""Storage for files between containers: a folder on this machine or an S3 server."""

import base64
import hashlib
import os
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Protocol

_HOST = "127.0.0.1"
_DENIED = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"


class Bucket(Protocol):
    """Objects by path; a context manager that runs the server."""

    def __enter__(self) -> "Bucket": ...

    def __exit__(self, *_: object) -> None: ...

    def url(self, path: str) -> str:
        """Returns the URL of an object for containers."""
        ...

    def folder(self, path: str) -> str:
        """Returns the URL of a folder for containers, and creates it if the storage has folders."""
        ...

    def write(self, path: str, content: bytes) -> None:
        """Writes an object."""
        ...

    def read(self, path: str) -> bytes | None:
        """Returns an object's bytes, or None if it does not exist."""
        ...

    def upload_url(self, path: str, content_md5: bytes) -> str:
        """Returns a URL that accepts the bytes by PUT, with their MD5 in the header."""
        ...


class FolderBucket:
    """A folder that all containers can access.

    Attributes:
        root: The folder.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._uploads = ThreadingHTTPServer((_HOST, 0), _upload_handler(root))

    def __enter__(self) -> "FolderBucket":
        self.root.mkdir(parents=True, exist_ok=True)
        threading.Thread(target=self._uploads.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._uploads.shutdown()
        self._uploads.server_close()

    def url(self, path: str) -> str:
        return str(self.root / path)

    def folder(self, path: str) -> str:
        (self.root / path).mkdir(parents=True, exist_ok=True)
        return self.url(path)

    def write(self, path: str, content: bytes) -> None:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)

    def read(self, path: str) -> bytes | None:
        file = self.root / path
        return file.read_bytes() if file.is_file() else None

    def upload_url(self, path: str, content_md5: bytes) -> str:
        return f"http://{_HOST}:{self._uploads.server_port}/{path}"


class S3Bucket:
    """A bucket of moto's S3 server.

    Args:
        address: Address of this machine at which containers reach the server.

    Attributes:
        environment: Variables for access that Flyte's propeller gives every container.
        sent: Bytes that the server has sent, by path, summed over all requests.
        clients: Addresses of the machines that have sent or requested each object's content, by
            method and path.
        received: Bytes that the server has received, by address of the machine and path.
        copied: Paths of the objects that the server has copied, fully or in parts, in order.
    """

    _NAME = "flyte-data"
    key_without_rights = "another-key"
    """Key of an account that the bucket refuses."""

    def __init__(self, address: str) -> None:
        from moto.server import ThreadedMotoServer

        self._address = address
        self._server = ThreadedMotoServer(ip_address=address, port=0, verbose=False)
        self.environment: dict[str, str] = {}
        self.sent: Counter[str] = Counter()
        self.clients: dict[tuple[str, str], set[str]] = {}
        self.received: Counter[tuple[str, str]] = Counter()
        self.copied: list[str] = []
        self._client: Any = None

    def __enter__(self) -> "S3Bucket":
        import logging

        import boto3
        from botocore.config import Config
        from moto.s3.models import s3_backends

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        for account in s3_backends.values():
            account.reset()  # objects are kept per process: remove those of an earlier server
        self._server.start()
        wsgi: Any = self._server._server
        wsgi.app = self._counted(wsgi.app)
        endpoint = f"http://{self._address}:{self._server.get_host_and_port()[1]}"
        key, secret, region = "a-key", "its-secret", "us-east-1"
        self.environment = {
            "FLYTE_AWS_ENDPOINT": endpoint,
            "FLYTE_AWS_ACCESS_KEY_ID": key,
            "FLYTE_AWS_SECRET_ACCESS_KEY": secret,
            "AWS_DEFAULT_REGION": region,
        }
        self._client = boto3.client(
            "s3",
            endpoint_url=endpoint,
            aws_access_key_id=key,
            aws_secret_access_key=secret,
            region_name=region,
            config=Config(signature_version="s3v4"),
        )
        self._client.create_bucket(Bucket=self._NAME)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop()

    def url(self, path: str) -> str:
        return f"s3://{self._NAME}/{path}"

    def folder(self, path: str) -> str:
        return self.url(path)

    def write(self, path: str, content: bytes) -> None:
        self._client.put_object(Bucket=self._NAME, Key=path, Body=content)

    def read(self, path: str) -> bytes | None:
        from botocore.exceptions import ClientError

        try:
            content: bytes = self._client.get_object(Bucket=self._NAME, Key=path)["Body"].read()
        except ClientError as error:
            if error.response["Error"]["Code"] == "NoSuchKey":
                return None
            raise
        return content

    def upload_url(self, path: str, content_md5: bytes) -> str:
        signed: str = self._client.generate_presigned_url(
            "put_object",
            Params={
                "Bucket": self._NAME,
                "Key": path,
                "ContentMD5": base64.b64encode(content_md5).decode(),
            },
        )
        return signed

    def remove(self, path: str) -> None:
        """Deletes an object."""
        self._client.delete_object(Bucket=self._NAME, Key=path)

    def list(self, prefix: str) -> list[str]:
        """Lists the paths of the objects with this prefix."""
        pages = self._client.get_paginator("list_objects_v2")
        listed = pages.paginate(Bucket=self._NAME, Prefix=prefix)
        return [each["Key"] for page in listed for each in page.get("Contents", [])]

    def path(self, url: str) -> str:
        """Returns the path for a URL that `url` returned."""
        return url.removeprefix(self.url(""))

    def _counted(self, app: Any) -> Any:
        """Wraps the server's application to count what it receives, sends and copies."""
        root = f"/{self._NAME}/"

        def answer(environ: dict[str, Any], start_response: Any) -> Any:
            if self.key_without_rights in environ.get("HTTP_AUTHORIZATION", ""):
                start_response("403 Forbidden", [("Content-Type", "application/xml")])
                return [_DENIED]
            response: Any = app(environ, start_response)
            path, method = environ["PATH_INFO"], environ["REQUEST_METHOD"]
            key = path.removeprefix(root)
            self.clients.setdefault((method, key), set()).add(environ["REMOTE_ADDR"])
            if method == "PUT" and "HTTP_X_AMZ_COPY_SOURCE" in environ:
                self.copied.append(key)
            elif method == "PUT":
                sent = int(environ.get("CONTENT_LENGTH") or 0)
                self.received[environ["REMOTE_ADDR"], key] += sent
            if method != "GET" or not path.startswith(root):
                return response
            content = b"".join(response)
            self.sent[key] += len(content)
            return [content]

        return answer


def _upload_handler(blobs: Path) -> type[BaseHTTPRequestHandler]:
    class Upload(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            content = self.rfile.read(int(self.headers["Content-Length"]))
            digest = base64.b64encode(hashlib.md5(content).digest()).decode()
            target = blobs / os.path.normpath(self.path.lstrip("/"))
            if digest != self.headers["Content-MD5"] or not target.is_relative_to(blobs):
                self.send_error(400)
                return
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Logs nothing."""

    return Upload
