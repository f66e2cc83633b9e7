"""Requests of `deployment/images/debian.sh` and `install.sh` to a site's network, in order.

They run as in an image, in a separate namespace in which the folders that they write to are
empty; apt-get, uv and the update of certificates log their arguments.
`tests/workflows/test_images.py` builds images with the real ones. The last test runs
`transformer_engine.sh`, whose programs record their environment.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

IMAGES = Path(__file__).resolve().parents[3] / "deployment/images"
SOURCES = """Types: deb
URIs: http://deb.debian.org/debian
Suites: bookworm
Components: main
"""
NOTED = """#!/bin/bash
echo "$(basename "$0") $*" >> "$NOTES"
for word in "$@"; do
  case $word in Dir::Etc::sourceparts=*) cat "${word#*=}"/* >> "$NOTES" ;; esac
done
"""
PIP = """#!/bin/bash
if [ "$1" = config ]; then exec "$REAL_PIP" "$@"; fi
echo "pip $* cert=${PIP_CERT:-none} links=${PIP_FIND_LINKS:-none}" >> "$NOTES"
"""
MASKED = ("/usr/local/share/ca-certificates", "/etc/apt/sources.list.d", "/var/lib/apt/lists")


def why_no_name_space() -> str | None:
    if not all(Path(folder).is_dir() for folder in MASKED):
        return "this is no Debian"
    tried = subprocess.run(["unshare", "-rm", "true"], capture_output=True, text=True, check=False)
    return tried.stderr.strip() if tried.returncode else None


pytestmark = pytest.mark.skipif(
    why_no_name_space() is not None, reason=f"no name spaces: {why_no_name_space()}"
)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """A copy of the folder, whose site/ a test fills."""
    for name in ("images", "requirements"):
        shutil.copytree(IMAGES.parent / name, tmp_path / "deployment" / name)
    shutil.copy(IMAGES.parent / "torch_source.sh", tmp_path / "deployment")
    shutil.rmtree(tmp_path / "deployment/images/site")
    (tmp_path / "deployment/images/site").mkdir()
    return tmp_path / "deployment/images"


def noted(images: Path, command: str, **environment: str) -> str:
    """Calls of the script's programs."""
    programs, notes = images / "programs", images / "notes"
    programs.mkdir()
    for name in ("apt-get", "update-ca-certificates", "uv"):
        (programs / name).write_text(NOTED)
    (programs / "pip").write_text(PIP)
    for program in programs.iterdir():
        program.chmod(0o755)
    (images / "image.sources").write_text(SOURCES)
    mounts = "".join(f"mount -t tmpfs tmpfs {folder} && " for folder in MASKED)
    mounts += f"cp {images}/image.sources /etc/apt/sources.list.d/debian.sources && "
    real_pip = shutil.which("pip3", path="/usr/bin:/usr/local/bin") or shutil.which("pip")
    kept = {key: os.environ[key] for key in ("HOME", "LANG") if key in os.environ}
    variables = {
        **kept,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "NOTES": str(notes),
        "REAL_PIP": str(real_pip),
        "PIP_CONFIG_FILE": os.devnull,
    }
    subprocess.run(
        ["unshare", "-rm", "bash", "-ec", f"{mounts} bash {images}/{command}"],
        env=variables | environment,
        check=True,
        capture_output=True,
    )
    return notes.read_text() if notes.exists() else ""


def test_certificates_come_before_any_package(images: Path) -> None:
    (images / "site/own.crt").write_text("a certificate")
    lines = noted(images, "debian.sh gcc wget").splitlines()
    calls = [line.partition(" ")[0] for line in lines if line.startswith(("apt-get", "update-ca"))]
    assert calls == ["update-ca-certificates", "apt-get", "apt-get"]
    assert lines[-5].endswith("install --yes --no-install-recommends gcc wget")
    assert "URIs: http://deb.debian.org/debian" in lines


def test_packages_come_from_a_mirror(images: Path) -> None:
    calls = noted(images, "debian.sh gcc", DEBIAN_MIRROR="https://mirror.example/apt/")
    assert "URIs: https://mirror.example/apt/debian\n" in calls
    assert "deb.debian.org" not in calls


def test_packages_come_only_from_the_sites_sources(images: Path) -> None:
    (images / "site/own.list").write_text("deb https://apt.example/bookworm ./\n")
    calls = noted(images, "debian.sh gcc")
    assert "deb https://apt.example/bookworm ./\n" in calls
    assert "deb.debian.org" not in calls


def test_without_packages_nothing_is_requested(images: Path) -> None:
    assert noted(images, "debian.sh") == ""


@pytest.mark.parametrize(
    ("config", "environment", "index"),
    [
        ("", {}, None),
        ("", {"PIP_INDEX_URL": "https://pypi.example/simple"}, "https://pypi.example/simple"),
        ("[global]\nindex-url = https://c.example/simple\n", {}, "https://c.example/simple"),
        (
            "[global]\nindex-url = https://c.example/simple\n",
            {"PIP_INDEX_URL": "https://pypi.example/simple"},
            "https://pypi.example/simple",
        ),
    ],
)
def test_python_packages_come_from_the_index_of_the_site(
    images: Path, config: str, environment: dict[str, str], index: str | None
) -> None:
    if config:
        (images / "site/pip.conf").write_text(config)
    (images / "site/own.crt").write_text("a certificate")
    (images / "site/own-1-py3-none-any.whl").write_text("a wheel")
    first, second = noted(images, "install.sh gpu.txt", **environment).splitlines()
    assert first.startswith("pip install ") and first.endswith(f"links={images}/site")
    assert "cert=/etc/ssl/certs/ca-certificates.crt" in first
    assert second.startswith("uv pip install --system")
    assert second.partition("--default-index ")[2].strip() == (index or "")


def test_the_wheel_of_torch_comes_from_folders_of_the_site(images: Path) -> None:
    (images / "site/pip.conf").write_text("[global]\nfind-links =\n  /one\n  /two\n")
    _, second = noted(images, "install.sh cpu.txt").splitlines()
    assert second.partition("--find-links ")[2].split() == ["/one", "--find-links", "/two"]
    assert "--torch-backend" not in second


def test_the_wheel_of_torch_comes_from_pytorch_without_folders_of_pip(images: Path) -> None:
    _, second = noted(images, "install.sh cpu.txt").splitlines()
    assert second.endswith("--torch-backend cpu")


def test_transformer_engine_is_imported_without_its_build_environment(images: Path) -> None:
    """As stages import it: with `CUDA_HOME` it takes wheels for a toolkit, and loads too few."""
    programs, site, notes = images / "programs", images / "packages", images / "notes"
    (site / "nvidia/cu13/include").mkdir(parents=True)
    (site / "nvidia/cu13/include/cuda_runtime.h").touch()
    programs.mkdir()
    note = f"{{ env -0; echo; }} >> {notes}"
    python = f"case $* in *purelib*) echo {site} ;; *HAVE_TE*) {note} ;; esac"
    for name, script in {"python3": python, "uv": note, "g++": ""}.items():
        (programs / name).write_text(f"#!/bin/bash\n{script}\n")
        (programs / name).chmod(0o755)
    subprocess.run(
        ["bash", images / "transformer_engine.sh", programs / "python3"],
        env={"PATH": f"{programs}:/usr/bin:/bin"},
        check=True,
    )
    environments = [
        {word.partition("=")[0] for word in call.split("\0")}
        for call in notes.read_text().split("\0\n")[:-1]
    ]
    toolkit = {"CUDA_HOME", "CUDNN_PATH", "NCCL_HOME", "CPATH"}
    assert [each & toolkit for each in environments] == [toolkit, toolkit, set()]
