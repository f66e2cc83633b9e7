"""What models take of the pods of stages without workers on a Flyte cluster, by config.json."""

from nemo_rl_core.errors import NemoRLError, ResourceError
from nemo_rl_core.planning.engine_memory import GIB
from tasks.platform.gpu_plan import ASSUMED, RecipePlan, accelerator_of, plan_recipe
from tasks.platform.resources import WEIGHTS
from tasks.recipes.common import PipelineRecipe, Recipe

_FLOAT32, _PUBLISHED = 4, 2
"""Bytes of a weight in the store, and of most models on the hub, whose files lie beside them."""
_SHARE = 0.9
"""Of a pod, what weights may take."""
_PLACE = "deployment/pods.yaml"


def pod_problems(plan: RecipePlan) -> list[str]:
    """Why the pods that fetch and export a model are too small for it; a sentence each.

    `prepare_model` reads one tensor at a time and keeps the files of both; `export` loads the
    model, whose files are mapped but for experts, which transformers puts together in memory.
    """
    if not plan.stages:
        return []
    largest = max((stage.load.sizes for stage in plan.stages), key=lambda each: each.num_parameters)
    disk = largest.num_parameters * (_FLOAT32 + _PUBLISHED) / GIB
    memory = largest.num_parameters * _FLOAT32 / GIB if largest.num_experts else 0.0
    found = []
    for stage, name, key, needed in (
        ("prepare_model", "disk", "ephemeral-storage", disk),
        ("export", "memory", "memory", memory),
    ):
        has = _asked_gib(key)
        if needed > _SHARE * has:
            enough = -(-needed / _SHARE // 10) * 10
            found.append(
                f"on Flyte: {stage} takes {needed:,.0f} GiB of {name}, its pod has {has:,.0f}; "
                f"set weights: {{{key}: {enough:.0f}Gi}} in {_PLACE}"
            )
    return found


def _asked_gib(key: str) -> float:
    """What the pods ask for, in GiB."""
    from kubernetes.utils import parse_quantity

    requests = WEIGHTS.requests
    asked = requests.mem if key == "memory" else requests.ephemeral_storage
    return float(parse_quantity(str(asked))) / GIB  # type: ignore[no-untyped-call]


def refuse_small_pods(recipe: Recipe) -> None:
    """Refuses a run on a cluster whose pods cannot hold the recipe's model.

    Nothing is refused where the model's config is not known here.

    Raises:
        ResourceError: Names the stage and the setting.
    """
    for experiment in recipe.experiments:
        if not isinstance(experiment, PipelineRecipe) or not experiment.cluster.num_gpus:
            continue
        try:
            plan = plan_recipe(experiment, accelerator_of(experiment) or ASSUMED)
        except NemoRLError:
            continue
        if problems := pod_problems(plan):
            raise ResourceError(
                "the pods of this cluster are too small for the model",
                expected=f"room for {plan.stages[0].load.sizes.num_parameters / 1e9:.1f} B "
                "parameters in float32",
                got="; ".join(problems),
                fix=f"change {_PLACE} as it says",
            )
