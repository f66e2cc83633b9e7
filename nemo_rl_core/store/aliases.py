"""Names of models that move: `production`, `staging`. Each has the record of all its moves.

The records lie in `aliases/` of the store, or where `NEMO_RL_ALIASES` says, which may be a folder
of an object store that machines and a cluster share. A stage of a run decides whether its candidate
is better (`tasks/promote.py`), and moves the alias that its recipe names. People and services move
others.
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
"""What a model's name begins with that is looked up here."""
ALIASES = "NEMO_RL_ALIASES"
"""The variable with a folder, or an address of an object store, in place of the store's own."""

_NAME = re.compile(ALIAS_NAME)
_MARK = ".json"


@dataclass(frozen=True)
class AliasMove:
    """One move of an alias.

    Attributes:
        model: The artifact: its name in the store, a folder elsewhere, or an address.
        content_hash: Of the artifact, as its manifest has it.
        stage: What made it.
        since: When the alias came to mean it, in ISO 8601.
    """

    model: str
    content_hash: str
    stage: str
    since: str


@dataclass(frozen=True)
class Alias:
    """A name, and what it has meant, the present last."""

    name: str
    moves: tuple[AliasMove, ...]

    @property
    def current(self) -> AliasMove:
        """What it means."""
        return self.moves[-1]

    @property
    def former(self) -> AliasMove | None:
        """What it meant before."""
        return self.moves[-2] if len(self.moves) > 1 else None


class Aliases:
    """The aliases of a store, or of a place that several share.

    Args:
        store: Whose artifacts are meant by their names.
        place: A folder or an address; None is that of the environment, else `aliases/` in it.

    Example:
        >>> Aliases(Store.default()).move("production", "export-1a2b")   # doctest: +SKIP
    """

    def __init__(self, store: Store, place: str | None = None) -> None:
        self._store = store
        own = str(store.root / "aliases")
        self._place = place or os.environ.get(ALIASES) or own
        self._is_remote = remote.is_remote(self._place)
        self._is_shared = self._place != own

    def names(self) -> list[str]:
        """All aliases, sorted."""
        if self._is_remote:
            found = remote.names(self._place)
        else:
            folder = Path(self._place).expanduser()
            found = [path.name for path in folder.iterdir()] if folder.is_dir() else []
        own = (name.removesuffix(_MARK) for name in found if name.endswith(_MARK))
        return sorted(name for name in own if _NAME.fullmatch(name))

    def get(self, name: str) -> Alias:
        """An alias with its moves.

        Raises:
            StoreError: If there is none of that name, or its record cannot be read.
        """
        moves = self._read(name)
        if not moves:
            raise StoreError(
                f"there is no alias {name!r} in {self._place}",
                expected=f"one of {', '.join(self.names())}" if self.names() else "an alias",
                got=name,
                fix=f"make it: nemo-rl promote MODEL {name}; or set {ALIASES} to where it lies",
            )
        return Alias(name, moves)

    def move(self, name: str, model: str) -> Alias:
        """Lets an alias mean a model; nothing changes where it does so already.

        Args:
            name: Lower-case letters, digits, `_`, `-` and `.`.
            model: An artifact of the store by its name, a folder of an artifact, or its address.

        Raises:
            StoreError: If that is no artifact with a model, or the name is none.
        """
        if not _NAME.fullmatch(name):
            raise StoreError(
                f"{name!r} is no name for an alias",
                expected="lower-case letters, digits, '_', '-' and '.', such as production",
                got=name,
            )
        known, manifest = self._artifact(model)
        with self._alone():
            moves = self._read(name)
            if not moves or (moves[-1].model, moves[-1].content_hash) != (
                known,
                manifest.content_hash,
            ):
                now = datetime.now(UTC).isoformat(timespec="seconds")
                moves = (*moves, AliasMove(known, manifest.content_hash, manifest.stage, now))
                self._write(name, moves)
        return Alias(name, moves)

    def refuse_folder(self, folder: str) -> None:
        """Raises StoreError if aliases are in a bucket, where none can mean a local folder."""
        if self._is_remote:
            raise StoreError(
                f"aliases in {self._place} cannot mean a folder of this machine",
                expected="the address of an artifact, such as s3://BUCKET/export-1a2b",
                got=folder,
                fix="copy the folder into the bucket and name its address: nemo-rl promote "
                "ADDRESS NAME; in a recipe that runs here take promotion.name out, or unset "
                f"{ALIASES}",
            )

    def located(self, name: str) -> str:
        """The transformers folder that an alias means now, as a path or an address.

        Raises:
            StoreError: If there is no such alias, or its artifact is gone or another one by now.
        """
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
                f"the model of the alias {name!r} is another one than was promoted",
                expected=current.content_hash,
                got=manifest.content_hash,
                fix=f"if that is meant: nemo-rl promote {current.model} {name}",
            )
        return folder

    def artifacts(self) -> Iterator[str]:
        """What aliases mean and meant before, so that neither is removed from a store."""
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
        """What is written down of a model, and its manifest."""
        if remote.is_remote(model):
            address = model.rstrip("/").removesuffix("/model")
            remote.read(f"{address}/model/config.json")
            path = f"{address}/{MANIFEST}"
            return address, Manifest.parse(lambda: remote.read(path), where=address)
        folder = self._folder(model).resolve()
        folder = folder.parent if folder.name == "model" else folder
        if not (folder / MANIFEST).is_file() or not (folder / "model" / "config.json").is_file():
            raise StoreError(
                f"{model} is no artifact with a model",
                expected=f"a folder with {MANIFEST} and model/config.json, as a run exports it",
                got="not both in " + str(folder),
                fix="name an artifact of `nemo-rl runs RUN`, its folder, or its address",
            )
        self.refuse_folder(str(folder))
        # A store may be moved, and a shared folder of aliases is read beside other stores.
        is_own = folder.parent == self._store.artifacts.resolve() and not self._is_shared
        return folder.name if is_own else str(folder), Manifest.read(folder)

    def _alone(self) -> AbstractContextManager[None]:
        if self._is_remote:
            return nullcontext()  # object stores have no locks: of two moves at once, one is kept
        folder = Path(self._place).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        return locks.held(folder / ".lock", "promote")

    def _path(self, name: str) -> str:
        return f"{self._place.rstrip('/')}/{name}{_MARK}"

    def _read(self, name: str) -> tuple[AliasMove, ...]:
        if not _NAME.fullmatch(name):
            return ()
        path = self._path(name)
        try:
            if self._is_remote:
                found = f"{name}{_MARK}" in remote.names(self._place)
                text = remote.read(path) if found else b"[]"
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
    """The folder or address of a model whose name may be an alias; other names as they are.

    Raises:
        StoreError: As for `Aliases.located`.
    """
    if not name.startswith(PREFIX):
        return name
    return Aliases(Store.default()).located(name.removeprefix(PREFIX))
