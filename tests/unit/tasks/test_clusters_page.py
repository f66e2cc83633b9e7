"""The tables of `docs/cluster*.md` show what the code requests from a cluster."""

import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from nemo_rl_core.config.cluster import ClusterConfig
from tasks.pods.node_room import in_words, other_pods, ray_pods
from tasks.pods.resources import DATA, GENERATE, PLAIN, SCORE, TRAIN, WEIGHTS
from tasks.pods.shapes import shape_of
from tests.schemas import schema

DOCS = Path(__file__).resolve().parents[3] / "docs"
PAGE = "\n".join(path.read_text() for path in sorted(DOCS.glob("cluster*.md")))


def table(header: str) -> list[list[str]]:
    """The cells of the table that begins with this header."""
    lines = PAGE[PAGE.index(header) :].splitlines()[2:]
    rows = lines[: next(i for i, line in enumerate(lines) if not line.startswith("|"))]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def shape_rows() -> list[tuple[dict[str, Any], int, str]]:
    rows = table("| `cluster` | worker pods")
    named = {yaml.safe_load(row[0].strip("`"))["shape"]: row[2] for row in rows}
    matching = []
    for written, count, each in rows:
        same_as = re.fullmatch(r"as `(\w+)`", each)
        cluster = yaml.safe_load(written.strip("`"))
        matching.append((cluster, int(count), named[same_as[1]] if same_as else each))
    return matching


def test_every_shape_is_shown() -> None:
    shapes = set(ClusterConfig.model_fields["shape"].annotation.__args__)
    assert {cluster["shape"] for cluster, _, _ in shape_rows()} == shapes


@pytest.mark.parametrize(("cluster", "count", "each"), shape_rows())
def test_shapes_are_as_shown(cluster: dict[str, Any], count: int, each: str) -> None:
    (nodes,) = shape_of(ClusterConfig.model_validate(cluster)).nodes
    assert nodes.count == count
    cores, memory = re.search(r"(\d+) cores, (\d+) GiB", each).groups()
    assert (nodes.resources.cpu, nodes.resources.mem) == (cores, f"{memory}Gi")
    gpus = re.match(r"(\d+) GPUs?", each)
    assert nodes.num_gpus == (int(gpus[1]) if gpus else 0)
    assert ("no GPU" in each) == (gpus is None)
    shared = re.search(r"/dev/shm (\d+) GiB", each)
    if shared:
        assert nodes.shared_memory_gib == int(shared[1])


def test_every_kind_of_pod_is_as_shown() -> None:
    eight = ClusterConfig(shape="node_8gpu", num_workers=8)
    shapes = ClusterConfig(), ClusterConfig(lifetime="run"), ClusterConfig(shape="one_gpu"), eight
    sizes = [size for shape in shapes for size, _ in ray_pods(shape)] + other_pods()
    expected = {size.name: (in_words(size.requests), size.setting) for size in sizes}
    rows = table("| pod | asks for")
    shown = {row[0].partition(": ")[0]: row[1:] for row in rows}
    assert shown.keys() == expected.keys()
    for name, (asked, setting) in expected.items():
        assert shown[name][0] == asked
        assert shown[name][1].replace("`", "") in (setting, "the same")


KINDS = {
    "compares, decides, reports": [PLAIN],
    "reads and checks data": [DATA],
    "holds full weights: fetch, convert, export": [WEIGHTS],
    "samples, scores": [GENERATE, SCORE],
    "trains": [TRAIN],
}


def test_every_kind_of_stage_is_as_shown() -> None:
    shown = {row[0]: row[1:] for row in table("| kind of stage | retries")}
    assert shown.keys() == KINDS.keys()
    for name, kinds in KINDS.items():
        for kind in kinds:
            amount, unit = shown[name][1].split()
            assert kind.timeout == timedelta(**{unit: int(amount)})
            assert kind.retries == int(shown[name][0])
            on_spot = "with `spot_training`" if kind.resumes else "no"
            assert ("yes" if kind.interruptible else on_spot) == shown[name][2]


def test_every_launch_plan_is_as_shown() -> None:
    from flytekit import LaunchPlan

    from workflows import launch_plans

    plans = {
        name: plan for name, plan in vars(launch_plans).items() if isinstance(plan, LaunchPlan)
    }
    shown = {row[0].strip("`"): row[1] for row in table("| launch plan | when")}
    assert shown.keys() == plans.keys()
    for name, when in shown.items():
        schedule = plans[name].schedule
        if schedule is None:
            assert when == "on request"
        else:
            minute, hour, _, _, weekday = schedule.cron_schedule.schedule.split()
            day = {"*": "", "1": "Monday "}[weekday]
            assert when == f"{day}{int(hour):02}:{int(minute):02}"


def test_every_command_names_project_and_domain() -> None:
    """A command without one could refer to another namespace than the command before it."""
    blocks = re.findall(r"^ *```sh\n(.*?)^ *```$", PAGE, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    flyte = re.compile(
        r"(pyflyte .*run --remote|register\.sh|nemo-rl cluster-check|files --archive)"
    )
    matching = [line for line in lines if flyte.search(line)]
    assert len(matching) >= 4
    assert [line for line in matching if "--project" not in line or "--domain" not in line] == []


def test_charts_are_installed_in_the_versions_that_the_schemas_are_of() -> None:
    flyte, kuberay = schema("flyte")["version"], schema("kuberay")["version"]
    kueue = schema("kueue")["version"].removeprefix("v")
    installed = dict(re.findall(r"helm install \S+ (\S+) --version (\S+)", PAGE))
    assert installed.pop("oci://registry.k8s.io/kueue/charts/kueue") == kueue
    assert installed["flyteorg/flyte-binary"] == flyte
    assert installed["kuberay/kuberay-operator"] == kuberay.removeprefix("v")
    assert f"flytectl demo start --version {flyte}\n" in PAGE
    repositories = set(re.findall(r"helm repo add (\w+) https://", PAGE))
    assert {chart.partition("/")[0] for chart in installed} <= repositories


def test_time_limits_of_pods_are_as_shown() -> None:
    from tasks.ray_cluster import ray_stage
    from tasks.ray_cluster.experimental import run_cluster

    shown = {row[0]: row[1] for row in table("| | after | what happens")}
    assert shown["`cluster: {lifetime: run}`"] == f"{run_cluster._WAIT_SECONDS / 3600:.0f} hours"
    assert f"their Ray has another {ray_stage._WAIT_SECONDS / 60:.0f} minutes to join" in PAGE


def test_every_variable_of_stages_is_shown() -> None:
    from nemo_rl_core.store.aliases import ALIASES
    from nemo_rl_core.telemetry.budget import LIMIT
    from nemo_rl_core.telemetry.notices import NOTIFY, SMTP
    from tasks.ray_cluster.ray_stage import CLUSTER_GPUS

    rows = table("| variable | what | where")
    shown = {name: row[2] for row in rows for name in re.findall(r"`([A-Z_]+)`", row[0])}
    values, secret = {ALIASES, LIMIT, CLUSTER_GPUS, "NEMO_RL_TRACKING"}, {NOTIFY, SMTP}
    assert {name for name, where in shown.items() if where == "Flyte's values"} == values
    assert {name for name, where in shown.items() if where == "secret"} >= secret
