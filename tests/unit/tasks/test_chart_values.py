"""The values of the charts and Ray clusters are accepted by the pinned versions.

Helm accepts any key, and Flyte ignores those of a section that it does not know. The trees of
`tests/schemas` are those of the versions that `docs/cluster-setup.md` names.
"""

import json
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from typing import Any

import pytest
import yaml

from nemo_rl_core.store.aliases import ALIASES
from tasks.pods.pods import SECRETS
from tasks.ray_cluster.ray_stage import CLUSTER_GPUS
from tests.schemas import problems, schema
from tests.unit.tasks.test_deployment import documents

FLYTE, KUBERAY, KUEUE = schema("flyte"), schema("kuberay"), schema("kueue")
PROPELLER_NEEDS = {
    "rayjobs": {"create", "get", "list", "watch", "update", "patch", "delete"},
}
"""Requests of Flyte's plugin manager for the object of its Ray plugin: it creates it, its informer
lists and watches, its finalizer updates and patches, and an abort deletes."""


def config_problems(inline: dict[str, Any]) -> Iterator[str]:
    """Returns the parts of Flyte's configuration that it does not accept."""
    for section, values in inline.items():
        if section == "plugins":
            for plugin, below in values.items():
                name = f"plugins.{plugin}"
                yield from section_problems(name, below)
        else:
            yield from section_problems(section, values)


def section_problems(name: str, values: Any) -> Iterator[str]:
    if name in FLYTE["config"]:
        yield from problems(values, FLYTE["config"][name], name)
    else:
        yield f"{name}: no such section"


def chart_problems(values: dict[str, Any]) -> Iterator[str]:
    """Returns the values that the chart refuses, and the configuration that Flyte refuses."""
    yield from problems(values, FLYTE["chart"])
    yield from config_problems(values["configuration"].get("inline", {}))


@pytest.mark.parametrize("name", ["production/values-s3.yaml", "production/values-gcs.yaml"])
def test_flyte_accepts_every_key(name: str) -> None:
    (values,) = documents(name)
    assert list(chart_problems(values)) == []


def test_an_unknown_key_or_type_is_found() -> None:
    (values,) = documents("production/values-s3.yaml")
    inline = values["configuration"]["inline"]
    inline["task_resources"]["defaults"]["storage"] = "1Gi"  # a key of earlier versions
    inline["plugins"]["ray"]["ttlSecondAfterFinished"] = 10
    inline["plugins"]["ray"]["ttlSecondsAfterFinished"] = "10 s"
    inline["plugins"]["k8s"]["interruptible-tolerations"][0]["operater"] = "Exists"
    inline["plugins"]["spark"] = {}
    inline["propeller"]["workers"] = True
    values["rbac"]["extraRule"] = []
    del values["rbac"]["extraRules"][0]["verbs"]
    values["deployment"]["extraVolumes"][0]["secret"] = "nemo-rl-database"
    assert list(chart_problems(values)) == [
        "deployment.extraVolumes[0].secret: 'nemo-rl-database' is not a map",
        "rbac.extraRules[0].verbs: is missing",
        "rbac.extraRule: no such key",
        "propeller.workers: True is not of type integer",
        "task_resources.defaults.storage: no such key",
        "plugins.k8s.interruptible-tolerations[0].operater: no such key",
        "plugins.ray.ttlSecondsAfterFinished: '10 s' is not of type integer",
        "plugins.ray.ttlSecondAfterFinished: no such key",
        "plugins.spark: no such section",
    ]


def test_schedules_are_in_utc() -> None:
    """`nemo-rl schedule` prints times in UTC; Flyte's default is the zone of the scheduler."""
    (values,) = documents("production/values-s3.yaml")
    scheduler = values["configuration"]["inline"]["scheduler"]["workflowExecutor"]
    assert scheduler["local"]["useUTCTz"] is True


def test_the_default_project_of_commands_is_created() -> None:
    """The chart's default project differs; without this one, files have no namespace."""
    from tasks.cli.machine.cluster_check import cluster_check

    (values,) = documents("production/values-s3.yaml")
    admin = values["flyte-core-components"]["admin"]
    (project,) = [each.default for each in cluster_check.params if each.name == "project"]
    assert admin["seedProjects"] == [project] == [admin["seedProjectsWithDetails"][0]["name"]]
    assert FLYTE["chart"]["flyte-core-components"]["admin"]["seedProjects"] == ["any"]


def allowed(rules: list[dict[str, Any]], group: str) -> dict[str, set[str]]:
    """The verbs on each resource of a group of the API."""
    verbs_by_resource: dict[str, set[str]] = {}
    for rule in rules:
        if group in rule["apiGroups"]:
            for resource in rule["resources"]:
                verbs_by_resource.setdefault(resource, set()).update(rule["verbs"])
    return verbs_by_resource


def test_propeller_has_the_rights_of_its_plugins() -> None:
    (values,) = documents("production/values-s3.yaml")
    rules = values["rbac"]["extraRules"]
    for resource, verbs in PROPELLER_NEEDS.items():
        assert verbs <= allowed(rules, "ray.io").get(resource, set()), resource
    # The role of the chart covers pods, but no Ray resources.
    assert {"create", "watch"} <= allowed(FLYTE["rules"], "")["pods"]
    assert allowed(FLYTE["rules"], "ray.io") == {}


OF_RAYJOBS = {
    *("namespace", "podRFC3339StartTime", "podRFC3339FinishTime", "podUnixStartTime"),
    *("podUnixFinishTime", "taskID", "taskVersion", "taskProject", "taskDomain"),
    *("taskRetryAttempt", "nodeID", "executionName", "executionProject", "executionDomain"),
    *("generatedName", "rayClusterName", "rayJobID"),
}
"""Variables of links that Flyte's Ray plugin fills in: it knows no pod. Others stay in the link."""


def by_helm(text: str) -> str:
    """Returns what Helm makes of a string in `configuration.inline`, a template."""
    made = re.sub(r"\{\{ `(.*?)` \}\}", r"<\1>", text)
    assert "{{" not in re.sub(r"<\{\{.*?\}\}>", "", made), f"Helm would evaluate {text}"
    return made.replace("<{{", "{{").replace("}}>", "}}")


def log_links(name: str) -> dict[str, list[str]]:
    """The addresses of the links of plain pods and of RayJobs."""
    (values,) = documents(f"production/{name}")
    plugins = values["configuration"]["inline"]["plugins"]
    links = {"pods": plugins["logs"], "rayjobs": plugins["ray"]["logs"]}
    return {
        kind: [by_helm(uri) for link in section["templates"] for uri in link["templateUris"]]
        for kind, section in links.items()
    }


@pytest.mark.parametrize("name", ["values-s3.yaml", "values-gcs.yaml"])
def test_the_console_links_to_logs_of_pods_and_of_rayjobs(name: str) -> None:
    links = log_links(name)
    assert links["pods"] == links["rayjobs"] != []
    for link in links["rayjobs"]:
        used = set(re.findall(r"\{\{ \.(\w+) \}\}", link))
        assert used
        assert used <= OF_RAYJOBS


def test_helm_evaluates_nothing_else_in_the_inline_section() -> None:
    (values,) = documents("production/values-s3.yaml")
    by_helm(json.dumps(values["configuration"]["inline"], ensure_ascii=False))
    with pytest.raises(AssertionError, match="would evaluate"):
        by_helm("{{ .namespace }}")


def test_the_commented_section_of_mail_is_valid() -> None:
    from tests.unit.tasks.test_deployment import DEPLOYMENT

    lines = (DEPLOYMENT / "production/values-s3.yaml").read_text().splitlines()
    first = lines.index("    # notifications:")
    block = [line.removeprefix("    # ") for line in lines[first:] if line.startswith("    # ")]
    values = yaml.safe_load("\n".join(block))
    assert list(config_problems(values)) == []
    emailer = values["notifications"]["emailer"]
    assert by_helm(emailer["subject"]) == "{{ launch_plan.name }} {{ phase }}"
    assert by_helm(emailer["body"]) == "{{ name }}: {{ error }}"


EXECUTION, ID = "a7x2kq9w4mzt5bv8c1dn", "0" * 62 + "af"


@pytest.mark.parametrize(
    ("pod", "container"),
    [
        (f"{EXECUTION}-n3-0-dn2-0", "primary"),
        (f"{EXECUTION}-n3-0-dn2-0-x7k2p", "ray-job-submitter"),
        (f"{EXECUTION}-n3-0-dn2-0-8vq4z-head-m2c9t", "ray-head"),
        (f"nemo-rl-{EXECUTION}-node-8gpu-x7k2p-gpus-8-worker-m2c9t", "ray-worker"),
    ],
)
def test_links_lead_to_the_logs_of_pods(pod: str, container: str) -> None:
    """The file's name on its machine, by the tag of Fluent Bit, makes the object's name."""
    config = next(each for each in documents("production/logs.yaml") if each["kind"] == "ConfigMap")
    pipeline = yaml.safe_load(config["data"]["fluent-bit.yaml"])["pipeline"]
    (tail,), (s3,) = pipeline["inputs"], pipeline["outputs"]
    file = f"/var/log/containers/{pod}_nemo-rl-production_{container}-{ID}.log"
    assert fnmatch(file, tail["path"])
    assert not fnmatch(file.replace("_nemo-rl-", "_kube-"), tail["path"])
    fields = re.search(tail["tag_regex"].replace("(?<", "(?P<"), file)
    assert fields is not None
    tag = re.sub(r"<(\w+)>", lambda field: fields[field[1]], tail["tag"]).split(".")
    key = re.sub(r"\$TAG\[(\d)\]", lambda part: tag[int(part[1])], s3["s3_key_format"])
    (link,) = log_links("values-s3.yaml")["rayjobs"]
    link = link.replace("{{ .namespace }}", "nemo-rl-production")
    prefix = link.replace("{{ .executionName }}", EXECUTION).partition("prefix=")[2]
    assert key.lstrip("/").startswith(f"{prefix}{pod}/{container}/")
    assert s3["bucket"] in link


def test_every_default_plugin_is_enabled() -> None:
    """Otherwise propeller does not start."""
    for name in ("production/values-s3.yaml", "sandbox/plugins.yaml"):
        (values,) = documents(name)
        inline = values.get("configuration", {}).get("inline", values)
        plugins = inline["tasks"]["task-plugins"]
        defaults = [each for pair in plugins["default-for-task-types"] for each in pair.values()]
        assert {*defaults} <= {*plugins["enabled-plugins"]}
        assert "ray" in defaults


def test_the_mounted_secret_is_the_one_that_is_read() -> None:
    (values,) = documents("production/values-s3.yaml")
    deployment = values["deployment"]
    volumes = {each["name"] for each in deployment["extraVolumes"]}
    mounts = {each["mountPath"]: each["name"] for each in deployment["extraVolumeMounts"]}
    folder = values["configuration"]["database"]["passwordPath"].rpartition("/")[0]
    assert mounts[folder] in volumes


def test_the_login_of_pyflyte_is_configured() -> None:
    """`authType: Pkce` needs a login, and an address with TLS that gRPC gets through."""
    (values,) = documents("production/values-s3.yaml")
    (client,) = documents("production/flyte.yaml")
    host = client["admin"]["endpoint"].removeprefix("dns:///")
    ingress, auth = values["ingress"], values["configuration"]["auth"]
    assert ingress["create"]
    assert ingress["host"] == host
    assert ingress["tls"][0]["hosts"] == [host]
    assert ingress["grpcAnnotations"]["nginx.ingress.kubernetes.io/backend-protocol"] == "GRPC"
    assert client["admin"]["authType"] == "Pkce"
    assert auth["enabled"]
    assert auth["authorizedUris"] == [f"https://{host}"]


def test_kuberays_operator_accepts_every_key() -> None:
    (values,) = documents("production/values-kuberay.yaml")
    assert list(problems(values, KUBERAY["chart"])) == []
    values["batchSchedular"] = values.pop("batchScheduler")
    values["resources"]["limit"] = values["resources"].pop("limits")
    assert list(problems(values, KUBERAY["chart"])) == [
        "resources.limit: no such key",
        "batchSchedular: no such key",
    ]


def test_kueue_accepts_its_configuration_and_times_out() -> None:
    (values,) = documents("production/values-kueue.yaml")
    assert list(problems(values, KUEUE["chart"])) == []
    config = yaml.safe_load(values["managerConfig"]["controllerManagerConfigYaml"])
    kind = {"apiVersion": "string", "kind": "string"}
    assert list(problems(config, KUEUE["Configuration"] | kind)) == []
    assert config["waitForPodsReady"]["timeout"] == "15m"  # as docs/clusters.md has it
    assert "ray.io/rayjob" in config["integrations"]["frameworks"]
    config["waitForPodsReady"]["requeueingStrategy"] = config["waitForPodsReady"].pop("timeout")
    assert [*problems(config, KUEUE["Configuration"] | kind)] == [
        "waitForPodsReady.requeueingStrategy: no such key"
    ]


@pytest.mark.parametrize("name", ["laptop", "one_gpu", "node_8gpu", "cluster_8"])
def test_kuberay_accepts_every_ray_cluster(name: str) -> None:
    (cluster,) = documents(f"ray/{name}.yaml")
    assert cluster["apiVersion"] == "ray.io/v1"
    assert list(problems(cluster, KUBERAY["RayCluster"])) == []


def test_invalid_ray_clusters_are_found() -> None:
    (cluster,) = documents("ray/laptop.yaml")
    head, (workers,) = cluster["spec"]["headGroupSpec"], cluster["spec"]["workerGroupSpecs"]
    head["rayStartParams"]["num-cpus"] = 0
    head["serviceTyp"] = "ClusterIP"
    head["template"]["spec"]["containers"][0]["volumeMounts"][0]["readonly"] = True
    workers["replicas"] = "1"
    del workers["groupName"]
    assert list(problems(cluster, KUBERAY["RayCluster"])) == [
        "spec.headGroupSpec.rayStartParams.num-cpus: 0 is not of type string",
        "spec.headGroupSpec.template.spec.containers[0].volumeMounts[0].readonly: no such key",
        "spec.headGroupSpec.serviceTyp: no such key",
        "spec.workerGroupSpecs[0].replicas: '1' is not of type integer",
        "spec.workerGroupSpecs[0].groupName: is missing",
    ]


def test_the_sandbox_only_has_known_keys() -> None:
    (values,) = documents("sandbox/plugins.yaml")
    assert list(config_problems(values)) == []


def test_pods_of_a_sandbox_keep_the_variables_of_its_bucket() -> None:
    """Flyte merges the file into the sandbox's configuration and replaces lists."""
    (values,) = documents("sandbox/plugins.yaml")
    variables = values["plugins"]["k8s"]["default-env-vars"]
    assert [each for each in FLYTE["sandbox variables"] if each not in variables] == []
    assert any("FLYTE_AWS_ENDPOINT" in each for each in FLYTE["sandbox variables"])


INLINE = {"sandbox/plugins.yaml": "s3", "production/values-s3.yaml": "s3"} | {
    "production/values-gcs.yaml": "gs"
}


@pytest.mark.parametrize("name", INLINE)
def test_every_pod_has_the_model_paths_and_secrets(name: str) -> None:
    """A stage that plans or downloads has no volume and no template of this project."""
    (values,) = documents(name)
    k8s = values.get("configuration", {}).get("inline", values)["plugins"]["k8s"]
    variables = {key: value for each in k8s["default-env-vars"] for key, value in each.items()}
    assert variables[CLUSTER_GPUS].isdigit()
    assert variables[ALIASES].startswith(f"{INLINE[name]}://")
    if name != "production/values-gcs.yaml":  # which is merged into the other
        assert k8s["default-env-from-secrets"] == [SECRETS]
