"""Materialization of artifacts, each with a folder, a lock and a manifest."""

import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from nemo_rl_core.checkpoints import model_code
from nemo_rl_core.config.cluster import ClusterConfig
from nemo_rl_core.config.environment import EnvironmentConfig, dedicated_bundles_of_scorers
from nemo_rl_core.config.placement import DedicatedBundles
from nemo_rl_core.store.ancestry import write_ancestors
from nemo_rl_core.store.files import discard, hash_file
from nemo_rl_core.store.git import git_state
from nemo_rl_core.store.machine import Machine, process_numerics
from nemo_rl_core.store.manifest import (
    Cost,
    Manifest,
    StageRun,
    config_hash,
    package_versions,
    write_digests,
)
from nemo_rl_core.store.reads import Reads, add_to_record, is_current, write_record
from nemo_rl_core.store.store import (
    HashOfFile,
    Store,
    artifact_name,
    content_digests,
    hash_content,
    hash_weights,
    refuse_damaged,
    set_aside_damaged,
)
from nemo_rl_core.store.watching import watching
from nemo_rl_core.telemetry import usage
from nemo_rl_core.telemetry.budget import stage_budget
from nemo_rl_core.telemetry.cost import Prices, gpu_name, model_flops_utilization
from nemo_rl_core.telemetry.curves import completions_html
from nemo_rl_core.telemetry.events import ArtifactMade, Event, StageSaved, publish, subscribe
from nemo_rl_core.telemetry.waiting import waiting_for_hashes

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StageResult:
    """The result of a stage's work, whose files are in its folder.

    Attributes:
        step: Training step of the artifact; 0 before training.
        deck: HTML for Flyte's deck, and for `deck.html` in the artifact.
        choices: Values that `auto` settings had on this machine, for the manifest.
    """

    kind: str
    format: str
    summary: str = ""
    num_tokens: int = 0
    peak_memory_gib: float = 0.0
    step: int = 0
    deck: str = ""
    figures: dict[str, float] = field(default_factory=dict)
    choices: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class StageInputs:
    """The inputs of a stage, which determine its artifact and its key.

    Attributes:
        settings: The fields that the stage reads, as JSON.
        part: Name of one of several artifacts of the stage, or the iteration.
        numerics_version: Version that the stage declares. The key depends on it through the source.
        code: Modules and files of user code that the stage runs in addition to those named in the
            settings. The key covers their source, and their reads are recorded.
    """

    stage: str
    settings: dict[str, Any]
    parents: dict[str, Path] = field(default_factory=dict)
    source: str = ""
    part: str = ""
    numerics_version: int = 1
    code: frozenset[str] = frozenset()

    @property
    def user_code(self) -> set[str]:
        """Modules and files of user code that the stage runs, as far as known."""
        return {*self.code, *_modules_named(self.settings)}

    @property
    def key(self) -> str:
        """Key of the inputs, 32 hex digits."""
        hashes = {role: Manifest.read(path).content_hash for role, path in self.parents.items()}
        fields = {"config": self.settings, "parents": hashes, "part": self.part}
        return config_hash({**fields, "source": self.source})[:32]


class NotMade(BaseException):
    """A dry run has reached a stage whose artifact does not exist.

    Not an `Exception`, since handlers of failed stages must not catch it.
    """

    def __init__(self, inputs: StageInputs) -> None:
        super().__init__(f"{inputs.stage} {inputs.part}".strip())
        self.inputs = inputs


_SHOWN_SECONDS = 0.05
"""Shorter times are left out of a deck, where they would appear as 0.0."""

_is_dry_run: ContextVar[bool] = ContextVar("is_dry_run", default=False)


@contextmanager
def dry_run() -> Iterator[None]:
    """Makes `produce` return existing artifacts and raise `NotMade` for all others."""
    token = _is_dry_run.set(True)
    try:
        yield
    finally:
        _is_dry_run.reset(token)


def is_dry_run() -> bool:
    """Whether a `dry_run` is active."""
    return _is_dry_run.get()


def produce(
    inputs: StageInputs,
    work: Callable[[Path], StageResult],
    *,
    run: StageRun | None = None,
    hash_of: HashOfFile = hash_file,
) -> Path:
    """Runs the work in a folder of the store and publishes the folder as an artifact.

    Resumes a killed attempt. If two processes make the same artifact, the second returns the result
    of the first. A damaged artifact is set aside and made again.

    Args:
        run: On a cluster, the run of the stage. An artifact of another execution is made again
            unless a process uses it: only Flyte decides what is reused.

    Raises:
        StoreError: If a parent is damaged, or the disk refuses.
        NotMade: In a `dry_run`, if there is no such artifact.
    """
    store, stage = Store.default(), inputs.stage
    for parent in inputs.parents.values():
        store.hold(parent)  # it may be of an earlier run, whose artifacts no process locks
        with waiting_for_hashes(f"checking {parent.name}"):
            refuse_damaged(store, parent)
    key = inputs.key
    if is_dry_run():
        artifact = store.published(stage, key)
        if artifact is None or set_aside_damaged(store, artifact):
            raise NotMade(inputs)
        return artifact
    with store.work_folder(stage, key) as folder:
        if run is not None:
            # Flyte's catalogue decides what is reused. With --overwrite-cache, an artifact that an
            # earlier execution left on the volume must not be returned.
            store.discard_published(
                stage, key, is_unwanted=functools.partial(_is_from_another_run, run)
            )
        artifact = store.published(stage, key)
        if artifact is not None and not set_aside_damaged(store, artifact):
            return artifact
        if changed := store.changed_inputs(stage, key):
            logger.warning("%s runs again: %s has changed", stage, ", ".join(changed))
        for parent in inputs.parents.values():
            model_code.allow(Manifest.read(parent).model_code, called=parent.name)
        start = time.monotonic()
        limited = stage_budget(_num_gpus(inputs), inputs.parents.values(), run)
        with _recorded_reads(store, folder, inputs) as reads, limited, usage.measured() as spent:
            made = work(folder)
        cost = _cost(inputs, made, spent, wall_seconds=time.monotonic() - start)
        hash_of = functools.cache(hash_of)  # the content includes the weights
        manifest = _manifest(inputs, made, folder, cost, run, hash_of)
        manifest = manifest.model_copy(update={"machine": _machine(inputs, spent)})
        # The key is part of the name: equal content from other inputs has other parents.
        digest = config_hash({"content": manifest.content_hash, "key": key})
        name = artifact_name(stage, digest)
        manifest.model_copy(update={"name": name}).write(folder)
        write_ancestors(folder, inputs.parents.values())
        write_digests(folder, content_digests(folder, hash_of))
        (folder / "deck.html").write_text(made.deck + cost_html(cost))
        (folder / "summary.txt").write_text(made.summary)
        # An artifact may exist without the record that `published` reads.
        set_aside_damaged(store, store.artifacts / name)
        add_to_record(store.reads / f"{name}.json", reads)
        artifact = store.publish(folder, stage=stage, content_hash=digest)
        publish(ArtifactMade(artifact))
        return artifact


@contextmanager
def _recorded_reads(store: Store, folder: Path, inputs: StageInputs) -> Iterator[Reads]:
    """Yields the reads of user code in the block, which are filled in on a clean exit.

    Also records the reads at every save: work that is based on other inputs is discarded.
    """
    record = store.reads / f"{folder.name}.json"
    if not is_current(record):
        logger.warning("%s starts from the beginning: its inputs have changed", inputs.stage)
        discard(folder)
        folder.mkdir()
    reads: Reads = {}
    with watching(inputs.user_code) as watch:

        def record_save(event: Event) -> None:
            if isinstance(event, StageSaved) and (current := watch.reads()):
                write_record(record, [current])

        unsubscribe = subscribe(record_save)
        try:
            yield reads
        finally:
            unsubscribe()
        reads.update(watch.reads())
    record.unlink(missing_ok=True)


def _modules_named(settings: Any) -> Iterator[str]:
    if isinstance(settings, Mapping):
        for name, value in settings.items():
            if name in ("target", "module") and isinstance(value, str):
                yield value.partition(":")[0]
            yield from _modules_named(value)
    elif isinstance(settings, list):
        for each in settings:
            yield from _modules_named(each)


def _is_from_another_run(run: StageRun, manifest: Manifest) -> bool:
    return manifest.run is not None and manifest.run.execution != run.execution


def _cost(
    inputs: StageInputs, made: StageResult, spent: usage.Spent, *, wall_seconds: float
) -> Cost:
    num_gpus = _num_gpus(inputs)
    # The workers report their GPU, because this process often has none.
    device = (spent.device or gpu_name()) if num_gpus else ""
    seconds: dict[str, Any] = {
        "cpu_seconds": round(spent.cpu_seconds, 3),
        "gpu_seconds": round(num_gpus * wall_seconds, 3),
    }
    prices = Prices.from_environment()
    return Cost(
        wall_seconds=round(wall_seconds, 3),
        tokens=made.num_tokens,
        generated_tokens=spent.generated_tokens,
        trained_tokens=spent.trained_tokens,
        flops=spent.flops,
        mfu=model_flops_utilization(
            spent.flops,
            gpu_seconds=seconds["gpu_seconds"],
            device=device,
            dtype=str(inputs.settings.get("dtype", "")),
        ),
        device=device,
        peak_memory_gib=round(made.peak_memory_gib, 3),
        peak_gpu_gib=round(spent.peak_gpu_gib, 3),
        peak_engine_gpu_gib=round(spent.peak_engine_gpu_gib, 3),
        money=prices.total(**seconds, device=device) if prices else None,
        currency=prices.currency if prices else "",
        **seconds,
    )


def _cluster(inputs: StageInputs) -> ClusterConfig | None:
    cluster = inputs.settings.get("cluster")
    return ClusterConfig.model_validate(cluster) if cluster else None


def _num_gpus(inputs: StageInputs) -> int:
    cluster = _cluster(inputs)
    if cluster is None or not cluster.num_gpus:
        return 0
    placement = (inputs.settings.get("generation") or {}).get("placement")
    engine_gpus = int(placement["own"]) if isinstance(placement, dict) else 0
    scorers: Sequence[DedicatedBundles] = ()
    if section := inputs.settings.get("environment"):
        environment: EnvironmentConfig = TypeAdapter(EnvironmentConfig).validate_python(section)
        scorers = dedicated_bundles_of_scorers(environment)
    return cluster.num_gpus_with(scorers) + engine_gpus


def cost_html(cost: Cost) -> str:
    """Formats the cost of a stage as a small table for its deck; empty without a cost to show."""
    shown = {
        "wall seconds": f"{cost.wall_seconds:.1f}" if cost.wall_seconds >= _SHOWN_SECONDS else "",
        "CPU seconds": f"{cost.cpu_seconds:.1f}" if cost.cpu_seconds >= _SHOWN_SECONDS else "",
        "GPU seconds": f"{cost.gpu_seconds:.1f}" if cost.gpu_seconds else "",
        "generated tokens": f"{cost.generated_tokens:,}" if cost.generated_tokens else "",
        "trained tokens": f"{cost.trained_tokens:,}" if cost.trained_tokens else "",
        "TFLOPs": f"{cost.flops / 1e12:.3g}" if cost.flops else "",
        "MFU": f"{100 * cost.mfu:.1f} %" if cost.mfu is not None else "",
        "peak GiB": f"{cost.peak_memory_gib:.2f}" if cost.peak_memory_gib else "",
        "peak GiB of a GPU": f"{cost.peak_gpu_gib:.2f}" if cost.peak_gpu_gib else "",
        "peak GiB of an engine's GPU": (
            f"{cost.peak_engine_gpu_gib:.2f}" if cost.peak_engine_gpu_gib else ""
        ),
        "money": f"{cost.money:.4f} {cost.currency}" if cost.money is not None else "",
    }
    row = {name: value for name, value in shown.items() if value}
    return completions_html([row]) if row else ""


def _manifest(
    inputs: StageInputs,
    made: StageResult,
    folder: Path,
    cost: Cost,
    run: StageRun | None,
    hash_of: HashOfFile,
) -> Manifest:
    commit, dirty = git_state(Path(__file__).parent)
    with waiting_for_hashes(f"hashing the result of {inputs.stage}"):
        content_hash = hash_content(folder, hash_of)
        weights_hash = hash_weights(folder, hash_of)
    model = folder / "model"
    return Manifest(
        kind=made.kind,
        format=made.format,
        stage=f"{inputs.stage} {inputs.part}".strip(),
        content_hash=content_hash,
        weights_hash=weights_hash,
        step=made.step,
        config_hash=config_hash(inputs.settings),
        config=inputs.settings,
        seed=inputs.settings.get("seed"),
        git_commit=commit,
        git_dirty=dirty,
        source_digest=inputs.source,
        numerics_version=inputs.numerics_version,
        packages=package_versions(),
        parents=tuple(Manifest.read(path).ref(path, role) for role, path in inputs.parents.items()),
        cost=cost,
        figures=made.figures,
        choices=dict(made.choices),
        model_code=model_code.code_files(model if model.is_dir() else folder),
        run=run,
    )


def _machine(inputs: StageInputs, spent: usage.Spent) -> Machine:
    cluster, numerics = _cluster(inputs), process_numerics()
    machine = Machine.current(cluster.num_threads if cluster else None)
    return machine.with_processes(spent.processes or ({"stage": numerics} if numerics else {}))
