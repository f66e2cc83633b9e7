"""What is no part of a stage's result, and so of no digest of its source.

`tests/unit/store/test_digest_scope.py` holds the lists to what they claim: it names everything that
modules in a key take from those that only report, and what that returns.
`tests/workflows/test_opened_sources.py` runs stages, looks at every file of the project that any of
their processes opens, and runs them again with reports that are wrong.
"""

REPORTING = frozenset(
    [
        *("nemo_rl_core.checkpoints.stop_request", "nemo_rl_core.config.tracking"),
        *("nemo_rl_core.config.mistakes", "nemo_rl_core.config.names"),
        *("nemo_rl_core.config.peer_names", "nemo_rl_core.documented_names"),
        *("nemo_rl_core.distributed.collective_check", "nemo_rl_core.distributed.cpu_time"),
        *("nemo_rl_core.distributed.step_times", "nemo_rl_core.models.policy.rank_times"),
        "nemo_rl_core.history",
        *("nemo_rl_core.store.git", "nemo_rl_core.store.machine", "nemo_rl_core.store.stage_run"),
        *("nemo_rl_core.telemetry.budget", "nemo_rl_core.telemetry.cost"),
        *("nemo_rl_core.telemetry.curves", "nemo_rl_core.telemetry.decks"),
        *("nemo_rl_core.telemetry.display", "nemo_rl_core.telemetry.display_lines"),
        *("nemo_rl_core.telemetry.events", "nemo_rl_core.telemetry.gpu_seconds"),
        "nemo_rl_core.telemetry.gpu_use",
        *("nemo_rl_core.telemetry.intervals", "nemo_rl_core.telemetry.live_display"),
        *("nemo_rl_core.telemetry.logger_facade", "nemo_rl_core.telemetry.machine_sampler"),
        "nemo_rl_core.telemetry.nvml",
        *("nemo_rl_core.telemetry.timer", "nemo_rl_core.telemetry.trackers"),
        *("nemo_rl_core.telemetry.tracking", "nemo_rl_core.telemetry.usage"),
        *("nemo_rl_core.telemetry.waiting", "nemo_rl_core.trainers.peer_arguments"),
    ]
)
"""They tell of the run, in texts, pictures, times and costs; what they return becomes no number of
a result."""

MACHINERY = frozenset(
    [
        *("nemo_rl_core.checkpoints.hub", "nemo_rl_core.produce"),
        *("nemo_rl_core.store.ancestry", "nemo_rl_core.store.digest_scope"),
        *("nemo_rl_core.store.hash_cache", "nemo_rl_core.store.locks"),
        *("nemo_rl_core.store.manifest", "nemo_rl_core.store.node_cache"),
        *("nemo_rl_core.store.partial", "nemo_rl_core.store.reads"),
        *("nemo_rl_core.store.shown_texts", "nemo_rl_core.store.source_digest"),
        *("nemo_rl_core.store.source_files", "nemo_rl_core.store.store"),
        "nemo_rl_core.store.watching",
        "tasks.platform",
    ]
)
"""They decide on machines, containers, folders and keys: where a result is made and how it is
known, and not what it is."""

NOT_OF_THE_RESULT = REPORTING | MACHINERY

RECORDS_ARE_THE_RESULT = {
    "tasks.lineage_report": frozenset(
        ["nemo_rl_core.store.ancestry", "nemo_rl_core.store.manifest"]
    )
}
"""Stages whose result is made of records, by module: what reads them counts there."""

MINOR_VERSION_COUNTS = frozenset(["flytekit"])
"""Packages that carry inputs and results and compute nothing: of their versions, the first two
numbers count."""

NOT_RUN_BY_STAGES = {
    "nemo_rl_core.algorithms.dpo": {
        "nemo_rl_core.algorithms.dpo.trainer",
    },
    "nemo_rl_core.backends": {
        "nemo_rl_core.backends.generation.base",
        "nemo_rl_core.backends.training.base",
    },
    "nemo_rl_core.models.generation.vllm": {
        "nemo_rl_core.models.generation.streaming",
    },
    "nemo_rl_core.trainers.base": {
        "nemo_rl_core.models.policy.pretrained",
        "nemo_rl_core.trainers.defaults",
        "nemo_rl_core.trainers.fit_request",
        "nemo_rl_core.trainers.fitting",
    },
    "nemo_rl_core.trainers.own": {
        "nemo_rl_core.models.policy.pretrained",
    },
}
"""Imports that serve calls from Python alone (`fit`, `from_pretrained`, `register_...`), by the
module that has them: a stage calls `run`, and what only the others need must not make it run again.

A trainer is one class for both, so `fit` is reached wherever a trainer is: without the entry of
`trainers.base`, every source of data would be part of the key of every training. A judge is an
engine of vLLM, in every stage that samples; only calls from Python make an asynchronous one of its
class."""
