"""The record of a training started from Python: an execution with its stages as nodes.

`tasks.local_run.run` records the runs of pipelines. A call of `fit` within a stage of a pipeline is
part of that run and has no separate record.
"""

import hashlib
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import cloudpickle

from nemo_rl_core.config.tracking import TrackingConfig
from nemo_rl_core.errors import NemoRLError, StoreError
from nemo_rl_core.history.inserts import as_value
from nemo_rl_core.history.records import State, Value
from nemo_rl_core.history.writer import HistoryWriter, NewExecution, NodeEnd
from nemo_rl_core.produce import StageInputs, StageResult, produce
from nemo_rl_core.store.git import git_state
from nemo_rl_core.store.manifest import Cost, Manifest, package_versions
from nemo_rl_core.store.store import Store
from nemo_rl_core.telemetry import usage
from nemo_rl_core.telemetry.console import program, short_path
from nemo_rl_core.telemetry.events import (
    ArtifactMade,
    Event,
    MachineSample,
    StageRecord,
    StageResumed,
    StageStarted,
    publish,
    subscribe,
)
from nemo_rl_core.telemetry.python_output import in_notebook, program_output
from nemo_rl_core.telemetry.run_log import RunLog, is_logging
from nemo_rl_core.telemetry.tracking import tracked
from nemo_rl_core.trainers.loop import STOPPED
from nemo_rl_core.types import StepReport

_MAX_ERROR_CHARACTERS = 4000
_REWARD = "reward_fn.pickle"
"""Name of the file with the pickled reward, in the run's folder."""
REWARD_DIGEST = "reward_sha256"
"""Name of the execution's input with the digest of that file."""


@dataclass(frozen=True)
class FitCall:
    """The arguments of a call of `fit`, for the record.

    Attributes:
        trainer: `module:Class` of the trainer.
        inputs: The arguments as JSON values.
        source: Digest of the trainer's source.
        reward: The arguments `reward_fn` and `reward_weights`; None for neither.
        unrepeatable: Reasons why another process cannot repeat the run, as sentences.
    """

    trainer: str
    inputs: Mapping[str, Any]
    name: str = ""
    source: str = ""
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    reward: tuple[Any, Any] | None = None
    unrepeatable: tuple[str, ...] = ()


class UnrecordedStages:
    """Runs stages without recording them."""

    def produce(self, inputs: StageInputs, work: Callable[[Path], StageResult]) -> Path:
        """Runs a stage."""
        return produce(inputs, work)


class RecordedStages(UnrecordedStages):
    """Runs stages and records them as nodes of an execution.

    Args:
        writer: Writer of the execution's record.
        log_path: The run's log; its length before and after a node marks the node's part.
        module: Module of the trainer.

    Attributes:
        records: Records of the finished stages.
        stopped_at: Step and stage in which the run failed or was stopped; empty before.
        stopped: Reason why a callback stopped the run; empty for a complete run.
    """

    def __init__(self, writer: HistoryWriter, log_path: Path, module: str) -> None:
        self.records: list[StageRecord] = []
        self.stopped_at = ""
        self.stopped = ""
        self._writer, self._log_path, self._module = writer, log_path, module
        self._node: int | None = None
        self._step = ""
        self._num_tokens = 0
        self._is_resumed = False
        self._makers: dict[Path, int | None] = {}
        self._made: set[Path] = set()

    def produce(self, inputs: StageInputs, work: Callable[[Path], StageResult]) -> Path:
        """Runs a stage as a node of the execution."""
        name, self._step = f"{inputs.stage} {inputs.part}".strip(), ""
        self._num_tokens, self._is_resumed = 0, False
        node = self._begin(name, inputs)
        publish(StageStarted(name))
        began = time.monotonic()
        try:
            with usage.measured() as spent:
                artifact = produce(inputs, work)
        except BaseException as error:
            cost = _cost_so_far(spent, wall_seconds=time.monotonic() - began)
            self._fail(node, name, error, cost)
            raise
        finally:
            self._node = None
        self._end(node, name, artifact, seconds=time.monotonic() - began)
        return artifact

    def closing_lines(self) -> list[str]:
        """Returns the path of the last artifact's model and the command that shows its lineage."""
        artifact = next(reversed(self._makers), None)
        if artifact is None:
            return []
        model = (
            [f"model: {short_path(artifact / 'model')}"] if (artifact / "model").is_dir() else []
        )
        return [*model, f"lineage: {program()} lineage {artifact.name}"]

    def listen(self, event: Event) -> None:
        """Records steps, resumes, new artifacts and the machine's load."""
        match event:
            case StepReport(metrics=metrics):
                self._writer.log_step(self._node, event)
                self._step = f"step {event.step} of {event.num_steps}"
                self._num_tokens += int(metrics.get("num_valid_tokens", 0))
            case MachineSample(second, figures):
                machine_metrics = {f"machine/{name}": value for name, value in figures.items()}
                self._writer.log_metrics(self._node, second, machine_metrics)
            case StageResumed(step):
                self._writer.resumed(self._node, step)
                self._is_resumed = True
            case ArtifactMade(folder):
                self._made.add(folder)

    def _begin(self, name: str, inputs: StageInputs) -> int | None:
        values = [as_value("config", "config", inputs.settings)]
        values += [_artifact_value(role, folder) for role, folder in inputs.parents.items()]
        self._node = node = self._writer.begin_node(
            name,
            task=f"{self._module}.{inputs.stage}",
            kind="task",
            inputs=values,
            log_from=self._log_bytes(),
        )
        for role, folder in inputs.parents.items():
            self._writer.connect(self._makers.get(folder), "artifact", node, role)
        return node

    def _fail(self, node: int | None, name: str, error: BaseException, cost: Cost) -> None:
        self.stopped_at = f"{self._step} of {name}" if self._step else name
        end = NodeEnd(
            end_state(error),
            error=self.error_text(error),
            cost=cost.model_dump(),
            log_to=self._log_bytes(),
        )
        self._writer.end_node(node, end)
        state: Literal["failed", "stopped"] = (
            "stopped" if end_state(error) == "stopped" else "failed"
        )
        self._tell(StageRecord(name, state, cost.wall_seconds, cost=cost))

    def error_text(self, error: BaseException) -> str:
        """Returns the text to record for an error, or the step at which the run was stopped."""
        if isinstance(error, KeyboardInterrupt):
            return f"stopped from outside at {self.stopped_at or 'its start'}"
        text = str(error) if isinstance(error, NemoRLError) else f"{type(error).__name__}: {error}"
        return text[:_MAX_ERROR_CHARACTERS]

    def _end(self, node: int | None, name: str, artifact: Path, *, seconds: float) -> None:
        manifest, is_new = Manifest.read(artifact), artifact in self._made
        cost = manifest.cost if is_new else Cost()
        if is_new and self._is_resumed:  # the other costs cover only this attempt
            cost = cost.model_copy(update={"tokens": self._num_tokens})
        summary, deck = (artifact / "summary.txt").read_text(), artifact / "deck.html"
        self._makers[artifact] = node
        self.stopped = manifest.choices.get(STOPPED, "")
        self._writer.end_node(
            node,
            NodeEnd(
                "succeeded" if is_new else "cached",
                outputs=[_artifact_value("artifact", artifact)],
                made=[(artifact, manifest)],
                deck_path=str(deck) if deck.is_file() and deck.stat().st_size else "",
                cost=cost.model_dump(),
                summary=summary,
                log_to=self._log_bytes(),
            ),
        )
        self._tell(
            StageRecord(
                name,
                "ran" if is_new else "cached",
                seconds,
                tokens=cost.tokens,
                peak_memory_gib=cost.peak_memory_gib,
                note=summary,
                cost=cost,
            )
        )

    def _tell(self, record: StageRecord) -> None:
        self.records.append(record)
        publish(record)

    def _log_bytes(self) -> int | None:
        try:
            return self._log_path.stat().st_size
        except OSError:
            return None


@contextmanager
def recorded_fit(call: FitCall) -> Iterator[UnrecordedStages]:
    """Records its body as a run, with log, nodes, progress and trackers."""
    if is_logging() or "FLYTE_INTERNAL_EXECUTION_ID" in os.environ:
        yield UnrecordedStages()
        return
    store = Store.default()
    store.check_writable()
    with ExitStack() as stack:
        log = stack.enter_context(RunLog.start(store))
        output = stack.enter_context(program_output(log.path))
        writer = HistoryWriter(store, log.folder.name)
        reward_record = _keep_reward(call.reward, log.folder)
        reward_record["unrepeatable"] = [*call.unrepeatable, *reward_record["unrepeatable"]]
        writer.begin(_execution(call, reward_record, log.path))
        stages = RecordedStages(writer, log.path, call.trainer.partition(":")[0])
        stack.callback(subscribe(stages.listen))
        stack.enter_context(tracked(call.tracking, log.folder.name))
        try:
            yield stages
        except BaseException as error:
            log.trace(error)
            writer.end(end_state(error), stages.error_text(error))
            for line in _how_to_continue(error, stages, call.name):
                error.add_note(line)
            error.add_note(f"log: {log.path}")
            raise
        writer.end("stopped" if stages.stopped else "succeeded", stages.stopped)
        lines = [f"log: {short_path(log.path)}", f"page: {program()} ui"]
        output.closing(stages.records, [*stages.closing_lines(), *lines])


def end_state(error: BaseException) -> State:
    """The state of a run or a stage that an error ended."""
    if isinstance(error, Exception):
        return "failed"
    return "stopped" if isinstance(error, KeyboardInterrupt) else "aborted"


def _how_to_continue(error: BaseException, stages: RecordedStages, name: str) -> list[str]:
    if not isinstance(error, KeyboardInterrupt):
        return []
    hint = (
        f"the same call resumes from its last save (name={name!r})"
        if name
        else "a run with a name can resume from its last save: name=..."
    )
    return [stages.error_text(error), hint]


def _cost_so_far(spent: usage.Spent, *, wall_seconds: float) -> Cost:
    return Cost(
        wall_seconds=round(wall_seconds, 3),
        cpu_seconds=round(spent.cpu_seconds, 3),
        tokens=spent.trained_tokens or spent.generated_tokens,
        generated_tokens=spent.generated_tokens,
        trained_tokens=spent.trained_tokens,
        flops=spent.flops,
    )


def refuse_changed_reward(folder: Path, digest: str) -> None:
    """Refuses a changed reward file before it is unpickled.

    `digest` is the SHA-256 of the file from the run's signed record; empty for no reward.
    """
    file = folder / _REWARD
    if not file.is_file():
        return
    actual = hashlib.sha256(file.read_bytes()).hexdigest()
    if actual != digest:
        raise StoreError(
            f"the reward of the run {folder.name} is not the file that the run wrote",
            expected=f"{file} with the SHA-256 {digest}" if digest else f"no {file}",
            got=actual,
            fix="restore the file from a copy of the store, or run the script again",
        )


def read_reward(folder: Path) -> tuple[Any, Any] | None:
    """Reads the `reward_fn` and `reward_weights` of a recorded run; None without any.

    Unpickling runs code from the file: call `refuse_changed_reward` first.
    """
    file = folder / _REWARD
    if not file.is_file():
        return None
    try:
        reward_fn, weights = pickle.loads(file.read_bytes())  # noqa: S301 (of a signed record)
    # Broad on purpose: a pickle imports what it names, which may raise anything.
    except Exception as error:
        raise StoreError(
            f"the reward of the run {folder.name} cannot be read",
            expected=f"the modules that {file} names, importable from {Path.cwd()}",
            got=f"{type(error).__name__}: {error}",
            fix="restore the module of the reward function",
        ) from error
    return reward_fn, weights


def _keep_reward(reward: tuple[Any, Any] | None, folder: Path) -> dict[str, Any]:
    """Stores the reward for a repetition; returns its digest, or why it cannot be stored."""
    if reward is None:
        return {"unrepeatable": []}
    try:
        pickled = cloudpickle.dumps(reward)
        (folder / _REWARD).write_bytes(pickled)
    # Broad on purpose: a user's object may refuse to be pickled, with any error.
    except Exception as error:  # noqa: BLE001
        why = f"reward_fn cannot be kept ({type(error).__name__}: {str(error)[:200]})"
        return {"unrepeatable": [why]}
    return {"unrepeatable": [], REWARD_DIGEST: hashlib.sha256(pickled).hexdigest()}


def _execution(call: FitCall, reward_record: dict[str, Any], log_path: Path) -> NewExecution:
    commit, dirty = git_state(Path(__file__).parent)
    module, _, name = call.trainer.partition(":")
    return NewExecution(
        workflow=f"{module}.{name}",
        recipe=call.name,
        command=["notebook"] if in_notebook() else ["python", *sys.argv],
        inputs={"trainer": call.trainer, **call.inputs, **reward_record},
        log_path=log_path,
        git_commit=commit,
        git_dirty=dirty,
        packages=package_versions(),
        source_digest=call.source,
    )


def _artifact_value(name: str, folder: Path) -> Value:
    manifest = Manifest.read(folder)
    shown = {"directory": {"path": str(folder)}, "stage": manifest.stage}
    return as_value(name, manifest.kind, shown, manifest.name or folder.name)
