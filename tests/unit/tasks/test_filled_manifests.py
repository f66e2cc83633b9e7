"""`deployment/fill.sh` fills in all variables of a file, or names those that are missing."""

import base64
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.unit.tasks.test_deployment import DEPLOYMENT, VALUES, load

ROOT = DEPLOYMENT.parent
PAGE = (ROOT / "docs" / "cluster-setup.md").read_text()
IMAGES_PAGE = (ROOT / "docs" / "docker.md").read_text()
TEMPLATES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (DEPLOYMENT / "production").glob("*.yaml")
    if re.search(r"^[^#]*\$\{[A-Z_]+\}", path.read_text(), re.MULTILINE)
)
needs_gettext = pytest.mark.skipif(shutil.which("envsubst") is None, reason="needs gettext")


def without_comments(name: str) -> str:
    return re.sub(r"^ *#.*$", "", (ROOT / name).read_text(), flags=re.MULTILINE)


def filled(name: str, variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [DEPLOYMENT / "fill.sh", name], cwd=ROOT, env={"PATH": os.environ["PATH"]} | variables,
        capture_output=True, text=True, check=False,
    )  # fmt: skip


@needs_gettext
@pytest.mark.parametrize("name", TEMPLATES)
def test_only_variables_are_filled_in(name: str) -> None:
    ran = filled(name, VALUES)
    assert (ran.returncode, ran.stderr) == (0, "")
    expected = re.sub(r"\$\{([A-Z_]+)\}", lambda match: VALUES[match[1]], without_comments(name))
    assert re.sub(r"^ *#.*$", "", ran.stdout, flags=re.MULTILINE) == expected
    assert all(yaml.safe_load_all(ran.stdout))


@needs_gettext
@pytest.mark.parametrize("name", TEMPLATES)
def test_all_missing_variables_are_named(name: str) -> None:
    names = sorted(set(re.findall(r"\$\{([A-Z_]+)\}", without_comments(name))))
    assert names
    ran = filled(name, {names[0]: ""})
    assert (ran.returncode, ran.stdout) == (1, "")
    assert f"got: nothing for {' '.join(names)}\n" in ran.stderr
    assert f"export {names[0]}=" in ran.stderr


def test_all_variables_are_on_the_page() -> None:
    texts = [(ROOT / name).read_text() for name in TEMPLATES]
    matches = {each for text in texts for each in re.findall(r"^[^#]*?\$\{(\w+)\}", text, re.M)}
    rows = re.findall(r"^\| (`[A-Z_`, ]+`) \|", PAGE, re.MULTILINE)
    shown = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert matches <= shown


def test_flyte_can_decode_the_secret_of_its_components() -> None:
    """Flyte's `stringToByteArray` reads it as base64, which a hash of bcrypt itself is not."""
    (row,) = [line for line in PAGE.splitlines() if line.startswith("| `CLIENT_SECRET_HASH`")]
    command = row.split("`")[5].replace("\\|", "|")
    comments = (DEPLOYMENT / "production" / "values-s3.yaml").read_text()
    assert f"#   {command}\n" in comments
    if shutil.which("htpasswd") is None:
        pytest.skip("needs htpasswd, of apache2-utils")
    ran = subprocess.run(
        ["bash", "-c", command], input="a secret", capture_output=True, text=True, check=True
    )
    hashed = base64.b64decode(ran.stdout, validate=True).decode()
    assert re.fullmatch(r"\$2y\$06\$[./A-Za-z0-9]{53}", hashed)


def test_images_have_as_many_packages_as_the_page_says() -> None:
    pins = load("requirements/pins.py").pins
    for name in ("training", "generation", "laptop", "light"):
        text = (DEPLOYMENT / "images" / f"{name}.Dockerfile").read_text()
        lock, *options = re.findall(r"install\.sh (.*)", text)[0].split()
        installed = pins(
            (DEPLOYMENT / "requirements" / lock).read_text(), without=frozenset(options[1::2])
        )
        (row,) = re.findall(rf"^\| `{name}` \|.*\| (\d+), [^|]*\|$", IMAGES_PAGE, re.MULTILINE)
        assert int(row) == len(installed), name


def test_the_script_refuses_a_missing_file(tmp_path: Path) -> None:
    ran = filled(str(tmp_path / "none.yaml"), {})
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "usage: " in ran.stderr


@needs_gettext
def test_a_variable_may_contain_a_digit(tmp_path: Path) -> None:
    file = tmp_path / "site.yaml"
    file.write_text("bucket: ${S3_BUCKET}\n")
    ran = filled(str(file), {})
    assert (ran.returncode, ran.stdout) == (1, "")
    assert "got: nothing for S3_BUCKET\n" in ran.stderr
    assert filled(str(file), {"S3_BUCKET": "b"}).stdout == "bucket: b\n"
