"""A loop of steps that is reported, saved, and resumed where the last save left off."""

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
"""Key of the reason for which a callback stopped a run, among the choices of a manifest."""


@dataclass(frozen=True)
class RunSpec:
    """The folders that a run of a trainer reads and writes.

    Attributes:
        train: A data set folder.
        start: The transformers folder whose weights training begins with.
        work: Where checkpoints and metrics go; an interrupted run in it is continued.
        validation: A data set folder that is never trained on, or None.
        reference: The transformers folder of the reference policy or of a teacher, where the
            algorithm has such.
        reference_logprobs: A folder of the reference's logprobs of `train`, where they are cached.
        resume: An artifact whose `trainer/` the optimizer goes on from, or None for a new one.
        iteration: 1-based; which steps, prompts and seeds are next in a run of several iterations.
        scorer: Scores completions in place of the environment that the settings name.
        reward_model: A sequence classifier's folder, for an environment `reward_model` that names
            no model.
        replay: A folder of rollouts of each step (see `RolloutRecords`), which are trained on
            again in place of new ones: no engine runs, and nothing is scored or validated.
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
    """The steps of one stage, counted over the whole run.

    Attributes:
        first: 1-based number of the first step.
        last: Number of the last step, inclusive.
    """

    first: int
    last: int


class Checkpointed(Protocol):
    """What a loop saves and goes on from: a policy, or several models at once."""

    def save_checkpoint(self, path: Path) -> None:
        """Writes everything that the next step depends on into an existing empty folder."""
        ...

    def load_checkpoint(self, path: Path) -> None:
        """Goes on from there, to the bit."""
        ...


@runtime_checkable
class SavesInBackground(Checkpointed, BackgroundWriter, Protocol):
    """What need not stand still while it is saved."""


@runtime_checkable
class SavesShards(SavesInBackground, Protocol):
    """What can be saved without a whole model, for nothing but to go on from there."""

    def start_sharded_checkpoint(self, path: Path) -> None:
        """As `start_checkpoint`, without the folder `model/`."""
        ...


@dataclass(frozen=True)
class _ShardsAlone:
    """A writer of checkpoints that have no `model/`."""

    trained: SavesShards

    def start_checkpoint(self, path: Path) -> None:
        self.trained.start_sharded_checkpoint(path)

    def checkpoint_is_written(self) -> bool:
        return self.trained.checkpoint_is_written()

    def finish_checkpoint(self) -> Mapping[str, WrittenFile] | None:
        return self.trained.finish_checkpoint()


@dataclass(frozen=True)
class RunResult:
    """What a run of a trainer leaves.

    Attributes:
        folder: The work folder, now with `model/`, `trainer/`, `metrics.jsonl`, and what else the
            trainer wrote.
        step: Number of the step whose model it is: the last one, or the best.
        num_tokens: Tokens trained on in all steps, also those before a resume.
        peak_memory_gib: The most memory that the workers have held.
        choices: What settings that may be `auto` were, by their paths in a recipe.
        best: The best step with its metric, as text, where `model/` is the model of that step.
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
        """The folder as the content of a checkpoint artifact.

        Args:
            summary: One line for the table at the end of a run.
            deck: HTML for Flyte's deck.
        """
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
    """Counts steps, writes metrics, saves every so often, and resumes to the bit.

    Args:
        work: Folder of the stage, kept until the stage is done; may hold an earlier attempt.
        stage: Name for reports.
        steps: Which steps to run.
        save_every_num_steps: How often to save; the last step is always saved.
        keep_latest: How many checkpoints to keep while the run is under way.
        keep_best: Which to keep besides, and whether the best or the last is the result. Of a
            finished run `best.json` has the best step; its model is left in `best/` unless it is
            the result or the last.

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
        self._pending: PendingSave | None = None
        self._all_have_models = False
        self._before_save: Callable[[], None] = _nothing_else
        self._last_metrics: dict[str, float] = {}
        self._stopped = ""
        self._history: list[dict[str, float]] = []
        self._metrics = MetricsFile(work / "metrics.jsonl")

    def steps(
        self,
        trained: Checkpointed,
        *,
        on_save: OnSave | None = None,
        before_save: Callable[[], None] | None = None,
    ) -> Generator[int]:
        """Numbers of the steps left to do; saves after a step's body has run.

        To be closed (`contextlib.closing`) where a body may raise, so that a save that is being
        written is finished first.

        Args:
            trained: What is saved, and resumed from the last save before the first step.
            on_save: Told the step and the folder of every save; each then has a `model/`. Without
                it, only the last save has one, and those that `keep_best` keeps.
            before_save: Writes what else a step leaves. A run that goes on from a save does not do
                its steps again, and so would never write it.

        Raises:
            KeyboardInterrupt: After a step and its save, where `stop_request.ask` was called.
            ResourceError: After a save, when the run has used its GPU-hours.
        """
        call = on_save or _ignore
        self._all_have_models = on_save is not None
        self._before_save = before_save or _nothing_else
        with stop_request.listened_to():
            step = self._resume(trained)
            while step < self._range.last:
                step += 1
                try:
                    yield step
                except GeneratorExit:
                    # The step has failed; what was saved before it must not be lost with it.
                    with suppress(NemoRLError):
                        self._advance(call, wait=True)
                    raise
                self._end_step(step, trained, call)
            self._advance(call, wait=True)

    def _end_step(self, step: int, trained: Checkpointed, call: OnSave) -> None:
        self._advance(call, wait=False)
        is_last, budget = step == self._range.last, current_budget()
        is_spent, stops = budget is not None and budget.is_spent, stop_request.is_asked()
        if is_last or stops or is_spent or (step - self._range.first + 1) % self._save_every == 0:
            self._advance(call, wait=True)
            self._save(step, trained, call)
        if is_last or not (stops or is_spent):
            return
        self._advance(call, wait=True)
        if budget is not None and is_spent:
            raise budget.error(step=step)
        raise KeyboardInterrupt

    def _save(self, step: int, trained: Checkpointed, on_save: OnSave) -> None:
        self._before_save()
        metrics = self._last_metrics
        self._warn_without_metric(step)
        if isinstance(trained, SavesInBackground):
            writer = self._writer(step, trained)
            self._pending = self._checkpoints.start(step, writer, metrics=metrics)
            self._advance(on_save, wait=False)
        else:
            folder = self._checkpoints.save(step, trained.save_checkpoint, metrics=metrics)
            publish(StageSaved(step))
            on_save(step, folder)

    def _warn_without_metric(self, step: int) -> None:
        """Says once that a checkpoint lacks the metric that compares checkpoints."""
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
        """Writes the model only where another than this loop reads it."""
        needs_model = (
            step == self._range.last
            or self._all_have_models
            or self._checkpoints.would_be_best(step, self._last_metrics)
        )
        if needs_model or not isinstance(trained, SavesShards):
            return trained
        return _ShardsAlone(trained)

    def _advance(self, on_save: OnSave, *, wait: bool) -> None:
        """Takes the checkpoint that is being saved, if any, as far as it is, or to its end."""
        save = self._pending
        if save is None:
            return
        if wait:
            save.wait()
        elif not save.poll():
            return
        self._pending = None
        publish(StageSaved(save.step))
        on_save(save.step, save.folder)

    def _resume(self, trained: Checkpointed) -> int:
        latest = self._checkpoints.latest(verify=True)
        done = latest[0] if latest else self._range.first - 1
        if latest:
            trained.load_checkpoint(latest[1])
            publish(StageResumed(done))
        self._metrics.truncate_after(done - self._range.first + 1)
        self._history = [line.metrics for line in self._metrics.read()]
        stop = self._read(self._stop_record)
        if stop and stop["step"] == done:
            self._stop_at(done, stop["reason"])
        else:
            self._stop_record.unlink(missing_ok=True)
        return done

    @property
    def history(self) -> Sequence[Mapping[str, float]]:
        """Metrics of each step until now, those before a resume included."""
        return self._history

    @property
    def last(self) -> int:
        """Number of the last step."""
        return self._range.last

    def stop(self, step: int, reason: str) -> None:
        """Makes a step that is under way the last one; a resumed run stops there, too."""
        record = {"step": step, "reason": reason}
        files.write_atomic(self._stop_record, json.dumps(record))
        self._stop_at(step, reason)

    def _stop_at(self, step: int, reason: str) -> None:
        planned = self._range.last - self._range.first + 1
        taken = step - self._range.first + 1
        self._stopped = f"stopped at step {taken} of {planned}: {reason}"
        self._range = StepRange(self._range.first, step)

    @property
    def _stop_record(self) -> Path:
        return self._work / "stopped.json"

    @staticmethod
    def _read(record: Path) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(record.read_text()) if record.exists() else {}
        return found

    def report(self, step: int, metrics: dict[str, float], timings: dict[str, float]) -> None:
        """Records a step and shows it.

        Args:
            step: Number over the whole run.
            metrics: Values that are equal in every rerun; `num_valid_tokens`, where it is among
                them, counts the tokens trained on.
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

    @property
    def is_finished(self) -> bool:
        """Whether every step is done and only `finish` may be left."""
        return self._marker.exists()

    @property
    def _marker(self) -> Path:
        return self._work / "finished.json"

    def finish(
        self, *, peak_memory_gib: float = 0.0, choices: Mapping[str, str] | None = None
    ) -> RunResult:
        """Moves the last checkpoint to where an artifact has it; goes on if killed in the middle.

        Args:
            peak_memory_gib: Of the workers; ignored where an earlier call has written its own.
            choices: As `RunResult.choices`; ignored likewise.
        """
        stop = self._read(self._stop_record)
        if stop and not self._stopped:  # an earlier process made all steps
            self._stop_at(stop["step"], stop["reason"])
        if not self.is_finished:
            found = {"peak_memory_gib": peak_memory_gib, "choices": dict(choices or {})}
            files.write_atomic(self._marker, json.dumps(found))
        best = self._best_step()
        hands_out_best = best is not None and self._hands_out_best
        step = best if best is not None and hands_out_best else self._range.last
        if best is not None and best != self._range.last and not hands_out_best:
            self._leave_model(best)
        checkpoint = self._checkpoints.path(step)
        parts = [part for part in checkpoint.glob("*") if part.is_dir()]  # none: moved already
        for part in parts:
            part.rename(self._work / part.name)
        files.discard(self._checkpoints.root)
        lines = self._metrics.read()
        found = json.loads(self._marker.read_text())
        return RunResult(
            folder=self._work,
            step=step,
            num_tokens=int(sum(line.metrics.get("num_valid_tokens", 0.0) for line in lines)),
            peak_memory_gib=found["peak_memory_gib"],
            choices=found.get("choices", {}),  # what an earlier version wrote has none
            stopped=self._stopped,
            best=self._described(step, lines) if hands_out_best else "",
        )

    @property
    def _hands_out_best(self) -> bool:
        return self._keep_best is not None and self._keep_best.result == "best"

    def _best_step(self) -> int | None:
        """The best step with a model; None without `keep_best`, or if no step has the metric."""
        if self._keep_best is None:
            return None
        record = self._work / "best.json"
        if not record.exists():  # before anything is moved: no checkpoint is complete after that
            best = self._checkpoints.best()
            # Without a model it was not among the best when it was saved; those are damaged now.
            step = best[0] if best and (best[1] / "model").is_dir() else None
            files.write_atomic(record, json.dumps({"step": step}))
        found: int | None = json.loads(record.read_text())["step"]
        return found

    def _leave_model(self, step: int) -> None:
        target = self._work / "best"
        if not target.exists():
            (self._checkpoints.path(step) / "model").rename(target)

    def _described(self, step: int, lines: Sequence[StepReport]) -> str:
        assert self._keep_best is not None
        metric = self._keep_best.metric
        (value,) = [line.metrics[metric] for line in lines if line.metrics["global_step"] == step]
        return f"step {step} of {self._range.last}, {metric} {value:.6g}"


def _ignore(step: int, folder: Path) -> None:
    pass


def _nothing_else() -> None:
    pass
