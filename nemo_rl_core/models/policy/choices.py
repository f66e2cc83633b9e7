"""Choice of values for settings of `training` that are `auto`, before the workers set up."""

import json
import logging
from dataclasses import replace
from pathlib import Path

from nemo_rl_core.backends.training.base import TrainingSetup
from nemo_rl_core.config.cluster import ClusterConfig
from nemo_rl_core.config.training import open_choices, without_plan
from nemo_rl_core.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl_core.errors import NemoRLError
from nemo_rl_core.planning.choices import chosen, resolved
from nemo_rl_core.planning.load import StageLoad, TrainingLoad
from nemo_rl_core.planning.sizes import ModelSizes, sizes_of

_LOG = logging.getLogger(__name__)
_MANY = 2**31
"""Sequences per step if their number is unknown: more than fit a micro-batch."""


def with_choices(
    setup: TrainingSetup, cluster: RayVirtualCluster, *, memory_gib: float | None
) -> tuple[TrainingSetup, dict[str, str]]:
    """Replaces `auto` in a set-up by the values that `nemo-rl plan` computes.

    A model whose memory cannot be planned gets the values for CPUs, with a warning in the log.

    Args:
        setup: Set-up, whose `load` describes what else is on the GPUs. Without it, training is
            assumed to be the only load, with many micro-batches per step.
    """
    training = setup.training
    if not open_choices(training):
        return setup, {}
    resolved_training = without_plan(training)
    if memory_gib is not None:
        try:
            load = chosen(_load_of(setup, cluster), memory_gib)
            assert load.training is not None
            resolved_training = load.training.config
        except NemoRLError as error:
            _LOG.warning("memory was not planned: %s", error.in_one_line)
    values_by_path = resolved(training, resolved_training)
    if memory_gib is not None:
        values = ", ".join(f"{path} {value}" for path, value in values_by_path.items())
        _LOG.warning("chosen for GPUs of %.0f GiB: %s", memory_gib, values)
    return replace(setup, training=resolved_training, load=None), values_by_path


def _load_of(setup: TrainingSetup, cluster: RayVirtualCluster) -> StageLoad:
    actual = ClusterConfig(
        shape="cluster",
        num_workers=cluster.world_size,
        num_gpus_per_node=max(cluster.bundle_ct_per_node_list),
    )
    if (load := setup.load) is not None:
        assert load.training is not None
        training = replace(load.training, config=setup.training)
        is_same = load.cluster.num_workers == cluster.world_size
        return replace(load, training=training, cluster=load.cluster if is_same else actual)
    reference = setup.reference_folder
    return StageLoad(
        "training",
        _sizes(setup.model_folder),
        actual,
        setup.dtype,
        prompt_tokens=0,
        completion_tokens=setup.max_tokens_per_microbatch,
        training=TrainingLoad(
            setup.training,
            setup.max_tokens_per_microbatch,
            path="max_tokens_per_microbatch",
            num_sequences=_MANY,
            moments=setup.optimizer.moments,
            has_head=setup.head == "lm",
            reference=_sizes(reference) if reference else None,
            reference_is_base=reference == setup.model_folder,
        ),
    )


def _sizes(folder: Path) -> ModelSizes:
    return sizes_of(json.loads((folder / "config.json").read_text()))
