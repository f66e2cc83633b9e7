"""Resources of stages: Flyte's reservations per kind; `shapes.py` has those of Ray clusters.

Resources do not change results and are not part of cache keys (`nemo_rl_core.store.digest_scope`).
"""

from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

from flytekit import ImageSpec, Resources
from flytekit.deck import DeckField

from nemo_rl_core.store.git import git_state
from tasks.pods import images
from tasks.pods.pods import pod_with_node_cache
from tasks.pods.shapes import Shape
from tasks.pods.site_pods import requests_of

LIGHT = Resources(cpu="1", mem="2Gi")
"""Stages without workers: reading, checking, comparing."""


@cache
def _commit_variables() -> dict[str, str]:
    return git_state(Path(__file__).parent).as_environment


@dataclass(frozen=True)
class Kind:
    """Cluster settings of stages of one kind; not used in local runs.

    Attributes:
        requests: Resources of the stage's container. They are small for stages with workers, since
            they also apply to the head and the submitter.
        timeout: Time limit of each attempt.
        interruptible: Whether it may run on preemptible machines.
        serialize: Whether concurrent executions of the same stage wait for one result.
        on_ray: Whether it has workers, on a Ray cluster of the recipe's shape.
        resumes: Whether an attempt resumes from the last save of the previous one, so that a site
            may also let it run on preemptible machines (`deployment/pods.yaml`).
        keeps_downloads: Whether its pod has the node's cache of downloads, if the site has one.
            Those of Ray stages have it by their templates.
    """

    requests: Resources
    image: ImageSpec
    timeout: timedelta
    retries: int = 2
    interruptible: bool = True
    serialize: bool = True
    on_ray: bool = False
    resumes: bool = False
    keeps_downloads: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of `flytekit.task`."""
        template = pod_with_node_cache() if self.keeps_downloads else None
        return {
            **({} if template is None else {"pod_template": template}),
            "requests": self.requests,
            "container_image": self.image,
            "retries": self.retries,
            "timeout": self.timeout,
            "interruptible": self.interruptible,
            "environment": _commit_variables(),
        }

    def on(self, shape: Shape) -> "Kind":
        """Returns the kind on a shape; without a GPU, with an image without CUDA."""
        return self if shape.num_gpus else replace(self, image=images.LAPTOP)


DECK: dict[str, Any] = {
    "enable_deck": True,
    # All except the list of installed packages, for which flytekit starts pip in every task: it
    # takes seconds, and the manifest has the packages that a result depends on.
    "deck_fields": (DeckField.SOURCE_CODE, DeckField.TIMELINE, DeckField.INPUT, DeckField.OUTPUT),
}
"""Deck fields of a task, for `flytekit.task`."""

PLAIN = Kind(
    requests=LIGHT,
    image=images.LIGHT,
    timeout=timedelta(minutes=30),
    serialize=False,  # faster than waiting for another execution
)
"""Stages that compare, decide or report."""

DATA = Kind(
    requests=requests_of("data", Resources(cpu="2", mem="16Gi")),
    image=images.LIGHT,
    timeout=timedelta(hours=4),
    keeps_downloads=True,
)
"""Stages that read, generate or check rows."""

WEIGHTS = Kind(
    requests=requests_of("weights", Resources(cpu="8", mem="64Gi", ephemeral_storage="200Gi")),
    image=images.LIGHT,
    timeout=timedelta(hours=6),
    keeps_downloads=True,
)
"""Stages that hold a full model in memory, on CPUs: fetch, convert, export."""

_DRIVER = Resources(cpu="2", mem="8Gi")

GENERATE = Kind(requests=_DRIVER, image=images.GENERATION, timeout=timedelta(hours=12), on_ray=True)
"""Stages that sample from a model or score with one: hours at most, restarted when lost."""

TRAIN = Kind(
    requests=_DRIVER,
    image=images.TRAINING,
    timeout=timedelta(days=3),
    # The next attempt resumes from the last save, so a failing machine costs little.
    retries=5,
    # Losing one machine of a gang ends all of it, so preemptible machines are not used unless the
    # site says so.
    interruptible=False,
    on_ray=True,
    resumes=True,
)
"""Stages that train, with or without sampling; they resume from the last save."""

SCORE = replace(GENERATE, image=images.TRAINING)
"""Like `GENERATE`, with a training backend instead of an engine."""
