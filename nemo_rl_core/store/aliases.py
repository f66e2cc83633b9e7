"""Movable names of models, such as `production` and `staging`, with the record of their moves.

They are in `aliases/` of the store or in `NEMO_RL_ALIASES`, which may be in an object store.
"""

import json
import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nemo_rl_core.config.patterns import ALIAS_NAME
from nemo_rl_core.errors import StoreError, UnsafePathError
from nemo_rl_core.store import locks, remote
from nemo_rl_core.store.files import write_atomic
from nemo_rl_core.store.manifest import MANIFEST, Manifest
from nemo_rl_core.store.paths import resolve_below
from nemo_rl_core.store.store import Store

PREFIX = "alias:"
ALIASES = "NEMO_RL_ALIASES"

_NAME = re.compile(ALIAS_NAME)
_SUFFIX = ".json"


@dataclass(frozen=True)
class AliasMove:
    """One move of an alias to an artifact: its name in the store, a folder, or an address."""

    model: str
    content_hash: str
    stage: str
    since: str


@dataclass(frozen=True)
class Alias:
    """A name with its moves, the current one last."""

    name: str
    moves: tuple[AliasMove, ...]

    @property
    def current(self) -> AliasMove:
        """The model that it refers to."""
        return self.moves[-1]

    @property
    def former(self) -> AliasMove | None:
        """The model that it referred to before; None for the first."""
        return self.moves[-2] if len(self.moves) > 1 else None


class Aliases:
    """The aliases of a store, or of a location that several stores share.

    Example:
        >>> Aliases(Store.default()).move("production", "export-1a2b")   # doctest: +SKIP
    """

    def __init__(self, store: Store, location: str | None = None) -> None:
        self._store = store
        default = str(store.root / "aliases")
        self._location = location or os.environ.get(ALIASES) or default
        self._is_remote = remote.is_remote(self._location)
        self._is_shared = self._location != default

    def names(self) -> list[str]:
        """All aliases, sorted."""
        if self._is_remote:
            files = remote.names(self._location)
        else:
            folder = Path(self._location).expanduser()
            files = [path.name for path in folder.iterdir()] if folder.is_dir() else []
        aliases = (name.removesuffix(_SUFFIX) for name in files if name.endswith(_SUFFIX))
        return sorted(name for name in aliases if _NAME.fullmatch(name))

    def get(self, name: str) -> Alias:
        """Returns an alias with its moves."""
        moves = self._read(name)
        if not moves:
            raise StoreError(
                f"there is no alias {name!r} in {self._location}",
                expected=f"one of {', '.join(self.names())}" if self.names() else "an alias",
                got=name,
                fix=f"create it: nemo-rl promote MODEL {name}; or set {ALIASES} to its location",
            )
        return Alias(name, moves)

    def move(self, name: str, model: str) -> Alias:
        """Points an alias to a model: the name, folder or address of an artifact; idempotent."""
        if not _NAME.fullmatch(name):
            raise StoreError(
                f"{name!r} is not a valid name for an alias",
                expected="lower-case letters, digits, '_', '-' and '.', such as production",
                got=name,
            )
        recorded_name, manifest = self._artifact(model)
        with self._locked():
            moves = self._read(name)
            if not moves or (moves[-1].model, moves[-1].content_hash) != (
                recorded_name,
                manifest.content_hash,
            ):
                now = datetime.now(UTC).isoformat(timespec="seconds")
                moves = (
                    *moves,
                    AliasMove(recorded_name, manifest.content_hash, manifest.stage, now),
                )
                self._write(name, moves)
        return Alias(name, moves)

    def refuse_folder(self, folder: str) -> None:
        """Raises StoreError if aliases are in a bucket, which cannot refer to local folders."""
        if self._is_remote:
            raise StoreError(
                f"aliases in {self._location} cannot refer to a folder of this machine",
                expected="the address of an artifact, such as s3://BUCKET/export-1a2b",
                got=folder,
                fix="copy the folder into the bucket and name its address: nemo-rl promote "
                "ADDRESS NAME; in a recipe that runs here take promotion.name out, or unset "
                f"{ALIASES}",
            )

    def located(self, name: str) -> str:
        """Returns the transformers folder that an alias refers to, as a path or an address."""
        current = self.get(name).current
        if remote.is_remote(current.model):
            _, manifest = self._artifact(current.model)
            folder = f"{current.model}/model"
        else:
            path = self._folder(current.model)
            folder = str(path / "model")
            if not (path / "model" / "config.json").is_file():
                raise StoreError(
                    f"the model of the alias {name!r} is gone",
                    expected=f"{folder}/config.json",
                    got="no such file",
                    fix=f"move the alias: nemo-rl promote MODEL {name}",
                )
            manifest = Manifest.read(path)
        if manifest.content_hash != current.content_hash:
            raise StoreError(
                f"the model of the alias {name!r} is not the one that was promoted",
                expected=current.content_hash,
                got=manifest.content_hash,
                fix=f"if this is intended: nemo-rl promote {current.model} {name}",
            )
        return folder

    def artifacts(self) -> Iterator[str]:
        """Yields the current and former models of all aliases, to be kept in a store."""
        for name in self.names():
            alias = self.get(name)
            for each in (alias.current, alias.former):
                if each is not None:
                    yield each.model

    def _folder(self, model: str) -> Path:
        with suppress(UnsafePathError):  # a folder elsewhere
            artifact = resolve_below(self._store.artifacts, model, source="an alias")
            if artifact.is_dir():
                return artifact
        return Path(model).expanduser()

    def _artifact(self, model: str) -> tuple[str, Manifest]:
        if remote.is_remote(model):
            address = model.rstrip("/").removesuffix("/model")
            remote.read(f"{address}/model/config.json")
            path = f"{address}/{MANIFEST}"
            return address, Manifest.parse(lambda: remote.read(path), where=address)
        folder = self._folder(model).resolve()
        folder = folder.parent if folder.name == "model" else folder
        if not (folder / MANIFEST).is_file() or not (folder / "model" / "config.json").is_file():
            raise StoreError(
                f"{model} is not an artifact with a model",
                expected=f"a folder with {MANIFEST} and model/config.json, as exported by a run",
                got="not both in " + str(folder),
                fix="name an artifact of `nemo-rl runs RUN`, its folder, or its address",
            )
        self.refuse_folder(str(folder))
        # A store may be moved, and shared aliases are read with other stores.
        is_in_store = folder.parent == self._store.artifacts.resolve() and not self._is_shared
        return folder.name if is_in_store else str(folder), Manifest.read(folder)

    def _locked(self) -> AbstractContextManager[None]:
        if self._is_remote:
            return nullcontext()  # object stores have no locks: one of two concurrent moves is lost
        folder = Path(self._location).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        return locks.locked(folder / ".lock", "promote")

    def _path(self, name: str) -> str:
        return f"{self._location.rstrip('/')}/{name}{_SUFFIX}"

    def _read(self, name: str) -> tuple[AliasMove, ...]:
        if not _NAME.fullmatch(name):
            return ()
        path = self._path(name)
        try:
            if self._is_remote:
                exists = f"{name}{_SUFFIX}" in remote.names(self._location)
                text = remote.read(path) if exists else b"[]"
            else:
                local = Path(path).expanduser()
                text = local.read_bytes() if local.is_file() else b"[]"
            moves: list[dict[str, Any]] = json.loads(text)
            return tuple(AliasMove(**each) for each in moves)
        except (OSError, ValueError, TypeError) as error:
            raise StoreError(
                f"the record of the alias {name!r} cannot be read",
                expected="a list of moves in JSON",
                got=f"{type(error).__name__}: {error}",
                fix=f"restore or remove {path}",
            ) from error

    def _write(self, name: str, moves: tuple[AliasMove, ...]) -> None:
        text = json.dumps([asdict(each) for each in moves], indent=1)
        if self._is_remote:
            remote.write(self._path(name), text.encode())
        else:
            write_atomic(Path(self._path(name)).expanduser(), text)


def located(name: str) -> str:
    """Resolves a model's name if it is an alias; returns other names unchanged."""
    if not name.startswith(PREFIX):
        return name
    return Aliases(Store.default()).located(name.removeprefix(PREFIX))
