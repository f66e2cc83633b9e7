"""The values of settings of `training` that are `auto`, chosen before the workers set up."""

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


def with_choices(
    setup: TrainingSetup, cluster: RayVirtualCluster, *, memory_gib: float | None
) -> tuple[TrainingSetup, dict[str, str]]:
    """The set-up without `auto`, by the arithmetic of `nemo-rl plan`.

    A model that plans cannot count has the values of CPUs, and the log warns.

    Args:
        setup: Whose `load` says what else is on the GPUs; one without it is taken to be trained
            alone, by many micro-batches a step.
        cluster: Where it computes.
        memory_gib: Of the smallest of its GPUs; None on CPUs.

    Returns:
        The set-up, and what was chosen, by path in a recipe.
    """
    asked = setup.training
    if not open_choices(asked):
        return setup, {}
    found = without_plan(asked)
    if memory_gib is not None:
        try:
            load = chosen(_load_of(setup, cluster), memory_gib)
            assert load.training is not None
            found = load.training.config
        except NemoRLError as error:
            _LOG.warning("memory was not planned: %s", error.in_one_line)
    said = resolved(asked, found)
    if memory_gib is not None:
        values = ", ".join(f"{path} {value}" for path, value in said.items())
        _LOG.warning("chosen for GPUs of %.0f GiB: %s", memory_gib, values)
    return replace(setup, training=found, load=None), said


def _load_of(setup: TrainingSetup, cluster: RayVirtualCluster) -> StageLoad:
    own = ClusterConfig(
        shape="cluster",
        num_workers=cluster.world_size,
        num_gpus_per_node=max(cluster.bundle_ct_per_node_list),
    )
    if (load := setup.load) is not None:
        assert load.training is not None
        training = replace(load.training, config=setup.training)
        is_same = load.cluster.num_workers == cluster.world_size
        return replace(load, training=training, cluster=load.cluster if is_same else own)
    reference = setup.reference_folder
    return StageLoad(
        "training",
        _sizes(setup.model_folder),
        own,
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
            is_trained_base=reference == setup.model_folder,
        ),
    )


def _sizes(folder: Path) -> ModelSizes:
    return sizes_of(json.loads((folder / "config.json").read_text()))
