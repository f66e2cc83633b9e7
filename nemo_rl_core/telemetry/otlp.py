"""Metrics by OTLP, which OpenTelemetry's collectors and Prometheus take.

Every metric is a gauge `nemo_rl_NAME` with the labels `run`, `stage`, and what else is known of the
run. Four gauges are of the run itself: `nemo_rl_step` and `nemo_rl_last_step_time_seconds` of each
stage, from which an alert knows that nothing goes on, and at the end the times
`nemo_rl_stage_end_time_seconds` and `nemo_rl_run_end_time_seconds`, with the label `outcome`. Only
the latest value in `every_seconds` is pushed.
"""

import re
import time
from collections.abc import Mapping

from nemo_rl_core.config.tracking import OtlpTracker
from nemo_rl_core.telemetry.logger_facade import Outcome, Part

_REQUEST_SECONDS = 5
"""Of one push, with its repetitions: half of what a run waits for its trackers at its end."""
_NO_LETTER = re.compile(r"[^a-zA-Z0-9_]+")


class Otlp:
    """Gauges that a thread of OpenTelemetry's SDK pushes.

    Args:
        config: Where to, and how often.
        run: The label `run`.
        labels: Further labels of all metrics; empty ones are left out.
        of: What `close` ends; the end of a run is not pushed with that of a stage.
    """

    def __init__(
        self, config: OtlpTracker, run: str, labels: Mapping[str, str], *, of: Part = "run"
    ) -> None:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.resources import Resource

        exporter = OTLPMetricExporter(endpoint=config.endpoint, timeout=_REQUEST_SECONDS)
        reader = PeriodicExportingMetricReader(exporter, 1000 * config.every_seconds)
        # `OTEL_RESOURCE_ATTRIBUTES` of the environment is merged in.
        resource = Resource.create({"service.name": "nemo-rl", "service.instance.id": run})
        self._provider = MeterProvider([reader], resource=resource, shutdown_on_exit=False)
        self._meter = self._provider.get_meter("nemo_rl")
        self._of, self._stages = of, set[str]()
        self._labels = {"run": run, **{name: value for name, value in labels.items() if value}}

    def log_metrics(self, stage: str, step: int, metrics: Mapping[str, float]) -> None:
        """Takes the figures of a step for the next push."""
        self._stages.add(stage)
        labels = {**self._labels, "stage": stage}
        for name, value in metrics.items():
            self._set(name, value, labels)
        self._set("step", step, labels)
        self._set("last_step_time_seconds", time.time(), labels)

    def close(self, outcome: Outcome) -> None:
        """Pushes the last figures, and when the stages and the run have ended."""
        labels, now = {**self._labels, "outcome": outcome}, time.time()
        for stage in self._stages:
            self._set("stage_end_time_seconds", now, {**labels, "stage": stage})
        if self._of == "run":
            self._set("run_end_time_seconds", now, labels)
        self._provider.shutdown(timeout_millis=1000 * _REQUEST_SECONDS)

    def _set(self, name: str, value: float, labels: Mapping[str, str]) -> None:
        # The meter gives the same instrument for the same name.
        self._meter.create_gauge(metric_name(name)).set(value, labels)


def metric_name(name: str) -> str:
    """The name that Prometheus has for a metric.

    Example:
        >>> metric_name("gpu0_percent"), metric_name("by tag/math: share")
        ('nemo_rl_gpu0_percent', 'nemo_rl_by_tag_math_share')
    """
    return f"nemo_rl_{_NO_LETTER.sub('_', name).strip('_')}"
