"""The cached stages, their inputs, and the location of their configs in the plans of a recipe."""

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from flytekit.core.python_function_task import PythonFunctionTask

import tasks
from tasks.plan_tasks.convert import plan_convert
from tasks.plan_tasks.distillation import plan_distillation
from tasks.plan_tasks.dpo import plan_dpo
from tasks.plan_tasks.evaluate import plan_evaluate
from tasks.plan_tasks.post_train import plan_post_train
from tasks.plan_tasks.ppo import plan_ppo
from tasks.plan_tasks.sweep import plan_sweep
from tasks.recipes.convert import ConvertRecipe
from tasks.recipes.distillation import DistillationRecipe
from tasks.recipes.dpo import DPORecipe
from tasks.recipes.evaluate import EvaluateRecipe
from tasks.recipes.grpo import GRPORecipe
from tasks.recipes.post_train import PostTrainRecipe
from tasks.recipes.ppo import PPORecipe
from tasks.recipes.sweep import SweepRecipe

PLANS: dict[str, tuple[Any, Callable[..., Any]]] = {
    "post_train": (PostTrainRecipe, plan_post_train),
    "ppo": (PPORecipe, plan_ppo),
    "distill": (DistillationRecipe, plan_distillation),
    "convert": (ConvertRecipe, plan_convert),
    "evaluate": (EvaluateRecipe, plan_evaluate),
    "dpo": (DPORecipe, plan_dpo),
    "sweep": (SweepRecipe, plan_sweep),
}
_START = "train_sft"


@dataclass(frozen=True)
class Node:
    """A stage in its workflow.

    Attributes:
        config: Recipe and path in its plan of the stage's config; empty if it has none.
        reads: Artifacts by name of the input: `stage` or `stage.output`.
        constants: Plain inputs.
    """

    config: str = ""
    reads: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)


def _trained(config: str, **reads: str) -> Node:
    rows = {"train": "prepare_data.train", "validation": "prepare_data.validation"}
    return Node(config, {**rows, **reads})


GRAPH: dict[str, Node] = {
    "prepare_model": Node("post_train.model"),
    "prepare_data": Node("post_train.data", {"tokenizer": "prepare_model.tokenizer"}),
    "train_sft": _trained("post_train.sft", base="prepare_model.base"),
    "sample_pairs": Node(
        "post_train.pairs.rollouts",
        {"checkpoint": _START, "prompts": "prepare_data.train"},
        {"iteration": 1},
    ),
    "tokenize_pairs": Node(
        "", {"tokenizer": "prepare_model.tokenizer", "rows": "prepare_data.train"}
    ),
    "cache_reference_logprobs": Node(
        "post_train.dpo.reference", {"reference": _START, "pairs": "sample_pairs"}
    ),
    "dpo_iteration": Node(
        "post_train.dpo.dpo",
        {
            "start": _START,
            "reference": _START,
            "pairs": "sample_pairs",
            "logprobs": "cache_reference_logprobs",
        },
        {"iteration": 1},
    ),
    "train_reward_model": Node(
        "post_train.reward_model", {"base": _START, "pairs": "sample_pairs"}
    ),
    "evaluate_reward_model": Node(
        "post_train.reward_model_evaluation",
        {"checkpoint": "train_reward_model", "pairs": "sample_pairs"},
    ),
    "grpo_iteration": Node(
        "post_train.grpo",
        {"start": _START, "reference": _START, "train": "prepare_data.train"}
        | {"validation": "prepare_data.validation"},
        {"iteration": 1},
    ),
    "ppo_iteration": Node(
        "ppo.ppo",
        {"start": _START, "reference": _START, "train": "prepare_data.train"},
        {"iteration": 1},
    ),
    "train_student": Node(
        "distill.distillation",
        {"student": _START, "teacher": "prepare_model.base", "train": "prepare_data.train"},
    ),
    "evaluate": Node(
        "post_train.evaluation",
        {"checkpoint": "grpo_iteration", "validation": "prepare_data.validation"},
    ),
    "promote": Node(
        "post_train.verdict.promotion",
        {
            "incumbent": _START,
            "candidate": "grpo_iteration",
            "before": "evaluate",
            "after": "evaluate",
        },
    ),
    "export": Node(
        "post_train.export",
        {"start": _START, "trained": "grpo_iteration", "decision": "promote"},
    ),
    "lineage_report": Node("", {"model": "export"}),
    "to_megatron": Node("convert.megatron", {"checkpoint": "prepare_model.base"}),
    "convert": Node(
        "convert.proof", {"checkpoint": "to_megatron", "rows": "prepare_data.validation"}
    ),
    "evaluate_questions": Node("evaluate.questions", {"tokenizer": "prepare_model.tokenizer"}),
    "sweep_point": Node(
        "sweep.points.0.point",
        {"start": _START, "train": "prepare_data.train"}
        | {"validation": "prepare_data.validation", "questions": "prepare_data.validation"},
    ),
    "summarize_sweep": Node("sweep.summary", {"reports": "sweep_point"}),
    "compare": Node("evaluate.baseline.comparison", {"before": "evaluate", "after": "evaluate"}),
    "evaluate_pairs": Node(
        "dpo.verdict.pairs.evaluation",
        {"checkpoint": "dpo_iteration", "pairs": "sample_pairs"}
        | {"start": "cache_reference_logprobs", "trained": "cache_reference_logprobs"},
    ),
}
"""Every stage once, after those whose outputs it reads."""


@cache
def stages() -> dict[str, PythonFunctionTask]:
    """Returns every cached task of the package `tasks`, by name."""
    cached = {}
    for module in pkgutil.iter_modules(tasks.__path__, "tasks."):
        for task in vars(importlib.import_module(module.name)).values():
            if isinstance(task, PythonFunctionTask) and task.metadata.cache:
                cached[task.name.rpartition(".")[2]] = task
    return cached


def module_of(task: PythonFunctionTask) -> str:
    """Returns the module that defines a stage, whose source is in its key."""
    return str(task.task_function.__module__)


def plans_of(recipe: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the output of every plan in `PLANS`.

    Args:
        recipe: Recipe with the keys of all plans; each plan takes those that it has.
        over: Values of each field of the sweep.
    """
    outputs = {}
    for name, (experiment, plan) in PLANS.items():
        words = {key: value for key, value in recipe.items() if key in experiment.model_fields}
        if name == "convert":
            words = {**words, "training": {"backend": "megatron"}}
        if name == "dpo":
            words = {**words, "pairs": {"kind": "data"}, "sft": None}
        if name == "sweep":
            base = {key: value for key, value in recipe.items() if key in GRPORecipe.model_fields}
            words = {"base": base, "over": over}
        outputs[name] = plan(config=experiment.model_validate(words))
    return outputs


def config_of(node: Node, plans: Mapping[str, Any]) -> Any:
    """Returns the config of a stage from its plan."""
    plan, *fields = node.config.split(".")
    value = plans[plan]
    for each in fields:
        value = value[int(each)] if each.isdecimal() else getattr(value, each)
    return value
