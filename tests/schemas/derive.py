"""Writes `kuberay.json`, `flyte.json` and `kueue.json` from the sources of the projects.

`python -m tests.schemas.derive KUBERAY FLYTE KUEUE`, each a clone with the tags below. CRDs already
are schemas; the keys of a chart are those in its values and templates; the configuration of Flyte
comes from the Go structs and the types of their fields.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

KUBERAY, FLYTE, KUEUE = "v1.5.1", "v1.16.8", "v0.19.2"
"""Versions of KubeRay (whose API this version of Flyte is built with), Flyte and Kueue."""

_TEMPLATE = {"metadata": "V1ObjectMeta", "spec": "V1PodSpec"}
_OF_CHARTS = {
    "affinity": "V1Affinity",
    "extraRules": ["V1PolicyRule"],
    "extraVolumeMounts": ["V1VolumeMount"],
    "extraVolumes": ["V1Volume"],
    "imagePullSecrets": ["V1LocalObjectReference"],
    "livenessProbe": "V1Probe",
    "podSecurityContext": "any",
    "readinessProbe": "V1Probe",
    "resources": "V1ResourceRequirements",
    "securityContext": "V1SecurityContext",
    "tolerations": ["V1Toleration"],
}
"""Values that a chart passes to Kubernetes unchanged."""

_KUEUE_KINDS = {
    "ClusterQueue": "clusterqueues",
    "LocalQueue": "localqueues",
    "ResourceFlavor": "resourceflavors",
    "Topology": "topologies",
    "WorkloadPriorityClass": "workloadpriorityclasses",
}
_STRUCT = re.compile(r"^type (\w+) struct \{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
_GO = {
    r"string|v1\.ResourceName|v1\.PullPolicy|\w+\.Duration|(?:\w+\.)?TemplateURI": "string",
    r"bool": "boolean",
    r"u?int\d*": "integer",
    r"float\d+|rate\.Limit": "number",
    r"resource\.Quantity": "quantity",
    r"v1\.(\w+)": r"V1\1",
}
"""Types of fields by pattern; the first match counts."""

_LOGS = ("flyteplugins/go/tasks/logs", "flyteplugins/go/tasks/pluginmachinery/tasklog")
_SECTIONS: dict[str, tuple[str | tuple[str, ...], str]] = {
    "propeller": ("flytepropeller/pkg/controller/config", "Config"),
    "tasks": ("flytepropeller/pkg/controller/nodes/task/config", "Config"),
    "storage": ("flytestdlib/storage", "Config"),
    "notifications": ("flyteadmin/pkg/runtime/interfaces", "NotificationsConfig"),
    "scheduler": ("flyteadmin/pkg/runtime/interfaces", "SchedulerConfig"),
    "plugins.k8s": (
        "flyteplugins/go/tasks/pluginmachinery/flytek8s/config",
        "K8sPluginConfig",
    ),
    "plugins.logs": (_LOGS, "LogConfig"),
    "plugins.ray": (("flyteplugins/go/tasks/plugins/k8s/ray", *_LOGS), "Config"),
}
"""Sections of Flyte's configuration in the files of `deployment/`, and their structs.

If a struct has fields of other packages, their folders follow the folder of the struct.
"""


class Tag:
    """Files of a clone at a tag."""

    def __init__(self, clone: str, tag: str) -> None:
        self._clone, self._tag = clone, tag

    def read(self, path: str) -> str:
        return self._git("show", f"{self._tag}:{path}")

    def paths(self, folder: str) -> list[str]:
        return self._git("ls-tree", "-r", "--name-only", self._tag, folder).split()

    def _git(self, *arguments: str) -> str:
        command = ["git", "-C", self._clone, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def of_crd(schema: dict[str, Any]) -> Any:
    """Returns the tree of an OpenAPI schema; a pod template becomes objects of Kubernetes."""
    if {"containers"} <= schema.get("properties", {}).get("spec", {}).get("properties", {}).keys():
        return _TEMPLATE
    if schema.get("type") == "array":
        return [of_crd(schema["items"])]
    if "properties" in schema:
        needed = schema.get("required", [])
        properties = schema["properties"].items()
        return {key + "!" * (key in needed): of_crd(value) for key, value in properties}
    if "additionalProperties" in schema:
        return {"*": of_crd(schema["additionalProperties"])}
    return _of_scalar(schema)


def _of_scalar(schema: dict[str, Any]) -> str:
    if schema.get("x-kubernetes-int-or-string"):
        return "integer or string"
    if "enum" in schema:
        return "|".join(map(str, schema["enum"]))
    return str(schema.get("type", "any")).replace("object", "any")


def of_chart(tag: Tag, folder: str) -> dict[str, Any]:
    """Returns the tree of a chart's values: types of the defaults, and other keys in templates."""
    tree: dict[str, Any] = _of_default("", yaml.safe_load(tag.read(f"{folder}/values.yaml")))
    for path in tag.paths(f"{folder}/templates"):
        for keys in re.findall(r"\.Values((?:\.\w[\w-]*)+)", tag.read(path)):
            subtree: Any = tree
            for key in keys.split(".")[1:]:
                if not isinstance(subtree, dict) or "*" in subtree:
                    break
                subtree = subtree.setdefault(key, _OF_CHARTS.get(key, "any"))
    return tree


def _of_default(name: str, value: Any) -> Any:
    if name in _OF_CHARTS:
        return _OF_CHARTS[name]
    if isinstance(value, dict):
        return {key: _of_default(key, item) for key, item in value.items()} or {"*": "any"}
    if isinstance(value, list):
        return ["any"]
    names = {bool: "boolean", int: "integer", float: "number", str: "string"}
    return names.get(type(value), "any")


class Structs:
    """Structs of a Go package, and of further packages, which have other names."""

    def __init__(self, tag: Tag, *folders: str) -> None:
        self._structs: dict[str, str] = {}
        for folder in reversed(folders):
            for path in tag.paths(f"{folder}/"):
                if path.endswith(".go") and "/" not in path[len(folder) + 1 :]:
                    self._structs |= dict(_STRUCT.findall(tag.read(path)))

    def tree(self, name: str) -> dict[str, Any]:
        """Returns the tree of a struct."""
        return dict(self._fields(self._structs[name]))

    def _fields(self, body: str) -> Iterator[tuple[str, Any]]:
        for embedded in re.findall(r"^\s+(\w+)\s+`json:\",inline\"", body, re.M):
            if embedded in self._structs:
                yield from self._fields(self._structs[embedded])
        for written, tag in re.findall(r"^\s+\w+\s+(\S+)\s+`json:\"([^\"]*)\"", body, re.M):
            yield tag.partition(",")[0], self._type(written)

    def _type(self, written: str) -> Any:
        written = written.lstrip("*")
        if written.startswith("[]"):
            return [self._type(written[2:])]
        if match := re.fullmatch(r"map\[[\w.]+\](.*)", written):
            return {"*": self._type(match[1])}
        for name in (written, written.rpartition(".")[2]):
            if name in self._structs:
                return self.tree(name)
        for pattern, name in _GO.items():
            if match := re.fullmatch(pattern, written):
                return match.expand(name)
        return "any"


def main(kuberay_clone: str, flyte_clone: str, kueue_clone: str) -> None:
    """Writes the files."""
    kuberay, flyte = Tag(kuberay_clone, KUBERAY), Tag(flyte_clone, FLYTE)
    chart = "helm-chart/kuberay-operator"
    trees: dict[str, Any] = {"version": KUBERAY, "from": chart, "chart": of_chart(kuberay, chart)}
    for kind in ("RayCluster", "RayJob"):
        trees[kind] = _of_kind(kuberay, f"{chart}/crds/ray.io_{kind.lower()}s.yaml", "v1")
    _write("kuberay", trees)
    kueue, folder = Tag(kueue_clone, KUEUE), "config/components/crd/bases"
    trees = {"version": KUEUE, "from": folder}
    for kind, name in _KUEUE_KINDS.items():
        trees[kind] = _of_kind(kueue, f"{folder}/kueue.x-k8s.io_{name}.yaml", "v1beta2")
    trees["Configuration"] = Structs(kueue, "apis/config/v1beta2").tree("Configuration")
    trees["chart"] = of_chart(kueue, "charts/kueue")
    _write("kueue", trees)
    chart = "charts/flyte-binary"
    rules = flyte.read(f"{chart}/templates/clusterrole.yaml")
    rules = re.sub(r"(?m)^.*\{\{.*\n", "", rules.partition("\nrules:\n")[2])
    sections = {
        section: Structs(flyte, *([folders] if isinstance(folders, str) else folders)).tree(struct)
        for section, (folders, struct) in _SECTIONS.items()
    }
    resources = Structs(flyte, "flyteadmin/pkg/runtime/interfaces").tree("TaskResourceSet")
    sections["task_resources"] = {"defaults": resources, "limits": resources}
    written = {"version": FLYTE, "from": chart, "chart": of_chart(flyte, chart)}
    sandbox = flyte.read("docker/sandbox-bundled/manifests/complete.yaml")
    (inline,) = re.findall(r"(?m)^  100-inline-config.yaml: \|\n((?:    .*\n)+)", sandbox)
    variables = yaml.safe_load(inline)["plugins"]["k8s"]["default-env-vars"]
    written |= {"rules": yaml.safe_load(rules), "config": sections, "sandbox variables": variables}
    _write("flyte", written)


def _of_kind(tag: Tag, path: str, version: str) -> dict[str, Any]:
    crd = yaml.safe_load(tag.read(path))
    (served,) = [item for item in crd["spec"]["versions"] if item["name"] == version]
    tree: dict[str, Any] = of_crd(served["schema"]["openAPIV3Schema"])
    return tree | {"metadata": "V1ObjectMeta"}


def _write(name: str, trees: dict[str, Any]) -> None:
    path = Path(__file__).with_name(f"{name}.json")
    path.write_text(json.dumps(trees, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
