"""Rows and models in an object store: what lies under an address now, and its bytes.

An object is known by its address, size and version (S3's ETag, the generation of GCS). A run asks
for the listing once, when it begins, and its digest is part of the key of the rows: an object more,
or another one under its name, is other data.
"""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
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
    """An object of a listing.

    Attributes:
        address: With its scheme.
        size: In bytes.
        version: What the store calls this content.
        written: When, in seconds since 1970, by the store's clock; None where it does not say.
    """

    address: str
    size: int
    version: str
    written: float | None = field(default=None, compare=False)

    @property
    def digest(self) -> str:
        """Of address, size and version."""
        return sha256(f"{self.address}\t{self.size}\t{self.version}".encode()).hexdigest()


class NothingThereError(DataError):
    """A bucket that answers, without an object at the address."""


def is_remote(name: str) -> bool:
    """Whether rows lie in an object store.

    Raises:
        DataError: For an address of a kind that is not read.
    """
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
    """The data objects under an address, sorted by it.

    Args:
        address: Of an object; of a folder, whose objects are taken without those of folders in it;
            or with `*`, `?` or `**`.

    Raises:
        DataError: If the store cannot be asked, or has no such object.
    """
    files = _file_system(address)
    try:
        with _explained(address):
            found = _found(files, address)
    except NothingThereError:
        _refuse_missing_bucket(files, address)
        raise
    objects = sorted(
        (
            _object(address, each)
            for each in found
            if each["type"] == "file" and each["name"].lower().endswith(_SUFFIXES)
        ),
        key=lambda each: each.address,
    )
    if not objects:
        _refuse_missing_bucket(files, address)
        raise NothingThereError(
            f"there is no data under {address}",
            expected=f"an object, a folder of objects or a pattern, of {', '.join(_SUFFIXES)}",
            got=f"{len(found)} objects of other kinds" if found else "an empty listing",
            fix="correct data.train or data.validation in the recipe",
        )
    suffixes = sorted({PurePosixPath(each.address).suffix.lower() for each in objects})
    if len(suffixes) > 1:
        raise DataError(
            f"{address} cannot be read as one data set",
            expected="objects of one suffix",
            got=f"objects of {' and '.join(suffixes)}",
            fix=f"name one kind, such as {address.rstrip('/')}/*{suffixes[0]}",
        )
    return objects


def tree(address: str) -> list[RemoteObject]:
    """All objects under a folder, and under those in it, sorted by their addresses.

    Raises:
        DataError: If the store cannot be asked, or has no such object.
        UnsafePathError: If the name of an object leads out of the folder.
    """
    files = _file_system(address)
    with _explained(address):
        found = [_object(address, each) for each in files.find(address, detail=True).values()]
        # Consoles mark a folder by an empty object.
        found = [each for each in found if each.size or not each.address.endswith("/")]
        if not found:
            raise FileNotFoundError(address)
    objects = sorted(found, key=lambda each: each.address)
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
    """The names of the objects in a folder; none where there is no such folder.

    Raises:
        DataError: If the store cannot be asked.
    """
    files = _file_system(address)
    with _explained(address):
        found = files.find(address, maxdepth=1)
    return [PurePosixPath(each).name for each in found]


def read(address: str) -> bytes:
    """The bytes of a small object.

    Raises:
        DataError: If the store cannot be asked, or has no such object.
    """
    files = _file_system(address)
    with _explained(address):
        found: bytes = files.cat_file(address)
    return found


def write(address: str, content: bytes) -> None:
    """Writes a small object, whole or not at all.

    Raises:
        DataError: If the store refuses.
    """
    files = _file_system(address)
    with _explained(address):
        files.pipe_file(address, content)


def content(objects: Sequence[RemoteObject]) -> str:
    """What is known of objects before they are read, with a digest of their listing."""
    digest = sha256("\n".join(each.digest for each in objects).encode()).hexdigest()
    size = sum(each.size for each in objects)
    return f"{len(objects)} objects of {size} bytes {digest}"


def fetch(each: RemoteObject, path: Path) -> None:
    """Writes an object into a file, which then holds all of it or does not exist.

    Raises:
        DataError: If it cannot be read, or is another version by now.
    """
    with written_aside(path) as partial, _explained(each.address):
        files = _file_system(each.address)
        files.get_file(each.address, str(partial))
        now = files.info(each.address)
        if (now["size"], _version(now)) != (each.size, each.version):
            raise DataError(
                f"{each.address} has changed while it was read",
                expected=f"version {each.version}",
                got=f"version {_version(now)}",
                fix="run again when what writes it has ended",
            )


def _scheme(address: str) -> str:
    return address.partition("://")[0]


def _found(files: Any, address: str) -> Sequence[Mapping[str, Any]]:
    if any(letter in address for letter in "*?["):
        return [*files.glob(address, detail=True).values()]
    info = files.info(address)
    if info["type"] == "file":
        return [info]
    return [each for each in files.ls(address, detail=True) if each["type"] == "file"]


def _object(address: str, info: Mapping[str, Any]) -> RemoteObject:
    written = info.get("LastModified") or info.get("updated")
    if isinstance(written, str):  # of GCS
        written = datetime.fromisoformat(written)
    seconds = written.timestamp() if isinstance(written, datetime) else None
    name = f"{_scheme(address)}://{info['name']}"
    return RemoteObject(name, info["size"], _version(info), seconds)


def _version(info: Mapping[str, Any]) -> str:
    version = info.get("generation") or info.get("ETag") or info.get("etag")
    return str(version or info.get("LastModified") or info.get("updated")).strip('"')


def _file_system(address: str) -> Any:
    """A file system that keeps no listings: what lies there may have changed a moment ago."""
    import fsspec

    scheme = _scheme(address)
    options = _flytes_access(os.environ) if scheme == "s3" else {}
    return fsspec.filesystem(scheme, use_listings_cache=False, skip_instance_cache=True, **options)


def _flytes_access(environment: Mapping[str, str]) -> dict[str, Any]:
    """What Flyte tells its containers of a store that is not Amazon's, unless AWS's names do."""
    own = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ACCESS_KEY_ID", "AWS_PROFILE")
    endpoint = environment.get("FLYTE_AWS_ENDPOINT")
    if not endpoint or any(name in environment for name in own):
        return {}
    return {
        "endpoint_url": endpoint,
        "key": environment.get("FLYTE_AWS_ACCESS_KEY_ID"),
        "secret": environment.get("FLYTE_AWS_SECRET_ACCESS_KEY"),
    }


def _refuse_missing_bucket(files: Any, address: str) -> None:
    """Refuses a bucket of S3 that is not there; other clients say the same of an empty one.

    Raises:
        DataError: If there is no such bucket.
    """
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
    # Named fault boundary: who may list objects need not be allowed to look at the bucket.
    except Exception:
        logger.debug("%s could not be looked at", bucket, exc_info=True)


@contextmanager
def _explained(address: str) -> Iterator[None]:
    """Turns errors of the stores' libraries into one that says what to do."""
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
    # Named fault boundary: the stores' libraries raise errors of many classes.
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
