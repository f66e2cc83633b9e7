"""A loop of steps with reports, checkpoints and resuming from the last checkpoint."""

import json
import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from nemo_rl_core.checkpoints import stop_request
from nemo_rl_core.checkpoints.manager import BackgroundWriter, CheckpointManager, PendingSave
from nemo_rl_core.checkpoints.written_files import WrittenFile
from nemo_rl_core.config.trainer import KeepBest
from nemo_rl_core.errors import NemoRLError
from nemo_rl_core.produce import StageResult
from nemo_rl_core.store import files
from nemo_rl_core.telemetry.alarms import AlarmWatch
from nemo_rl_core.telemetry.budget import current_budget
from nemo_rl_core.telemetry.events import StageResumed, StageSaved, publish, report
from nemo_rl_core.telemetry.metrics import MetricsFile
from nemo_rl_core.types import StepReport

if TYPE_CHECKING:
    from nemo_rl_core.environments.interfaces import Scorer

logger = logging.getLogger(__name__)
BEST = "keep_best"
"""Key of the best step among the choices of a manifest."""
STOPPED = "stopped"
"""Key of the reason why a callback stopped a run, among the choices of a manifest."""


@dataclass(frozen=True)
class RunSpec:
    """The folders that a run of a trainer reads and writes.

    Attributes:
        train: A data set folder.
        start: The transformers folder with the initial weights.
        work: Folder for checkpoints and metrics; an interrupted run in it is continued.
        validation: A data set folder that is never trained on, or None.
        reference: The transformers folder of the reference policy or teacher, if the algorithm
            has one.
        reference_logprobs: A folder with cached logprobs of `train` under the reference.
        resume: An artifact with a `trainer/` to restore the optimizer from; None for a new one.
        iteration: 1-based iteration of the run; it selects steps, prompts and seeds.
        scorer: Scorer that replaces the environment of the settings.
        reward_model: A sequence classifier's folder, for an environment `reward_model` that names
            no model.
        replay: A folder of recorded rollouts (see `RolloutRecords`) to train on again: no engine
            runs, and nothing is scored or validated.
    """

    train: Path
    start: Path
    work: Path
    validation: Path | None = None
    reference: Path | None = None
    reference_logprobs: Path | None = None
    resume: Path | None = None
    iteration: int = 1
    scorer: "Scorer | None" = None
    reward_model: Path | None = None
    replay: Path | None = None


OnSave = Callable[[int, Path], None]
"""Called with the step and the folder of a save."""


@dataclass(frozen=True)
class StepRange:
    """The steps of one stage, numbered from 1 over the full run, both inclusive."""

    first: int
    last: int


class Checkpointed(Protocol):
    """State that a training loop saves and resumes from: one policy or several models."""

    def save_checkpoint(self, path: Path) -> None:
        """Writes the complete state into an existing empty folder."""
        ...

    def load_checkpoint(self, path: Path) -> None:
        """Restores the saved state; training continues bitwise identically."""
        ...


@runtime_checkable
class SavesInBackground(Checkpointed, BackgroundWriter, Protocol):
    """State that may change while a checkpoint is being written."""


@runtime_checkable
class SavesShards(SavesInBackground, Protocol):
    """State that can be saved without `model/`, only for resuming."""

    def start_sharded_checkpoint(self, path: Path) -> None:
        """Starts a checkpoint like `start_checkpoint`, but without the folder `model/`."""
        ...


@dataclass(frozen=True)
class _ShardsOnly:
    trained: SavesShards

    def start_checkpoint(self, path: Path) -> None:
        self.trained.start_sharded_checkpoint(path)

    def checkpoint_is_written(self) -> bool:
        return self.trained.checkpoint_is_written()

    def finish_checkpoint(self) -> Mapping[str, WrittenFile] | None:
        return self.trained.finish_checkpoint()


@dataclass(frozen=True)
class RunResult:
    """The result of a trainer's run.

    Attributes:
        folder: The work folder, now with `model/`, `trainer/`, `metrics.jsonl` and other files of
            the trainer.
        step: Number of the step that the model is from: the last one or the best.
        num_tokens: Tokens trained on in all steps, including those before a resume.
        peak_memory_gib: Peak memory of the workers, in GiB.
        choices: Values chosen for settings that are `auto`, by their paths in a recipe.
        best: The best step with its metric, as text, if `model/` is from that step.
        stopped: The reason for which a callback stopped the run; empty for a complete run.
    """

    folder: Path
    step: int
    num_tokens: int
    peak_memory_gib: float
    choices: Mapping[str, str] = field(default_factory=dict)
    best: str = ""
    stopped: str = ""

    def made(self, *, summary: str = "", deck: str = "") -> StageResult:
        """Describes the folder as the content of a checkpoint artifact."""
        notes = {BEST: self.best, STOPPED: self.stopped}
        parts = (summary, self.best and f"model of {self.best}", self.stopped)
        return StageResult(
            "checkpoint",
            "hf",
            ", ".join(part for part in parts if part),
            num_tokens=self.num_tokens,
            peak_memory_gib=self.peak_memory_gib,
            choices={**self.choices, **{name: text for name, text in notes.items() if text}},
            step=self.step,
            deck=deck,
        )


class StepLoop:
    """Counts steps, writes metrics, saves regularly, and resumes bitwise identically.

    Args:
        work: Folder of the stage, kept until the stage is done; may contain an earlier attempt.
        stage: Name of the stage in reports.
        steps: The steps to run.
        save_every_num_steps: Number of steps between saves; the last step is always saved.
        keep_latest: Number of checkpoints to keep during the run.
        keep_best: Further checkpoints to keep, and whether the best or the last is the result.
            After the run, `best.json` has the best step; its model is left in `best/` unless it
            is the result or the last.

    Example:
        >>> for step in loop.steps(policy):                              # doctest: +SKIP
        ...     loop.report(step, policy.train(batch, loss), timings)
    """

    def __init__(
        self,
        work: Path,
        *,
        stage: str,
        steps: StepRange,
        save_every_num_steps: int,
        keep_latest: int = 1,
        keep_best: KeepBest | None = None,
    ) -> None:
        self._work = work
        self._stage = stage
        self._range = steps
        self._save_every = save_every_num_steps
        self._checkpoints = CheckpointManager(work / "checkpoints", keep_latest, keep_best)
        self._keep_best = keep_best
        self._warned = False
        self._alarms = AlarmWatch(stage)
        self._pending: PendingSave | None = None
        self._on_save: OnSave | None = None
        self._before_save: Callable[[], None] | None = None
        self._last_metrics: dict[str, float] = {}
        self._stopped = ""
        self._history: list[dict[str, float]] = []
        self._metrics = MetricsFile(work / "metrics.jsonl")
        self._marker = work / "finished.json"
        self._stop_record = work / "stopped.json"

    def steps(
        self,
        trained: Checkpointed,
        *,
        on_save: OnSave | None = None,
        before_save: Callable[[], None] | None = None,
    ) -> Generator[int]:
        """Yields the numbers of the remaining steps; saves after a step's body has run.

        Close it (`contextlib.closing`) if a body may raise, so that a save in progress is
        finished first.

        Args:
            trained: State to save; it is restored from the last save before the first step.
            on_save: Called with the step and the folder of every save; each then has a `model/`.
                Without it, only the last save and those that `keep_best` keeps have one.
            before_save: Writes other files of the steps. It is called before each save, because a
                resumed run does not repeat saved steps and so would never write them.

        Raises:
            KeyboardInterrupt: After a step and its save, if `stop_request.ask` was called.
            ResourceError: After a save, when the run has used its GPU-hours.
        """
        self._on_save, self._before_save = on_save, before_save
        with stop_request.listened_to():
            step = self._resume(trained)
            while step < self._range.last:
                step += 1
                try:
                    yield step
                except GeneratorExit:
                    # The step failed; finish the save from before it.
                    with suppress(NemoRLError):
                        self._advance(wait=True)
                    raise
                self._end_step(step, trained)
            self._advance(wait=True)

    def _end_step(self, step: int, trained: Checkpointed) -> None:
        self._advance(wait=False)
        is_last, budget = step == self._range.last, current_budget()
        is_spent, stops = budget is not None and budget.is_spent, stop_request.is_asked()
        if is_last or stops or is_spent or (step - self._range.first + 1) % self._save_every == 0:
            self._advance(wait=True)
            self._save(step, trained)
        if is_last or not (stops or is_spent):
            return
        self._advance(wait=True)
        if budget is not None and is_spent:
            raise budget.error(step=step)
        raise KeyboardInterrupt

    def _save(self, step: int, trained: Checkpointed) -> None:
        if self._before_save is not None:
            self._before_save()
        metrics = self._last_metrics
        self._warn_without_metric(step)
        if isinstance(trained, SavesInBackground):
            writer = self._writer(step, trained)
            self._pending = self._checkpoints.start(step, writer, metrics=metrics)
            self._advance(wait=False)
        else:
            folder = self._checkpoints.save(step, trained.save_checkpoint, metrics=metrics)
            self._report_saved(step, folder)

    def _warn_without_metric(self, step: int) -> None:
        if self._keep_best is None or self._warned or self._keep_best.metric in self._last_metrics:
            return
        self._warned = True
        logger.warning(
            "step %d is saved without the metric %r of keep_best, so it is never the best; "
            "it has %s",
            step,
            self._keep_best.metric,
            ", ".join(sorted(self._last_metrics)),
        )

    def _writer(self, step: int, trained: SavesInBackground) -> BackgroundWriter:
        """Returns a writer that omits the model if only this loop reads the checkpoint."""
        needs_model = (
            step == self._range.last
            or self._on_save is not None
            or self._checkpoints.would_be_best(step, self._last_metrics)
        )
        if needs_model or not isinstance(trained, SavesShards):
            return trained
        return _ShardsOnly(trained)

    def _advance(self, *, wait: bool) -> None:
        """Completes a pending save if it is written; waits for it if `wait` is set."""
        save = self._pending
        if save is None:
            return
        if wait:
            save.wait()
        elif not save.poll():
            return
        self._pending = None
        self._report_saved(save.step, save.folder)

    def _report_saved(self, step: int, folder: Path) -> None:
        publish(StageSaved(step))
        if self._on_save is not None:
            self._on_save(step, folder)

    def _resume(self, trained: Checkpointed) -> int:
        latest = self._checkpoints.latest(verify=True)
        done = latest[0] if latest else self._range.first - 1
        if latest:
            trained.load_checkpoint(latest[1])
            publish(StageResumed(done))
        self._metrics.truncate_after(done - self._range.first + 1)
        self._history = [line.metrics for line in self._metrics.read()]
        stop = self._recorded_stop()
        if stop and stop["step"] == done:
            self._stop_at(done, stop["reason"])
        else:
            self._stop_record.unlink(missing_ok=True)
        return done

    @property
    def history(self) -> Sequence[Mapping[str, float]]:
        """Metrics of all steps so far, including those before a resume."""
        return self._history

    @property
    def last(self) -> int:
        """Number of the last step."""
        return self._range.last

    def stop(self, step: int, reason: str) -> None:
        """Makes the current step the last one, also for a resumed run."""
        record = {"step": step, "reason": reason}
        files.write_atomic(self._stop_record, json.dumps(record))
        self._stop_at(step, reason)

    def _stop_at(self, step: int, reason: str) -> None:
        planned = self._range.last - self._range.first + 1
        taken = step - self._range.first + 1
        self._stopped = f"stopped at step {taken} of {planned}: {reason}"
        self._range = StepRange(self._range.first, step)

    def _recorded_stop(self) -> dict[str, Any]:
        record = self._stop_record
        values: dict[str, Any] = json.loads(record.read_text()) if record.exists() else {}
        return values

    def report(self, step: int, metrics: dict[str, float], timings: dict[str, float]) -> None:
        """Records a step and shows it.

        Args:
            step: Number of the step in the full run.
            metrics: Values that are equal in every rerun; `num_valid_tokens`, if present, counts
                the tokens trained on.
            timings: Seconds of the step's phases; tokens per second are added.
        """
        rate = metrics.get("num_valid_tokens", 0.0) / max(sum(timings.values()), 1e-9)
        line = StepReport(
            stage=self._stage,
            step=step - self._range.first + 1,
            num_steps=self._range.last - self._range.first + 1,
            metrics={"global_step": float(step), **metrics},
            timings={**timings, "tokens_per_second": rate},
        )
        self._metrics.append(line)
        self._last_metrics = metrics
        self._history.append(line.metrics)
        report(line)
        self._alarms.step(step, metrics)

    @property
    def is_finished(self) -> bool:
        """Whether all steps are done, so that only `finish` remains."""
        return self._marker.exists()

    def finish(
        self, *, peak_memory_gib: float = 0.0, choices: Mapping[str, str] | None = None
    ) -> RunResult:
        """Moves the last checkpoint to its path in the artifact; continues an interrupted move.

        Arguments are ignored if an earlier call recorded them.
        """
        stop = self._recorded_stop()
        if stop and not self._stopped:  # an earlier process did all steps
            self._stop_at(stop["step"], stop["reason"])
        if not self.is_finished:
            outcome = {"peak_memory_gib": peak_memory_gib, "choices": dict(choices or {})}
            files.write_atomic(self._marker, json.dumps(outcome))
        best = self._best_step()
        returns_best = best is not None and self._returns_best
        step = best if best is not None and returns_best else self._range.last
        if best is not None and best != self._range.last and not returns_best:
            self._leave_model(best)
        checkpoint = self._checkpoints.path(step)
        parts = [part for part in checkpoint.glob("*") if part.is_dir()]  # none: moved already
        for part in parts:
            part.rename(self._work / part.name)
        files.discard(self._checkpoints.root)
        lines = self._metrics.read()
        outcome = json.loads(self._marker.read_text())
        return RunResult(
            folder=self._work,
            step=step,
            num_tokens=int(sum(line.metrics.get("num_valid_tokens", 0.0) for line in lines)),
            peak_memory_gib=outcome["peak_memory_gib"],
            choices=outcome.get("choices", {}),  # earlier versions wrote none
            stopped=self._stopped,
            best=self._described(step, lines) if returns_best else "",
        )

    @property
    def _returns_best(self) -> bool:
        return self._keep_best is not None and self._keep_best.result == "best"

    def _best_step(self) -> int | None:
        """Returns the best step with a model; None without `keep_best` or its metric."""
        if self._keep_best is None:
            return None
        record = self._work / "best.json"
        if not record.exists():  # nothing is moved yet; afterwards no checkpoint is complete
            best = self._checkpoints.best()
            # A best step without a model was not the best when saved; the better ones are damaged.
            step = best[0] if best and (best[1] / "model").is_dir() else None
            files.write_atomic(record, json.dumps({"step": step}))
        best_step: int | None = json.loads(record.read_text())["step"]
        return best_step

    def _leave_model(self, step: int) -> None:
        target = self._work / "best"
        if not target.exists():
            (self._checkpoints.path(step) / "model").rename(target)

    def _described(self, step: int, lines: Sequence[StepReport]) -> str:
        assert self._keep_best is not None
        metric = self._keep_best.metric
        (value,) = [line.metrics[metric] for line in lines if line.metrics["global_step"] == step]
        return f"step {step} of {self._range.last}, {metric} {value:.6g}"
