"""Rules on a run's metrics that say when training needs a look: what a value means, what to do.

The page marks alarms on curves; a running stage warns of each once and sends a notice.
`NO_STEP_SECONDS` is that of the alert `NemoRLNoStep` in `deployment/production/monitoring.yaml`.
"""

import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from nemo_rl_core.telemetry import notices

_LOG = logging.getLogger(__name__)
NO_STEP_SECONDS = 3600.0

Points = Sequence[tuple[int, float]]
"""Steps and values of a metric, in order; some steps may be left out."""


@dataclass(frozen=True, slots=True)
class AlarmRule:
    """A condition on one metric that holds for several steps in a row.

    Attributes:
        is_wrong: Whether a value is wrong; the second argument is the curve's first finite value.
        num_steps: Number of steps in a row from which it is an alarm.
        condition: The condition as text.
    """

    name: str
    metrics: tuple[str, ...]
    is_wrong: Callable[[float, float], bool]
    num_steps: int
    condition: str
    meaning: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Alarm:
    """A rule that a curve breaks, last at `value`.

    Attributes:
        since: The first of the steps in a row; None if the run makes no steps.
        until: The last one.
        is_over: Whether later steps were right again.
    """

    rule: AlarmRule
    metric: str
    value: float
    since: int | None = None
    until: int | None = None
    is_over: bool = False


def _above(limit: float) -> Callable[[float, float], bool]:
    return lambda value, _: value > limit


RULES = (
    AlarmRule(
        "Not a number",
        ("loss", "reward", "grad_norm", "kl"),
        lambda value, _: not math.isfinite(value),
        1,
        "is NaN or infinite",
        "The loss or the weights have overflowed; later steps train on nothing.",
        "Resume from an earlier save with a lower learning_rate or max_grad_norm, or in float32.",
    ),
    AlarmRule(
        "Equal groups",
        ("zero_variance_fraction",),
        _above(0.9),
        5,
        "above 0.9 for 5 steps",
        "Nearly all groups have equal rewards, so they have no advantage and train nothing.",
        "Take prompts that are neither solved nor impossible, more samples per prompt, or "
        "dynamic sampling.",
    ),
    AlarmRule(
        "Entropy collapse",
        ("approx_entropy",),
        lambda value, first: value < 0.1 * first,
        5,
        "below a tenth of its first value for 5 steps",
        "The policy has become nearly deterministic and no longer explores.",
        "Lower the learning_rate, raise clip_high or the temperature, or add a KL penalty.",
    ),
    AlarmRule(
        "KL to the reference",
        ("kl",),
        _above(0.5),
        3,
        "above 0.5 per token for 3 steps",
        "The policy is far from the reference; it may exploit the reward.",
        "Read completions with high rewards; raise the KL coefficient or lower the learning_rate.",
    ),
    AlarmRule(
        "Engine against trainer",
        ("kl_generation_trainer",),
        _above(0.05),
        3,
        "above 0.05 per token for 3 steps",
        "Engine and trainer give different probabilities to the same tokens.",
        "Use the same dtype for both, or importance weights; check the weight transfer in the log.",
    ),
    AlarmRule(
        "Gate",
        ("num_inconsistent_sequences",),
        _above(0.0),
        3,
        "above 0 for 3 steps",
        "The gate masks sequences whose logprobs differ between engine and trainer.",
        "See `validation` in the reference for the limits; a growing number is stale weights.",
    ),
    AlarmRule(
        "Truncation",
        ("truncated_fraction",),
        _above(0.5),
        5,
        "above 0.5 for 5 steps",
        "Most completions end at the limit of tokens, before an answer.",
        "Raise generation.max_new_tokens, or penalize length.",
    ),
    AlarmRule(
        "Failed rollouts",
        ("failed_fraction",),
        _above(0.02),
        3,
        "above 0.02 for 3 steps",
        "Rollouts without a reward are left out; beyond rollouts.max_failed_fraction a run ends.",
        "Read the errors among the completions, and correct the reward, the environment or the "
        "rows.",
    ),
)

_WATCHED = [(rule, metric) for rule in RULES for metric in rule.metrics]

NO_STEP = AlarmRule(
    "No step",
    (),
    _above(NO_STEP_SECONDS),
    1,
    "no step for an hour",
    "The stage may hang: an engine, a reward or a collective.",
    "See the end of the log, and the load of the machine; stop the run, and it resumes from its "
    "last save.",
)


def alarms(curves: Mapping[str, Points]) -> list[Alarm]:
    """Returns one alarm per rule and metric: the last steps in a row that break it.

    Example:
        >>> [(a.rule.name, a.since, a.is_over) for a in alarms({"loss": [(1, 2.0), (2, math.nan)]})]
        [('Not a number', 2, False)]
    """
    return [
        alarm
        for rule in RULES
        for metric in rule.metrics
        for alarm in list(_streaks(rule, metric, curves.get(metric, ())))[-1:]
    ]


class AlarmWatch:
    """Warns of the alarms of a running stage, of each rule and metric once.

    Args:
        stage: Name of the stage, for notices.
    """

    def __init__(self, stage: str) -> None:
        self._stage = stage
        self._first: dict[str, float] = {}
        self._num_wrong: dict[tuple[str, str], int] = {}
        self._raised: set[tuple[str, str]] = set()

    def step(self, step: int, metrics: Mapping[str, float]) -> list[Alarm]:
        """Logs alarms that this step raises, sends a notice of each, and returns them."""
        raised = []
        for rule, metric in _WATCHED:
            if (value := metrics.get(metric)) is None:
                continue
            if math.isfinite(value):
                self._first.setdefault(metric, value)
            key = (rule.name, metric)
            is_wrong = rule.is_wrong(value, self._first.get(metric, math.nan))
            self._num_wrong[key] = self._num_wrong.get(key, 0) + 1 if is_wrong else 0
            if self._num_wrong[key] == rule.num_steps and key not in self._raised:
                self._raised.add(key)
                raised.append(Alarm(rule, metric, value, step - rule.num_steps + 1, step))
        for alarm in raised:
            rule = alarm.rule
            text = f"{alarm.metric} is {alarm.value:.4g}, {rule.condition}. {rule.meaning}"
            _LOG.warning("alarm: %s: %s %s", rule.name, text, rule.remedy)
            subject = f"nemo-rl: {rule.name} at step {step} of {self._stage}"
            lines = f"{text}\n{rule.remedy}"
            threading.Thread(target=notices.send, args=(subject, lines), daemon=True).start()
        return raised


def no_step(seconds: float) -> Alarm | None:
    """Returns an alarm for a running stage whose last step ended so long ago."""
    return Alarm(NO_STEP, "", seconds) if seconds > NO_STEP_SECONDS else None


def _streaks(rule: AlarmRule, metric: str, points: Points) -> Iterator[Alarm]:
    first = next((value for _, value in points if math.isfinite(value)), math.nan)
    streak: list[tuple[int, float]] = []
    for step, value in points:
        if rule.is_wrong(value, first):
            streak.append((step, value))
            continue
        if len(streak) >= rule.num_steps:
            yield Alarm(rule, metric, streak[-1][1], streak[0][0], streak[-1][0], is_over=True)
        streak = []
    if len(streak) >= rule.num_steps:
        yield Alarm(rule, metric, streak[-1][1], streak[0][0], streak[-1][0])
