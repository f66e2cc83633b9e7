"""Computes from config.json what a model needs in a Flyte cluster's pods without workers."""

from nemo_rl_core.errors import NemoRLError, ResourceError
from nemo_rl_core.planning.engine_memory import GIB
from tasks.planning.gpu_plan import ASSUMED, RecipePlan, accelerator_of, plan_recipe
from tasks.pods.resources import WEIGHTS
from tasks.recipes.common import Recipe

_FLOAT32, _PUBLISHED = 4, 2
"""Bytes of a weight in the store, and of most models on the hub, whose files are kept, too."""
_USABLE_SHARE = 0.9
"""Share of a pod that weights may take."""
_POD_SETTINGS = "deployment/pods.yaml"


def pod_problems(plan: RecipePlan) -> list[str]:
    """Returns why the pods that fetch and export a model are too small for it, a sentence each.

    `prepare_model` reads one tensor at a time and keeps both sets of files; `export` loads the
    model, with mapped files except for experts, which transformers merges in memory.
    """
    if not plan.stages:
        return []
    largest = max((stage.load.sizes for stage in plan.stages), key=lambda each: each.num_parameters)
    disk = largest.num_parameters * (_FLOAT32 + _PUBLISHED) / GIB
    memory = largest.num_parameters * _FLOAT32 / GIB if largest.num_experts else 0.0
    problems = []
    for stage, name, key, needed in (
        ("prepare_model", "disk", "ephemeral-storage", disk),
        ("export", "memory", "memory", memory),
    ):
        requested = _requested_gib(key)
        if needed > _USABLE_SHARE * requested:
            enough = -(-needed / _USABLE_SHARE // 10) * 10
            problems.append(
                f"on Flyte: {stage} takes {needed:,.0f} GiB of {name}, its pod has "
                f"{requested:,.0f}; set weights: {{{key}: {enough:.0f}Gi}} in {_POD_SETTINGS}"
            )
    return problems


def _requested_gib(key: str) -> float:
    from kubernetes.utils import parse_quantity

    requests = WEIGHTS.requests
    quantity = requests.mem if key == "memory" else requests.ephemeral_storage
    return float(parse_quantity(str(quantity))) / GIB  # type: ignore[no-untyped-call]


def refuse_small_pods(recipe: Recipe) -> None:
    """Refuses a run on a cluster whose pods cannot hold the recipe's model.

    The recipe passes if the model's config is not known here.
    """
    for experiment in recipe.experiments:
        if not experiment.cluster.num_gpus:
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
                fix=f"change {_POD_SETTINGS} as shown above",
            )
