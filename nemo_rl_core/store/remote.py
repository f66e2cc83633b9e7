"""Listings and contents of rows and models in object stores.

An object is identified by its address, size and version (S3's ETag, the generation of GCS). The
digest of a listing is part of the key of the rows, so changed objects count as other data.
"""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import Any

from nemo_rl_core.errors import DataError, NemoRLError
from nemo_rl_core.store.files import written_aside
from nemo_rl_core.store.paths import checked_name

logger = logging.getLogger(__name__)

SCHEMES = ("s3", "gs")
_SUFFIXES = (".jsonl", ".csv", ".parquet", ".arrow")
_CREDENTIALS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE or a role of the machine; "
    "AWS_ENDPOINT_URL names a store that is not Amazon's",
    "gs": "run gcloud auth application-default login, or set GOOGLE_APPLICATION_CREDENTIALS",
}


@dataclass(frozen=True)
class RemoteObject:
    """An object of a listing, with the store's identifier of its content."""

    address: str
    size: int
    version: str

    @property
    def digest(self) -> str:
        """Digest of address, size and version."""
        return sha256(f"{self.address}\t{self.size}\t{self.version}".encode()).hexdigest()


class NothingThereError(DataError):
    """The bucket exists, but has no object at the address."""


def is_remote(name: str) -> bool:
    """Whether a name is an address in an object store; refuses an unsupported kind of address."""
    scheme, separator, _ = name.partition("://")
    if separator and scheme not in SCHEMES:
        raise DataError(
            f"rows cannot be read from {name}",
            expected=" or ".join(f"{each}://BUCKET/PATH" for each in SCHEMES) + ", or a path",
            got=f"the scheme {scheme}://",
            fix="copy the files into a bucket or onto this machine",
        )
    return bool(separator)


def listing(address: str) -> list[RemoteObject]:
    """Returns the data objects under an address, sorted by their addresses.

    The address is that of an object or a folder (without its subfolders), or a pattern with `*`,
    `?` or `**`.
    """
    files = _file_system(address)
    try:
        with _explained(address):
            entries = _matching(files, address)
    except NothingThereError:
        _refuse_missing_bucket(files, address)
        raise
    objects = sorted(
        (
            _object(address, each)
            for each in entries
            if each["type"] == "file" and each["name"].lower().endswith(_SUFFIXES)
        ),
        key=lambda each: each.address,
    )
    if not objects:
        _refuse_missing_bucket(files, address)
        raise NothingThereError(
            f"there is no data under {address}",
            expected=f"an object, a folder of objects or a pattern, of {', '.join(_SUFFIXES)}",
            got=f"{len(entries)} objects of other kinds" if entries else "an empty listing",
            fix="correct data.train or data.validation in the recipe",
        )
    suffixes = sorted({PurePosixPath(each.address).suffix.lower() for each in objects})
    if len(suffixes) > 1:
        raise DataError(
            f"{address} cannot be read as one data set",
            expected="objects with the same suffix",
            got=f"objects with {' and '.join(suffixes)}",
            fix=f"name one kind, such as {address.rstrip('/')}/*{suffixes[0]}",
        )
    return objects


def tree(address: str) -> list[RemoteObject]:
    """Returns all objects in a folder and its subfolders, sorted by their addresses."""
    files = _file_system(address)
    with _explained(address):
        files_below = [_object(address, each) for each in files.find(address, detail=True).values()]
        # Web consoles mark a folder by an empty object.
        files_below = [each for each in files_below if each.size or not each.address.endswith("/")]
        if not files_below:
            raise FileNotFoundError(address)
    objects = sorted(files_below, key=lambda each: each.address)
    if objects[0].address == address:
        raise DataError(
            f"{address} is an object",
            expected="a folder with a model",
            got=f"an object of {objects[0].size} bytes",
            fix=f"name the folder: {address.rpartition('/')[0]}",
        )
    base = address.rstrip("/") + "/"
    for each in objects:
        checked_name(each.address.removeprefix(base), source=f"the listing of {address}")
    return objects


def names(address: str) -> list[str]:
    """Returns the names of the objects in a folder; none if it does not exist."""
    files = _file_system(address)
    with _explained(address):
        paths = files.find(address, maxdepth=1)
    return [PurePosixPath(each).name for each in paths]


def read(address: str) -> bytes:
    """Returns the bytes of a small object."""
    files = _file_system(address)
    with _explained(address):
        data: bytes = files.cat_file(address)
    return data


def write(address: str, content: bytes) -> None:
    """Writes a small object atomically."""
    files = _file_system(address)
    with _explained(address):
        files.pipe_file(address, content)


def describe_content(objects: Sequence[RemoteObject]) -> str:
    """Describes objects before they are read: number, size and digest of their listing."""
    digest = sha256("\n".join(each.digest for each in objects).encode()).hexdigest()
    size = sum(each.size for each in objects)
    return f"{len(objects)} objects of {size} bytes {digest}"


def fetch(source: RemoteObject, path: Path) -> None:
    """Downloads an object into a file, completely or not at all; refuses one that has changed."""
    with written_aside(path) as partial, _explained(source.address):
        files = _file_system(source.address)
        files.get_file(source.address, str(partial))
        now = files.info(source.address)
        if (now["size"], _version(now)) != (source.size, source.version):
            raise DataError(
                f"{source.address} has changed while it was read",
                expected=f"version {source.version}",
                got=f"version {_version(now)}",
                fix="run again when its writer has finished",
            )


def _scheme(address: str) -> str:
    return address.partition("://")[0]


def _matching(files: Any, address: str) -> Sequence[Mapping[str, Any]]:
    if any(letter in address for letter in "*?["):
        return [*files.glob(address, detail=True).values()]
    info = files.info(address)
    if info["type"] == "file":
        return [info]
    return [each for each in files.ls(address, detail=True) if each["type"] == "file"]


def _object(address: str, info: Mapping[str, Any]) -> RemoteObject:
    name = f"{_scheme(address)}://{info['name']}"
    return RemoteObject(name, info["size"], _version(info))


def _version(info: Mapping[str, Any]) -> str:
    version = info.get("generation") or info.get("ETag") or info.get("etag")
    return str(version or info.get("LastModified") or info.get("updated")).strip('"')


def _file_system(address: str) -> Any:
    """Returns a file system that does not cache listings, since objects may change."""
    import fsspec

    scheme = _scheme(address)
    options = _flyte_access(os.environ) if scheme == "s3" else {}
    return fsspec.filesystem(scheme, use_listings_cache=False, skip_instance_cache=True, **options)


def _flyte_access(environment: Mapping[str, str]) -> dict[str, Any]:
    """Returns Flyte's settings of a store that is not Amazon's, unless AWS's variables are set."""
    aws_variables = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ACCESS_KEY_ID", "AWS_PROFILE")
    endpoint = environment.get("FLYTE_AWS_ENDPOINT")
    if not endpoint or any(name in environment for name in aws_variables):
        return {}
    return {
        "endpoint_url": endpoint,
        "key": environment.get("FLYTE_AWS_ACCESS_KEY_ID"),
        "secret": environment.get("FLYTE_AWS_SECRET_ACCESS_KEY"),
    }


def _refuse_missing_bucket(files: Any, address: str) -> None:
    """Refuses a missing S3 bucket; for other stores it looks the same as an empty one."""
    if _scheme(address) != "s3":
        return
    bucket = "/".join(address.split("/")[:3])
    try:
        files.info(bucket)
    except FileNotFoundError as error:
        raise DataError(
            f"the bucket of {address} does not exist",
            expected="a bucket that this process may list and read",
            got=f"no {bucket}",
            fix="correct the address in the recipe, or make the bucket",
        ) from error
    # Broad on purpose: listing objects may be allowed without access to the bucket.
    except Exception:
        logger.debug("%s could not be inspected", bucket, exc_info=True)


@contextmanager
def _explained(address: str) -> Iterator[None]:
    try:
        yield
    except NemoRLError:
        raise
    except FileNotFoundError as error:
        raise NothingThereError(
            f"there is nothing under {address}",
            expected="an object, a folder of objects or a pattern in a bucket that exists",
            got="no such bucket or object",
            fix="correct the address in the recipe, or upload what is missing",
        ) from error
    # Broad on purpose: the stores' libraries raise errors of many classes.
    except Exception as error:
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        is_refused = isinstance(error, PermissionError) or any(
            word in text for word in ("Credential", "InvalidAccessKeyId", "Token", "401", "403")
        )
        raise DataError(
            f"{address} cannot be read" + (": access is refused" if is_refused else ""),
            expected="a bucket that this process may list and read",
            got=text,
            fix=_CREDENTIALS[_scheme(address)]
            if is_refused
            else "check the network and the address of the store, and run again",
        ) from error
