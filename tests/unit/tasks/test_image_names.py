"""An image's name covers its sources, and `build.sh` builds the image of that name."""

import os
import subprocess
from pathlib import Path

import pytest

from nemo_rl_core.errors import ConfigError
from tasks.pods import images
from tasks.pods.images import IMAGES, LIGHT, REGISTRY, TRAINING, build_arguments, image_name
from tests.image_checkout import copy_checkout

OTHER = "PYTHON_IMAGE=registry.example/python@sha256:12ab"
BUILDER = """#!/bin/bash
case "$1 $2" in
  "--version ") echo "$BUILDER_VERSION"; exit ;;
  "manifest inspect") [[ " $THERE " == *" $3 "* ]]; exit ;;
  "image inspect") [[ " $HERE " == *" $3 "* ]]; exit ;;
esac
echo "$*" >> "$NOTES"
[[ $* != $REFUSED ]]
"""


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the files that name and build images, which a test changes."""
    monkeypatch.delenv(REGISTRY, raising=False)
    monkeypatch.setattr(images, "_ROOT", tmp_path)
    return copy_checkout(tmp_path)


def write_arguments(checkout: Path, *lines: str) -> None:
    (checkout / "deployment/images/arguments.txt").write_text("# A comment.\n\n" + "\n".join(lines))


def names() -> dict[str, str]:
    return {each.name.removeprefix("nemo-rl-"): image_name(each) for each in IMAGES}


def changed(before: dict[str, str]) -> set[str]:
    return {kind for kind, name in names().items() if name != before[kind]}


def test_names_cover_the_arguments_that_an_image_takes(checkout: Path) -> None:
    before = names()
    write_arguments(checkout, "TRANSFORMER_ENGINE=no")
    assert changed(before) == {"training"}
    assert build_arguments(TRAINING) == ["TRANSFORMER_ENGINE=no"]
    assert build_arguments(LIGHT) == []
    write_arguments(checkout, f"  {OTHER}  ")
    first = names()
    assert changed(before) == set(before)
    assert build_arguments(LIGHT) == [OTHER]
    write_arguments(checkout, f"{OTHER}cd")
    assert changed(first) == set(first)


def test_defaults_have_the_names_of_no_arguments(checkout: Path) -> None:
    before = names()
    write_arguments(checkout, "PYTHON_IMAGE=python:3.11-slim-bookworm", "TRANSFORMER_ENGINE=yes")
    assert names() == before
    (checkout / "deployment/images/arguments.txt").unlink()
    assert names() == before


def test_names_cover_the_certificates_that_stay_in_images(checkout: Path) -> None:
    before = names()
    certificate = checkout / "deployment/images/site/own.crt"
    certificate.write_text("one")
    first = names()
    assert changed(before) == set(before)
    certificate.write_text("another")
    assert changed(first) == set(first)
    certificate.unlink()
    # The source of pinned packages is not part of it.
    (certificate.parent / "pip.conf").write_text("[global]\n")
    (certificate.parent / "torch.whl").write_text("a wheel")
    assert names() == before


@pytest.mark.slow
@pytest.mark.parametrize(
    "line", ["PYTHON=3.11", "DEBIAN_MIRROR=https://m.example", "TRANSFORMER_ENGINE=", "a b"]
)
def test_other_lines_are_refused_with_their_number(checkout: Path, line: str) -> None:
    write_arguments(checkout, OTHER, line)
    with pytest.raises(
        ConfigError, match=r"images/arguments\.txt:4 is not a build argument"
    ) as error:
        image_name(LIGHT)
    assert "each of PYTHON_IMAGE, TRANSFORMER_ENGINE" in str(error.value)
    assert f"got: {line}" in str(error.value)
    refused = build(checkout)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "build: deployment/images/arguments.txt:4 is not a build argument" in refused.stderr
    write_arguments(checkout, OTHER, OTHER)
    with pytest.raises(ConfigError, match="not a build argument"):
        image_name(LIGHT)


def build(checkout: Path, *words: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    builder = checkout / "builder"
    builder.write_text(BUILDER)
    builder.chmod(0o755)
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHON_IMAGE", "DEBIAN_MIRROR", "PIP_INDEX_URL")
    }
    variables = {
        "NEMO_RL_BUILDER": str(builder),
        "BUILDER_VERSION": "Docker version 27.5.1",
        "NOTES": str(checkout / "notes"),
        "REFUSED": "",
    }
    return subprocess.run(
        [str(checkout / "deployment/images/build.sh"), *words],
        env=kept | variables | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def noted(checkout: Path) -> list[str]:
    notes = checkout / "notes"
    return notes.read_text().splitlines() if notes.exists() else []


@pytest.mark.slow
def test_images_are_built_with_their_arguments_the_smallest_first(checkout: Path) -> None:
    write_arguments(checkout, OTHER, "TRANSFORMER_ENGINE=no")
    assert build(checkout, "--", "--network", "host").returncode == 0
    folder = "build --file deployment/images"
    both = f"--build-arg {OTHER} --build-arg TRANSFORMER_ENGINE=no"
    assert noted(checkout) == [
        f"{folder}/{kind}.Dockerfile --tag {names()[kind]} {given} --network host deployment"
        for kind, given in [
            ("light", f"--build-arg {OTHER}"),
            ("laptop", f"--build-arg {OTHER}"),
            ("generation", f"--build-arg {OTHER}"),
            ("training", both),
        ]
    ]


@pytest.mark.slow
def test_podman_does_not_use_its_cache(checkout: Path) -> None:
    """Its steps identify the files that they read only by their command."""
    assert build(checkout, "light", BUILDER_VERSION="podman version 4.3.1").returncode == 0
    (line,) = noted(checkout)
    assert line.endswith(f"--tag {names()['light']} --no-cache deployment")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "environment"),
    [
        ([], {"PYTHON_IMAGE": OTHER.partition("=")[2]}),
        (["light", "--", "--build-arg", OTHER], {}),
        (["--", f"--build-arg={OTHER}"], {}),
    ],
)
def test_sources_that_names_do_not_cover_are_refused(
    checkout: Path, words: list[str], environment: dict[str, str]
) -> None:
    refused = build(checkout, *words, **environment)
    assert (refused.returncode, refused.stdout, noted(checkout)) == (1, "", [])
    assert f"build: {OTHER} would be in the image, and not in its name" in refused.stderr
    assert f"fix: write {OTHER} to deployment/images/arguments.txt" in refused.stderr


@pytest.mark.slow
def test_a_refused_push_ends_the_build_after_the_smallest_image(checkout: Path) -> None:
    environment = {"NEMO_RL_REGISTRY": "r.example/team", "REFUSED": "push *"}
    refused = build(checkout, **environment)
    assert refused.returncode == 1
    name = f"r.example/team/{names()['light']}"
    assert [line.split()[0] for line in noted(checkout)] == ["build", "push"]
    assert f"build: {name} is built, and the registry does not take it" in refused.stderr
    assert "login r.example)" in refused.stderr
    # The next build continues from there.
    (checkout / "notes").unlink()
    went_on = build(
        checkout, "--missing", "light", "laptop", **environment | {"REFUSED": "", "HERE": name}
    )
    assert went_on.returncode == 0, went_on.stderr
    assert f"build: {name} is on this machine" in went_on.stdout
    assert [line.split()[0] for line in noted(checkout)] == ["push", "build", "push"]
    assert noted(checkout)[0] == f"push {name}"


@pytest.mark.slow
def test_an_image_with_other_arguments_is_missing(checkout: Path) -> None:
    environment = {"NEMO_RL_REGISTRY": "r.example", "THERE": f"r.example/{names()['light']}"}
    assert "is there" in build(checkout, "--missing", "light", **environment).stdout
    assert noted(checkout) == []
    write_arguments(checkout, OTHER)
    assert build(checkout, "--missing", "light", **environment).returncode == 0
    assert [line.split()[0] for line in noted(checkout)] == ["build", "push"]


def test_a_checkout_without_an_environment_is_reported(checkout: Path) -> None:
    (checkout / ".venv/bin/python").unlink()
    refused = build(checkout, "light")
    assert refused.returncode == 1
    assert "fix: make setup" in refused.stderr
