"""Forwards every reported step of a run to its trackers."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from types import MappingProxyType

from nemo_rl_core.config.tracking import TrackingConfig
from nemo_rl_core.store.store import Store
from nemo_rl_core.telemetry.events import Event, MachineSample, publish, subscribe
from nemo_rl_core.telemetry.logger_facade import LoggerFacade, Part, with_unique_names
from nemo_rl_core.telemetry.machine_sampler import MachineSampler
from nemo_rl_core.telemetry.trackers import open_tracker
from nemo_rl_core.types import StepReport

MACHINE = "machine"
"""The stage name of the machine's load; its steps are seconds."""


@contextmanager
def tracked(
    config: TrackingConfig,
    run: str,
    labels: Mapping[str, str] = MappingProxyType({}),
    *,
    of: Part = "run",
) -> Iterator[None]:
    """Logs all reports inside the context to the config's trackers, and samples the machine.

    Args:
        config: The trackers, and the interval of samples.
        run: Name of the run in the trackers.
        labels: What else tells the run from others: its workflow, its recipe.
        of: What ends with the context: the run, or a stage of it, as in a container of a cluster.
    """
    openers = with_unique_names(
        [(each.kind, partial(open_tracker, each, run, labels, of=of)) for each in config.trackers]
    )
    with ExitStack() as stack:
        log = stack.enter_context(LoggerFacade(openers))
        stack.callback(subscribe(partial(_forward, log)))
        if config.sample_machine_every_seconds:
            sampler = MachineSampler(
                config.sample_machine_every_seconds,
                Store.default().root,
                lambda second, figures: publish(MachineSample(second, figures)),
            )
            stack.callback(sampler.close)
        yield


def _forward(log: LoggerFacade, event: Event) -> None:
    if isinstance(event, StepReport):
        step = int(event.metrics.get("global_step", event.step))
        log.log_metrics(event.stage, step, {**event.metrics, **event.timings})
    elif isinstance(event, MachineSample):
        log.log_metrics(MACHINE, event.second, event.figures)
