"""What is no part of a stage's result, and so of no digest of its source."""

NOT_OF_THE_RESULT = frozenset(
    [
        *("nemo_rl_core.checkpoints.hub", "nemo_rl_core.checkpoints.stop_request"),
        "nemo_rl_core.config.tracking",
        *(
            "nemo_rl_core.distributed.collective_check",
            "nemo_rl_core.distributed.step_times",
            "nemo_rl_core.models.policy.rank_times",
            "nemo_rl_core.telemetry.gpu_use",
            "nemo_rl_core.telemetry.nvml",
        ),
        *("nemo_rl_core.documented_names", "nemo_rl_core.history"),
        *(
            "nemo_rl_core.telemetry.display",
            "nemo_rl_core.telemetry.display_lines",
            "nemo_rl_core.telemetry.live_display",
            "nemo_rl_core.telemetry.logger_facade",
            "nemo_rl_core.telemetry.machine_sampler",
            "nemo_rl_core.telemetry.trackers",
            "nemo_rl_core.telemetry.tracking",
            "nemo_rl_core.telemetry.waiting",
        ),
        *(
            "nemo_rl_core.store.digest_scope",
            "nemo_rl_core.store.source_digest",
            "nemo_rl_core.store.source_files",
            "tasks.platform.attempts",
            "tasks.platform.downloads",
            "tasks.platform.failures",
            "tasks.platform.images",
            "tasks.platform.literal_types",
        ),
        *(
            "tasks.platform.pods",
            "tasks.platform.ray_stage",
            "tasks.platform.resources",
            "tasks.platform.retries",
            "tasks.platform.shapes",
            "tasks.platform.site_pods",
            "tasks.platform.starting",
            "tasks.platform.stopping",
        ),
    ]
)
"""They decide on machines, memory, containers and keys, or tell of the run; the result is the
same."""

NOT_RUN_BY_STAGES = {
    "nemo_rl_core.algorithms.dpo": {
        "nemo_rl_core.algorithms.dpo.trainer",
    },
    "nemo_rl_core.backends": {
        "nemo_rl_core.backends.generation.base",
        "nemo_rl_core.backends.training.base",
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
`trainers.base`, every source of data would be part of the key of every training."""
