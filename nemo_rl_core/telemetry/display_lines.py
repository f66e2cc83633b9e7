"""Lines of a run's displays: steps, stages, waits, and the table at the end."""

import math
import os
import time
from collections.abc import Callable, Sequence
from functools import reduce

from rich.table import Table
from rich.text import Text

from nemo_rl_core.store.manifest import Cost
from nemo_rl_core.telemetry.events import StageRecord, Waiting
from nemo_rl_core.types import VALIDATION_PREFIX, StepReport

STATE_STYLES = {"ran": "green", "cached": "cyan", "failed": "bold red", "stopped": "yellow"}


VERBOSE = "NEMO_RL_VERBOSE"
"""Environment variable that `nemo-rl run -v` sets to 1."""

_SECONDS_BETWEEN_STEPS = 10.0
_SHARE_BETWEEN_STEPS = 0.05
_VERBOSE_METRICS: dict[str, Callable[[float], str]] = {
    "kl": lambda value: f"KL {value:.3g}",
    "completion_length": lambda value: f"length {value:.1f}",
    "approx_entropy": lambda value: f"entropy {value:.3g}",
    "truncated_fraction": lambda value: f"truncated {100 * value:.0f} %",
    "grad_norm": lambda value: f"grad norm {value:.3g}",
    "zero_variance_fraction": lambda value: f"equal groups {100 * value:.0f} %",
}
_PREFIXES = ("", "k", "M", "G", "T", "P", "E")

_COST_COLUMNS: tuple[tuple[str, Callable[[Cost], str]], ...] = (
    ("CPU s", lambda cost: f"{cost.cpu_seconds:.1f}" if cost.cpu_seconds else ""),
    ("GPU s", lambda cost: f"{cost.gpu_seconds:.1f}" if cost.gpu_seconds else ""),
    ("FLOPs", lambda cost: _scaled(cost.flops) if cost.flops else ""),
    ("MFU", lambda cost: f"{100 * cost.mfu:.1f} %" if cost.mfu is not None else ""),
    ("money", lambda cost: f"{cost.money:.4f} {cost.currency}" if cost.money is not None else ""),
)


def summary_table(records: Sequence[StageRecord]) -> Table:
    """Returns the table at the end of a run: one row per stage and the totals, no empty columns.

    Notes are left out, since each was printed when its stage ended.
    """
    table = Table(title="stages")
    for heading in ("stage", "state"):
        table.add_column(heading, no_wrap=True)
    total = reduce(Cost.plus, (record.cost for record in records), Cost())
    costs = [total, *(record.cost for record in records)]
    shown = [column for column in _COST_COLUMNS if any(map(column[1], costs))]
    for heading in ("seconds", "tokens", "peak GiB", *(name for name, _ in shown)):
        table.add_column(heading, justify="right")
    for record in records:
        table.add_row(
            Text(record.name),
            Text(_state_label(record), style=STATE_STYLES[record.state]),
            f"{record.seconds:.1f}",
            f"{record.tokens:,}" if record.tokens else "",
            _gib(record.peak_memory_gib),
            *(format_cost(record.cost) for _, format_cost in shown),
        )
    table.add_section()
    table.add_row(
        "total",
        "",
        f"{sum(record.seconds for record in records):.1f}",
        f"{sum(record.tokens for record in records):,}",
        _gib(max((record.peak_memory_gib for record in records), default=0.0)),
        *(format_cost(total) for _, format_cost in shown),
    )
    return table


def _gib(size: float) -> str:
    return f"{size:.2f}" if size else ""


def _scaled(flops: float) -> str:
    """Formats three digits with an SI prefix, such as 159 M or 2.1 T."""
    rounded = float(f"{flops:.3g}")  # round first, so that 999.9 G becomes 1 T, not 1e+03 G
    power = min(max(int(math.log10(rounded)) // 3, 0), len(_PREFIXES) - 1)
    return f"{rounded / 1000**power:.3g} {_PREFIXES[power]}".rstrip()


def _state_label(record: StageRecord) -> str:
    return record.state if record.state == "ran" else record.state.upper()


def stage_line(record: StageRecord) -> str:
    """Returns the line of a finished stage."""
    parts = [f"{record.name}  {_state_label(record)}"]
    if record.state != "cached":
        parts.append(f"{record.seconds:.1f} s")
    return "  ".join([*parts, record.note] if record.note else parts)


def step_line(report: StepReport, time_left: str) -> str:
    """Returns the line of a step: reward (or else loss), speed, and more if `is_verbose`."""
    parts = [f"{report.stage} {report.step}/{report.num_steps}", *step_parts(report), time_left]
    if is_verbose():
        parts += verbose_parts(report)
    return "  ".join(part for part in parts if part)


def step_parts(report: StepReport) -> list[str]:
    """Returns the reward (or else loss) and speed of a step as text."""
    parts = [
        f"{key} {report.metrics[key]:.3f}" for key in ("reward", "loss") if key in report.metrics
    ][:1]
    if "tokens_per_second" in report.timings:
        parts.append(f"{report.timings['tokens_per_second']:,.0f} tokens/s")
    return parts


def is_verbose() -> bool:
    """Whether lines of steps have more metrics: with `nemo-rl run -v`."""
    return os.environ.get(VERBOSE, "") not in ("", "0")


def verbose_parts(report: StepReport) -> list[str]:
    """Returns KL, length, entropy, truncation, gradient norm and equal groups of a step.

    Example:
        >>> verbose_parts(StepReport("sft", 1, 9, {"grad_norm": 1.25, "truncated_fraction": 0.1}))
        ['truncated 10 %', 'grad norm 1.25']
    """
    return [
        format_value(report.metrics[name])
        for name, format_value in _VERBOSE_METRICS.items()
        if name in report.metrics
    ]


class StepThrottle:
    """Chooses the steps whose lines are printed.

    These are the first and the last step of a stage, and those 10 s or 5 % of the stage after the
    last printed one.
    """

    def __init__(self) -> None:
        self._stage, self._step, self._printed_at = "", 0, 0.0

    def is_due(self, report: StepReport) -> bool:
        """Returns whether to print a step, and assumes that it is printed then."""
        now = time.perf_counter()
        is_due = (
            report.stage != self._stage
            or report.step in (1, report.num_steps)
            or report.step < self._step
            or report.step - self._step >= _SHARE_BETWEEN_STEPS * report.num_steps
            or now - self._printed_at >= _SECONDS_BETWEEN_STEPS
        )
        if is_due:
            self._stage, self._step, self._printed_at = report.stage, report.step, now
        return is_due


def validation_line(report: StepReport) -> str:
    """Returns the line of a validation: its step and every figure; empty without one.

    Example: `train_sft 50/250  validation: loss 0.3125`
    """
    figures = [
        f"{name.removeprefix(VALIDATION_PREFIX)} {value:.4g}"
        for name, value in report.metrics.items()
        if name.startswith(VALIDATION_PREFIX)
    ]
    if not figures:
        return ""
    return f"{report.stage} {report.step}/{report.num_steps}  validation: {', '.join(figures)}"


class Now:
    """The running stage and the current wait, each with the time since its start."""

    def __init__(self) -> None:
        self.stage, self.wait = "", Waiting("")
        self._stage_began = self._wait_began = time.perf_counter()

    def start(self, stage: str) -> None:
        """Sets the running stage; "" for none."""
        self.stage, self._stage_began = stage, time.perf_counter()

    def wait_for(self, wait: Waiting) -> None:
        """Starts a wait, or updates the progress of the current one."""
        if wait.text != self.wait.text:
            self._wait_began = time.perf_counter()
        self.wait = wait

    @property
    def elapsed(self) -> str:
        """Time since the stage's start; empty without a stage."""
        return clock(time.perf_counter() - self._stage_began) if self.stage else ""

    @property
    def seconds_waited(self) -> float:
        """Time since the start of the wait."""
        return time.perf_counter() - self._wait_began

    def waited(self) -> str:
        """Returns the text, progress and duration of the wait; empty without one."""
        if not self.wait.text:
            return ""
        parts = [self.wait.text, _amount(self.wait), clock(self.seconds_waited)]
        return "  ".join(part for part in parts if part)

    def line(self) -> str:
        """Returns stage and wait, such as `evaluate  0:12  starting the engine  0:10`, or ""."""
        return "  ".join(part for part in (self.stage, self.elapsed, self.waited()) if part)


def _amount(wait: Waiting) -> str:
    """Returns text such as `12.3 of 40.1 MB` or `3 of 7 files`; empty without a unit."""
    if not wait.unit:
        return ""
    if wait.unit == "bytes":
        scale, unit = (1e9, "GB") if max(wait.done, wait.total or 0) >= 1e9 else (1e6, "MB")
        done, total = f"{wait.done / scale:,.1f}", f"{(wait.total or 0) / scale:,.1f}"
    else:
        unit, done, total = wait.unit, f"{wait.done:,.0f}", f"{wait.total or 0:,.0f}"
    return f"{done} {unit}" if wait.total is None else f"{done} of {total} {unit}"


def clock(seconds: float) -> str:
    """Formats a duration as `0:05`, `12:34` or `1:02:03`."""
    total_seconds = round(seconds)
    hours, minutes = total_seconds // 3600, total_seconds // 60 % 60
    short = f"{minutes}:{total_seconds % 60:02d}"
    return f"{hours}:{short:0>5}" if hours else short


class TimeLeft:
    """Remaining time from the observed steps, since a resumed stage does not start at step 0."""

    def __init__(self) -> None:
        self._stage, self._first_step, self._start = "", 0, 0.0

    def time_left(self, report: StepReport) -> str:
        """Returns text such as `0:42 left`; empty for the first observed step."""
        now = time.monotonic()
        if report.stage != self._stage or report.step <= self._first_step:
            self._stage, self._first_step, self._start = report.stage, report.step, now
            return ""
        per_step = (now - self._start) / (report.step - self._first_step)
        return f"{clock(per_step * (report.num_steps - report.step))} left"
