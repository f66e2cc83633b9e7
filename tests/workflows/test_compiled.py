"""Every workflow, task and launch plan as flytekit serializes it for Flyte."""

import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from flyteidl.admin import launch_plan_pb2, workflow_pb2
from flyteidl.admin.task_pb2 import TaskSpec
from flyteidl.core.tasks_pb2 import Resources
from flytekit.configuration import SerializationSettings
from flytekit.core.context_manager import ExecutionState, FlyteContextManager
from flytekit.models.core.execution import WorkflowExecutionPhase as Phase
from google.protobuf.json_format import MessageToDict

from tests.commands import REPOSITORY
from tests.workflows.serialized import SETTINGS, Package, serialized

ResourceName = Resources.ResourceName
ADDRESSES = ["one@example.com", "two@example.com"]
REGISTRY = "registry.invalid/team"
WORKFLOWS = {
    "workflows.cluster_check.check_cluster",
    "workflows.collect_garbage.collect_garbage",
    "workflows.common.begin",
    "workflows.common.conclude",
    "workflows.convert.convert_model",
    "workflows.distill.distill",
    "workflows.dpo.dpo",
    "workflows.evaluate.evaluate_model",
    "workflows.grpo.grpo",
    "workflows.post_train.post_train",
    "workflows.ppo.ppo",
    "workflows.regression.check_regression",
    "workflows.reward_model.reward_model",
    "workflows.sft.sft",
    "workflows.sweep.sweep",
}
PLANS = {"convert_on_demand", "nightly_collection", "nightly_grpo"}
PLANS |= {"weekly_evaluation", "weekly_regression_check"}
# Stage: image, cores and memory of its container, retries, timeout of an attempt in hours.
STAGES = {
    "cache_reference_logprobs": ("laptop", "2", "8Gi", 2, 12),
    "convert": ("light", "8", "64Gi", 2, 6),
    "dpo_iteration": ("laptop", "2", "8Gi", 5, 72),
    "evaluate": ("laptop", "2", "8Gi", 2, 12),
    "evaluate_comparison.compare": ("light", "1", "2Gi", 2, 0.5),
    "evaluate_pairs": ("light", "2", "16Gi", 2, 4),
    "evaluate_questions": ("light", "2", "16Gi", 2, 4),
    "evaluate_reward_model": ("laptop", "2", "8Gi", 2, 12),
    "export": ("light", "8", "64Gi", 2, 6),
    "grpo_iteration": ("laptop", "2", "8Gi", 5, 72),
    "lineage_report": ("light", "1", "2Gi", 2, 0.5),
    "ppo_iteration": ("laptop", "2", "8Gi", 5, 72),
    "prepare_data": ("light", "2", "16Gi", 2, 4),
    "prepare_model": ("light", "8", "64Gi", 2, 6),
    "promote": ("light", "1", "2Gi", 2, 0.5),
    "sample_pairs": ("laptop", "2", "8Gi", 2, 12),
    "summarize_sweep": ("light", "1", "2Gi", 2, 0.5),
    "sweep_point": ("laptop", "2", "8Gi", 5, 72),
    "to_megatron": ("light", "8", "64Gi", 2, 6),
    "tokenize_pairs": ("light", "2", "16Gi", 2, 4),
    "train_reward_model": ("laptop", "2", "8Gi", 5, 72),
    "train_sft": ("laptop", "2", "8Gi", 5, 72),
    "train_student": ("laptop", "2", "8Gi", 5, 72),
}
ON_RAY = {name for name, (image, *_) in STAGES.items() if image == "laptop"}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Package]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NEMO_RL_REGISTRY", REGISTRY)
        patch.setenv("NEMO_RL_NOTIFY", ", ".join(ADDRESSES))
        yield serialized(tmp_path_factory.mktemp("package"), os.environ)


@pytest.mark.slow
def test_every_workflow_and_launch_plan_is_packaged(package: Package) -> None:
    assert set(package.workflows) == WORKFLOWS
    # In addition to the named plans, flytekit makes one for every workflow.
    assert set(package.plans) >= PLANS
    assert set(package.plans) <= PLANS | WORKFLOWS


def test_every_cached_stage_is_in_the_table(package: Package) -> None:
    cached = {
        name.removeprefix("tasks.")
        for name, spec in package.tasks.items()
        if spec.template.metadata.discoverable
    }
    assert {name.split(".")[0] for name in cached} == {name.split(".")[0] for name in STAGES}


@pytest.mark.parametrize("name", STAGES)
def test_stages_reserve_the_resources_of_the_table(package: Package, name: str) -> None:
    from tasks.pods.images import IMAGES, image_name

    image, cores, memory, retries, hours = STAGES[name]
    template = package.stage(name)
    (spec,) = [each for each in IMAGES if each.name == f"nemo-rl-{image}"]
    assert template.container.image == image_name(spec)
    assert template.container.image.startswith(f"{REGISTRY}/nemo-rl-{image}:")
    requests = {entry.name: entry.value for entry in template.container.resources.requests}
    assert (requests[ResourceName.CPU], requests[ResourceName.MEMORY]) == (cores, memory)
    assert template.metadata.retries.retries == retries
    assert template.metadata.timeout.ToSeconds() == hours * 3600
    assert template.metadata.interruptible == (retries != 5), (
        "training stages do not run on spot machines"
    )


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_is_cached_by_its_source(package: Package, name: str) -> None:
    from nemo_rl_core.store.source_digest import source_digest

    metadata = package.stage(name).metadata
    assert metadata.discoverable
    assert metadata.discovery_version == source_digest(f"tasks.{name.split('.', maxsplit=1)[0]}")
    assert metadata.cache_serializable == (STAGES[name][4] != 0.5)
    assert metadata.generates_deck.value


@pytest.mark.parametrize("name", STAGES)
def test_only_stages_with_workers_have_a_ray_cluster(package: Package, name: str) -> None:
    template = package.stage(name)
    assert template.type == ("ray" if name in ON_RAY else "python-task")
    assert (len(template.custom) > 0) == (name in ON_RAY)


def test_the_interface_is_typed(package: Package) -> None:
    interface = package.stage("grpo_iteration").interface
    assert set(interface.inputs.variables) == {
        "config", "start", "reference", "train", "iteration", "reward_model", "validation",
    }  # fmt: skip
    assert interface.inputs.variables["iteration"].type.simple == 1  # INTEGER
    checkpoint = MessageToDict(interface.outputs.variables["o0"].type)
    assert checkpoint["structure"]["tag"] == "CheckpointArtifact"
    config = MessageToDict(interface.inputs.variables["config"].type)
    assert config["structure"]["tag"] == "GRPOTaskConfig"
    # One value each: the schema of a nested recipe, or of its fields, fills megabytes.
    assert not {"metadata", "dataclassType"} & {*checkpoint, *config, *config["structure"]}


def test_the_graph_of_the_main_job(package: Package) -> None:
    nodes = package.workflows["workflows.grpo.grpo"].template.nodes
    names = {
        node.id: (node.task_node.reference_id.name or node.workflow_node.sub_workflow_ref.name)
        for node in nodes
        if node.id not in {"start-node", "end-node"}
    }
    edges = {(names[up], names[node.id]) for node in nodes for up in node.upstream_node_ids}
    assert edges == {
        ("tasks.plan_tasks.grpo.plan_grpo", "workflows.common.begin"),
        ("tasks.plan_tasks.grpo.plan_grpo", "workflows.grpo.measure_base"),
        ("tasks.plan_tasks.grpo.plan_grpo", "workflows.common.measure"),
        ("tasks.plan_tasks.grpo.plan_grpo", "workflows.grpo.iterate"),
        ("tasks.plan_tasks.grpo.plan_grpo", "workflows.common.conclude"),
        ("workflows.common.begin", "workflows.grpo.measure_base"),
        ("workflows.common.begin", "workflows.common.measure"),
        ("workflows.common.begin", "workflows.grpo.iterate"),
        ("workflows.common.begin", "workflows.common.conclude"),
        ("workflows.common.measure", "workflows.common.conclude"),
        ("workflows.grpo.iterate", "workflows.common.conclude"),
    }


def test_dynamic_stages_carry_the_images_of_stages_they_start(package: Package) -> None:
    from tasks.pods.images import IMAGES, image_name

    images = _carried(package).image_config.images
    assert {(image.name, image.full) for image in images} >= {
        (spec.id, image_name(spec)) for spec in IMAGES
    }


def _carried(package: Package) -> SerializationSettings:
    """Returns the registration settings in the container of a dynamic stage."""
    container = package.tasks["workflows.grpo.iterate"].template.container
    (carried,) = [entry.value for entry in container.env if entry.key == "_F_SS_C"]
    return SerializationSettings.from_transport(carried)


SHAPES: dict[str, tuple[dict[str, Any], list[tuple[str, int, dict[str, str], str]]]] = {
    "laptop": ({}, [("workers", 1, {"cpu": "2", "memory": "16Gi"}, "6Gi")]),
    "one_gpu": (
        {"shape": "one_gpu", "accelerator": "nvidia-l4"},
        [("gpus-1", 1, {"cpu": "11", "memory": "120Gi", "nvidia.com/gpu": "1"}, "48Gi")],
    ),
    "node_8gpu": (
        {"shape": "node_8gpu"},
        [("gpus-8", 1, {"cpu": "88", "memory": "960Gi", "nvidia.com/gpu": "8"}, "384Gi")],
    ),
    "cluster": (
        {"shape": "cluster", "num_workers": 36, "accelerator": "nvidia-h100"},
        [
            ("gpus-8", 4, {"cpu": "88", "memory": "960Gi", "nvidia.com/gpu": "8"}, "384Gi"),
            ("gpus-4", 1, {"cpu": "44", "memory": "480Gi", "nvidia.com/gpu": "4"}, "192Gi"),
        ],
    ),
    "own_engines": (
        {"shape": "cluster", "num_workers": 12},
        [
            ("gpus-8", 2, {"cpu": "88", "memory": "960Gi", "nvidia.com/gpu": "8"}, "384Gi"),
            ("gpus-2", 1, {"cpu": "22", "memory": "240Gi", "nvidia.com/gpu": "2"}, "96Gi"),
        ],
    ),
}
OTHERS = {"own_engines": {"generation": {"placement": {"own": 6}, "tensor_parallel_size": 2}}}


@pytest.mark.parametrize("shape", SHAPES)
def test_the_recipe_chooses_the_shape_inside_a_dynamic(package: Package, shape: str) -> None:
    """A dynamic stage compiled as in its container yields the requested RayJob."""
    from workflows.grpo import GRPORecipe

    section, groups = SHAPES[shape]
    words = {"recipe": "grpo_arithmetic", "cluster": section, **OTHERS.get(shape, {})}
    config = (recipe := GRPORecipe.model_validate(words)).cluster
    template = _stage_in_a_dynamic(recipe, _carried(package))
    ray = MessageToDict(template.custom)["rayCluster"]
    assert MessageToDict(template.custom)["shutdownAfterJobFinishes"]
    assert not ray.get("enableAutoscaling")

    head = ray["headGroupSpec"]
    assert head["rayStartParams"] == {"num-cpus": "0"}
    head_pod = head["k8sPod"]["podSpec"]
    assert "nvidia.com/gpu" not in head_pod["containers"][0]["resources"]["requests"]
    assert "nodeSelector" not in head_pod
    assert head_pod["terminationGracePeriodSeconds"] == 120
    hook = head_pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert hook[:2] == ["sh", "-c"] and "kill -TERM" in hook[2]
    assert _requests(template) == ["2", "8Gi"], (
        "small, as it also applies to the head and the submitter"
    )

    assert len(ray["workerGroupSpec"]) == len(groups)
    for group, (name, replicas, requests, shared) in zip(
        ray["workerGroupSpec"], groups, strict=True
    ):
        assert (group["groupName"], group["replicas"]) == (name, replicas)
        assert group["minReplicas"] == group["maxReplicas"] == replicas
        assert group["k8sPod"]["primaryContainerName"] == "ray-worker"
        _check_worker_pod(group["k8sPod"]["podSpec"], requests, shared, config.accelerator)
    on = "" if shape == "laptop" else f" shape {config.shape}:{config.num_workers}:"
    assert f"task-name grpo_iteration{on}" in " ".join(template.container.args)
    assert template.id.name.startswith("tasks.")
    image = "laptop" if shape == "laptop" else "training"
    assert template.container.image.startswith(f"{REGISTRY}/nemo-rl-{image}:")


def _check_worker_pod(
    pod: dict[str, Any], requests: dict[str, str], shared: str, accelerator: str | None
) -> None:
    container = pod["containers"][0]
    assert requests.items() <= container["resources"]["requests"].items()
    assert container["resources"]["limits"] == container["resources"]["requests"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["shared-memory"]["emptyDir"] == {"medium": "Memory", "sizeLimit": shared}
    assert {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]} == {
        "shared-memory": "/dev/shm",
        "store": "/var/nemo_rl",
    }
    assert pod["securityContext"]["runAsNonRoot"]
    on_gpus = "nvidia.com/gpu" in requests
    tolerated = [each["key"] for each in pod.get("tolerations", [])]
    assert tolerated == (["nvidia.com/gpu"] if on_gpus else [])
    selector = {"k8s.amazonaws.com/accelerator": accelerator} if accelerator else None
    assert pod.get("nodeSelector") == selector


def _requests(template: Any) -> list[str]:
    return [entry.value for entry in template.container.resources.requests]


def _stage_in_a_dynamic(recipe: Any, settings: SerializationSettings) -> Any:
    """Returns the template of the training stage in the compiled `workflows.grpo.iterate`."""
    from tasks.artifacts import CheckpointArtifact, DatasetArtifact
    from tasks.plan_tasks.grpo import plan_grpo
    from workflows.grpo import iterate

    folder = {"directory": {"path": "s3://bucket/folder"}, "stage": "x", "content_hash": "0" * 64}
    checkpoint = CheckpointArtifact.model_validate(folder)
    rows = DatasetArtifact.model_validate(folder)
    stage = plan_grpo.task_function(config=recipe).grpo
    iterate._wf = None  # a container compiles its dynamic stage once, and flytekit keeps that
    ctx = FlyteContextManager.current_context()
    on_cluster = ctx.new_execution_state().with_params(mode=ExecutionState.Mode.TASK_EXECUTION)
    context = ctx.with_execution_state(on_cluster).with_serialization_settings(settings)
    with FlyteContextManager.with_context(context) as inner:
        spec = iterate.compile_into_workflow(
            inner,
            iterate.task_function,
            config=stage,
            start=checkpoint,
            train=rows,
            validation=rows,
            num_iterations=3,
        )
    assert [node.id for node in spec.nodes] == ["dn0", "dn1", "dn2"]
    (template,) = {task.id.name: task for task in spec.tasks}.values()
    assert spec.nodes[0].task_node.reference_id.name == template.id.name
    return template.to_flyte_idl()


def test_a_container_resolves_the_stage_of_its_shape(package: Package) -> None:
    from flytekit.core.base_task import TaskResolverMixin
    from flytekit.tools.module_loader import load_object_from_module

    from nemo_rl_core.config.cluster import ClusterConfig
    from nemo_rl_core.config.generation import SamplingConfig
    from tasks.evaluate import evaluate
    from tasks.pods.shapes import laptop, one_gpu, shape_of

    node = ClusterConfig(shape="node_8gpu")
    nodes = ClusterConfig(shape="cluster", num_workers=1024, accelerator="nvidia-h200")
    with_engines = shape_of(
        nodes, SamplingConfig.model_validate({"placement": {"own": 12}}).dedicated_bundles
    )
    for shape in (one_gpu("nvidia-h100"), shape_of(node), shape_of(nodes), with_engines, laptop(4)):
        stage = evaluate.on_shape(shape)
        command = stage.get_default_command(SETTINGS)
        location, arguments = command[command.index("--resolver") + 1], command[-6:]
        assert all(word == word.strip("'\"{} ") for word in arguments), "KubeRay joins them"
        resolver = load_object_from_module(location)
        assert isinstance(resolver, TaskResolverMixin)
        assert resolver.load_task(arguments) is stage
        assert stage.shape == shape
        assert stage.metadata.cache_version == evaluate.metadata.cache_version
    assert (shape_of(nodes).num_gpus, with_engines.num_gpus) == (1024, 1036)
    assert with_engines.name == "cluster:1024:8:nvidia-h200:8x129-4x1"
    assert evaluate.shape == laptop()


def test_a_shape_cannot_be_requested_before_the_recipe_is_known() -> None:
    from nemo_rl_core.errors import ConfigError
    from tasks.evaluate import evaluate

    with pytest.raises(ConfigError, match="before its recipe is known") as caught:
        evaluate.on(object())
    assert "@dynamic" in caught.value.fix


def test_accelerators_exist_in_flytekit() -> None:
    from typing import get_args

    from flytekit.extras import accelerators

    from nemo_rl_core.config.cluster import AcceleratorName

    devices = {
        each.to_flyte_idl().device
        for each in vars(accelerators).values()
        if isinstance(each, accelerators.BaseAccelerator)
    }
    assert set(get_args(AcceleratorName)) <= devices


def test_every_scheduled_plan_binds_all_inputs(package: Package) -> None:
    """flytekit would register a plan with unbound inputs, and Flyte would never start it."""
    for name, plan in package.plans.items():
        if not plan.spec.entity_metadata.schedule.cron_schedule.schedule:
            continue
        workflow = package.workflows[plan.spec.workflow_id.name].template
        bound = set(plan.spec.fixed_inputs.literals) | {
            key
            for key, parameter in plan.spec.default_inputs.parameters.items()
            if parameter.HasField("default")
        }
        assert bound == set(workflow.interface.inputs.variables), name


SCHEDULES = {
    "nightly_grpo": ("workflows.grpo.grpo", "0 2 * * *", True, 4),
    "nightly_collection": ("workflows.collect_garbage.collect_garbage", "0 4 * * *", True, 4),
    "weekly_evaluation": ("workflows.evaluate.evaluate_model", "0 6 * * 1", True, 4),
    "weekly_regression_check": ("workflows.regression.check_regression", "0 8 * * 1", True, 4),
    "convert_on_demand": ("workflows.convert.convert_model", "", False, 8),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_launch_plans(package: Package, name: str) -> None:
    workflow, cron, bounded, parallelism = SCHEDULES[name]
    spec = package.plans[name].spec
    assert spec.workflow_id.name == workflow
    assert spec.entity_metadata.schedule.cron_schedule.schedule == cron
    assert spec.max_parallelism == parallelism
    assert spec.concurrency_policy.max == (1 if bounded else 0)
    assert spec.concurrency_policy.behavior == (
        launch_plan_pb2.CONCURRENCY_LIMIT_BEHAVIOR_SKIP if bounded else 0
    )
    (notification,) = spec.entity_metadata.notifications
    assert list(notification.email.recipients_email) == ADDRESSES
    assert set(notification.phases) >= {Phase.FAILED, Phase.TIMED_OUT, Phase.ABORTED}
    assert (Phase.SUCCEEDED in notification.phases) == (name == "nightly_grpo")
    assert spec.labels.values["app.kubernetes.io/part-of"] == "nemo-rl-flow"
    assert spec.annotations.values["nemo-rl-flow/about"]
    assert not spec.fixed_inputs.literals, "each may be launched with another recipe"


def test_no_stage_contains_a_path_of_this_machine(package: Package) -> None:
    for spec in [*package.tasks.values(), *package.workflows.values()]:
        assert str(REPOSITORY) not in str(spec.template)


@pytest.mark.slow
def test_the_package_command(tmp_path: Path) -> None:
    """`make package` writes what the other tests check, together with the code."""
    target = tmp_path / "flow.tgz"
    environment = {
        **os.environ,
        "NEMO_RL_REGISTRY": REGISTRY,
        "NEMO_RL_HOME": str(tmp_path / "store"),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(REPOSITORY),
    }
    subprocess.run(
        ["bash", "deployment/register.sh", "--package", str(target)],
        cwd=REPOSITORY,
        env=environment,
        check=True,
        timeout=500,
    )
    plans, workflows = set(), set()
    with tarfile.open(target) as tar:
        # Flyte's clients accept 4 MB per workflow; all workflows together are far below that.
        assert sum(each.size for each in tar if each.name.endswith(".pb")) < 500_000
        for member in tar.getmembers():
            content = tar.extractfile(member)
            assert content is not None
            if member.name.endswith("_3.pb"):
                plans.add(launch_plan_pb2.LaunchPlan.FromString(content.read()).id.name)
            elif member.name.endswith("_2.pb"):
                spec = workflow_pb2.WorkflowSpec.FromString(content.read())
                workflows.add(spec.template.id.name)
            elif "grpo_iteration" in member.name:
                arguments = list(TaskSpec.FromString(content.read()).template.container.args)
                assert (
                    arguments[arguments.index("--dest-dir") + 1] == "/home/nemo"
                )  # home of the image's user
                assert arguments[0] == "pyflyte-fast-execute"
            elif member.name.startswith("fast"):
                with tarfile.open(fileobj=content) as code:
                    names = {name.removeprefix("./") for name in code.getnames()}
    assert plans == PLANS | WORKFLOWS
    assert workflows == WORKFLOWS
    assert {"workflows/grpo.py", "workflows/recipes/grpo_arithmetic.yaml"} <= names
    assert not any(name.startswith((".venv", ".git/")) for name in names)
