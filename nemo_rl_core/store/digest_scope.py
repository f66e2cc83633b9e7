"""Modules that do not affect a stage's result and so are left out of digests of its source.

`tests/unit/store/test_digest_scope.py` checks the lists; `tests/workflows/test_opened_sources.py`
runs stages and checks every file of the project that their processes open.
"""

REPORTING = frozenset(
    [
        *("nemo_rl_core.checkpoints.stop_request", "nemo_rl_core.config.tracking"),
        *("nemo_rl_core.config.mistakes", "nemo_rl_core.config.names"),
        *("nemo_rl_core.config.peer_names", "nemo_rl_core.deprecations"),
        "nemo_rl_core.documented_names",
        *("nemo_rl_core.distributed.collective_check", "nemo_rl_core.distributed.cpu_time"),
        "nemo_rl_core.distributed.step_times",
        "nemo_rl_core.history",
        *("nemo_rl_core.store.git", "nemo_rl_core.store.machine"),
        *("nemo_rl_core.telemetry.budget", "nemo_rl_core.telemetry.cost"),
        *("nemo_rl_core.telemetry.curves", "nemo_rl_core.telemetry.decks"),
        *("nemo_rl_core.telemetry.display", "nemo_rl_core.telemetry.display_lines"),
        *("nemo_rl_core.telemetry.events", "nemo_rl_core.telemetry.logger_facade"),
        *("nemo_rl_core.telemetry.trackers", "nemo_rl_core.telemetry.tracking"),
        "nemo_rl_core.telemetry.usage",
        *("nemo_rl_core.telemetry.waiting", "nemo_rl_core.trainers.fit.peer_arguments"),
    ]
)
"""Modules that report on the run (texts, plots, times, costs) and do not affect its result."""

MACHINERY = frozenset(
    [
        *("nemo_rl_core.checkpoints.hub", "nemo_rl_core.produce"),
        *("nemo_rl_core.store.ancestry", "nemo_rl_core.store.digest_scope"),
        *("nemo_rl_core.store.locks", "nemo_rl_core.store.manifest"),
        *("nemo_rl_core.store.node_cache", "nemo_rl_core.store.reads"),
        *("nemo_rl_core.store.shown_texts", "nemo_rl_core.store.source_digest"),
        *("nemo_rl_core.store.source_files", "nemo_rl_core.store.store"),
        "nemo_rl_core.store.watching",
        *("tasks.flyte", "tasks.local_run", "tasks.plan_tasks", "tasks.planning", "tasks.pods"),
        *("tasks.ray_cluster", "tasks.stage"),
    ]
)
"""Modules that choose machines, containers, folders and keys, but do not affect results."""

NOT_OF_THE_RESULT = REPORTING | MACHINERY

RECORDS_ARE_THE_RESULT = {
    "tasks.lineage_report": frozenset(
        ["nemo_rl_core.store.ancestry", "nemo_rl_core.store.manifest"]
    )
}
"""Modules of stages that compute results from records, with the readers that count there."""

MINOR_VERSION_COUNTS = frozenset(["flytekit"])
"""Packages that only transport inputs and results: only major and minor version count."""

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
        "nemo_rl_core.trainers.fit.defaults",
        "nemo_rl_core.trainers.fit.fitting",
        "nemo_rl_core.trainers.fit.request",
    },
    "nemo_rl_core.trainers.fit.custom": {
        "nemo_rl_core.models.policy.pretrained",
    },
    "tasks.recipes.common": {
        "nemo_rl_core.rollouts.prompts",
    },
}
"""Imports, by importing module, that only calls from Python (`fit`, `from_pretrained`,
`register_...`) use, or that only make the config of a stage. Stages call `run`, so changes of these
imports must not make stages run again.

`fit` and `run` are methods of one class: without the entry of `trainers.base`, the code of every
data source would be part of the key of every training. A judge is an engine of vLLM, in every stage
that samples; only calls from Python create an asynchronous one."""
