"""Images can be built, and run stages as user 1000 without a network and without a GPU.

They start from `PYTHON_IMAGE` or, as a registry may be unreachable, from a Debian that debootstrap
creates here, whose package sources are invalid. They are built in a copy of the checkout whose
`deployment/images/site/` has this machine's certificates, package sources and wheels.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.commands import REPOSITORY
from tests.image_checkout import copy_checkout

DEBIAN = ("python3", "python3-pip", "python-is-python3", "ca-certificates")
MIRROR = os.environ.get("DEBIAN_MIRROR", "")
"""Mirror for debootstrap; by default the one of this machine's apt."""

GPU_IMAGE_GB = 45
"""Peak disk usage of podman while it builds an image for GPUs, which has 11 GB."""


def why_no_images() -> str | None:
    """Returns why images cannot be built here, or None if they can."""
    if shutil.which("podman") is None:
        return "podman is not installed"
    if "PYTHON_IMAGE" not in os.environ and (
        shutil.which("debootstrap") is None or os.geteuid() != 0
    ):
        return "a base image needs PYTHON_IMAGE, or debootstrap and root"
    probe = subprocess.run(["podman", "info"], capture_output=True, text=True, check=False)
    return None if probe.returncode == 0 else f"podman does not work: {probe.stderr.strip()}"


pytestmark = [
    pytest.mark.thorough,
    pytest.mark.timeout(7200),
    pytest.mark.xdist_group("images"),
    pytest.mark.skipif(why_no_images() is not None, reason=f"{why_no_images()}"),
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An image with Python 3.11 and pip."""
    if image := os.environ.get("PYTHON_IMAGE"):
        return image
    root = tmp_path_factory.mktemp("debian") / "root"
    packages = f"--include={','.join(DEBIAN)}"
    command = ["debootstrap", "--variant=minbase", packages, "bookworm", str(root)]
    subprocess.run([*command, *filter(None, [MIRROR or _mirror()])], check=True, text=True)
    # As in Python's official images, there are the headers of Python, without the C headers that
    # Debian's package depends on, and pip installs system-wide.
    headers = "apt-get update; apt-get download libpython3.11-dev; dpkg -x libpython*.deb /"
    clean = "rm -r libpython*.deb /var/lib/apt/lists/*; apt-get clean"
    subprocess.run(["chroot", root, "sh", "-ec", f"cd /tmp; {headers}; {clean}"], check=True)
    (root / "usr/lib/python3.11/EXTERNALLY-MANAGED").unlink()
    # Its package source is invalid, so that the build must use those in site/.
    (root / "etc/apt/sources.list").write_text("deb http://debian.invalid/debian bookworm main\n")
    name = "localhost/nemo-rl-test-python:3.11"
    with subprocess.Popen(["tar", "-C", root, "-c", "."], stdout=subprocess.PIPE) as packed:
        subprocess.run(["podman", "import", "-", name], stdin=packed.stdout, check=True)
    return name


def _mirror() -> str | None:
    for path in Path("/etc/apt/sources.list.d").glob("*.sources"):
        for line in path.read_text().splitlines():
            if line.startswith("URIs:"):
                return line.split()[1]
    return None


@pytest.fixture(scope="module")
def checkout(base: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy that names the base image and has the files that this machine's network requires."""
    folder = copy_checkout(tmp_path_factory.mktemp("images") / "checkout")
    (folder / "deployment/images/arguments.txt").write_text(f"PYTHON_IMAGE={base}\n")
    wheels = os.environ.get("PIP_FIND_LINKS", "").split()
    site_files = [
        *Path("/usr/local/share/ca-certificates").glob("*.crt"),
        *(wheel for each in wheels for wheel in Path(each).glob("*.whl")),
        *Path("/etc/apt/sources.list.d").glob("debian*.sources"),
    ]
    for path in site_files:
        shutil.copy(path, folder / "deployment/images/site")
    return folder


def podman_folder() -> str:
    """Returns the folder of podman's images."""
    command = ["podman", "info", "--format", "{{.Store.GraphRoot}}"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def built(kind: str, checkout: Path) -> str:
    """Builds an image as a user does and returns its name."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHON_IMAGE"}
    done = subprocess.run(
        ["deployment/images/build.sh", kind, "--", "--network", "host"],
        cwd=checkout,
        env=variables | {"NEMO_RL_BUILDER": "podman"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    return next(
        line.removeprefix("build: ")
        for line in done.stdout.splitlines()
        if line.startswith("build: ")
    )


def run_in(image: str, command: str, *options: str) -> str:
    """Returns the output of a shell in a container with the code and without a network."""
    done = subprocess.run(
        [
            *("podman", "run", "--rm", "--network=none", "--shm-size=2g"),
            *("--volume", f"{REPOSITORY}:/code:ro", "--workdir", "/code"),
            *("--env", "PYTHONPATH=/code", "--env", "PYTHONDONTWRITEBYTECODE=1", *options),
            *(image, "sh", "-c", command),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


TOOLS = "gcc", "g++", "pytest", "mypy", "ruff"


def installed_tools(image: str) -> set[str]:
    """Returns the compilers and development tools that an image has."""
    output = run_in(image, f"id -u; for each in {' '.join(TOOLS)}; do command -v $each; done; true")
    user, *paths = output.split()
    assert user == "1000"
    return {Path(path).name for path in paths}


PREPARE = """
from pyarrow.parquet import read_metadata

from nemo_rl_core.config.generated_data import ArithmeticData
from nemo_rl_core.config.model import ModelFromConfig
from tasks.prepare_data import prepare_data
from tasks.prepare_model import prepare_model
from tasks.recipes.common import DataTaskConfig, ModelTaskConfig

made = prepare_model(config=ModelTaskConfig(model=ModelFromConfig(), content="", seed=0))
data = ArithmeticData(num_train=64, num_validation=8)
rows = prepare_data(config=DataTaskConfig(data=data, content="", seed=0), tokenizer=made.tokenizer)
print(*(read_metadata(each.folder / "rows.parquet").num_rows for each in rows))
"""


def test_light_needs_no_compiler_and_runs_a_stage(checkout: Path) -> None:
    image = built("light", checkout)
    assert installed_tools(image) == set()
    assert run_in(image, f"python - <<'END'\n{PREPARE}END").endswith("64 8\n")


def test_laptop_runs_a_pipeline_with_ray_and_vllm(checkout: Path) -> None:
    image = built("laptop", checkout)
    assert installed_tools(image) == {"gcc", "g++"}
    recipe = (
        '{"recipe": "sft_arithmetic", "sft": {"num_steps": 5}, '
        '"data": {"num_train": 512, "num_validation": 32}}'
    )
    output = run_in(image, f"pyflyte run workflows/sft.py sft --config '{recipe}'")
    assert "accuracy of train_sft" in output


FAKE_DRIVER = """
cd "$(python -c 'import triton; print(triton.__path__[0])')/backends/nvidia"
grep -o '\\bcu[A-Z][A-Za-z0-9]*' driver.c | sort -u | sed 's/.*/int &(void) { return 999; }/' |
  gcc -shared -x c - -o /usr/local/nvidia/lib64/libcuda.so.1
python -c 'from triton.backends.nvidia.driver import CudaUtils; CudaUtils(); print("compiled")'
"""
"""Triton compiles and loads code that calls the driver, which is where GKE mounts it."""

ENGINE = """
import torch, transformer_engine.pytorch as te
from megatron.core.models.gpt import gpt_layer_specs

assert gpt_layer_specs.HAVE_TE and not torch.cuda.is_available()
print(te.LayerNormLinear.__name__)
"""


def test_training_has_transformer_engine_and_runs_a_pipeline(checkout: Path) -> None:
    """Uses `dtensor` and `hf`, since Transformer Engine's AdamW and vLLM need a GPU."""
    if (free := shutil.disk_usage(podman_folder()).free / 1e9) < GPU_IMAGE_GB:
        pytest.skip(f"{free:.0f} GB are free, but {GPU_IMAGE_GB} are needed")
    image = built("training", checkout)
    assert installed_tools(image) == {"gcc"}
    checked = run_in(image, "python -W ignore deployment/requirements/check_installed.py")
    assert "has one owner or is the same in all" in checked
    driver = "--tmpfs=/usr/local/nvidia/lib64:mode=1777,exec"
    assert run_in(image, FAKE_DRIVER, driver).endswith("compiled\n")
    assert run_in(image, f"python -W ignore - <<'END'\n{ENGINE}END").endswith("LayerNormLinear\n")
    recipe = (
        '{"recipe": "sft_arithmetic", "sft": {"num_steps": 5}, '
        '"data": {"num_train": 512, "num_validation": 32}, "generation": {"backend": "hf"}}'
    )
    output = run_in(image, f"pyflyte run workflows/sft.py sft --config '{recipe}'")
    assert "accuracy of train_sft" in output
