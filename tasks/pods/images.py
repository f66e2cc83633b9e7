"""Container images of stages on a cluster; not used in local runs.

flytekit asks an image's builder for its name when a stage is registered. This builder only returns
names: `deployment/images/build.sh` builds images under names that end in a digest of their sources.
Registered stages and images therefore have the same packages, on any machine.

The registry is set in `NEMO_RL_REGISTRY`; without one, names refer to images on the nodes. It is
not part of the specification below, because flytekit looks up images by a hash of it inside the
container of a dynamic stage, where the variable is unset.

`python -m tasks.pods.images` lists the images: kind, Dockerfile, name, build arguments.
"""

import hashlib
import os
import re
import sys
from pathlib import Path

from flytekit import ImageSpec
from flytekit.constants import CopyFileDetection
from flytekit.image_spec.image_spec import ImageBuildEngine, ImageSpecBuilder

from nemo_rl_core.errors import ConfigError

_ROOT = Path(__file__).resolve().parents[2]
_BUILDER = "nemo-rl-dockerfile"
_INSTALLED_BY = (
    "deployment/images/debian.sh",
    "deployment/images/install.sh",
    "deployment/images/transformer_engine.sh",
    "deployment/requirements/pins.py",
    "deployment/requirements/transformer_engine.txt",
    "deployment/torch_source.sh",
)
_ARGUMENTS = "deployment/images/arguments.txt"
_CERTIFICATES = "deployment/images/site/*.crt"
REGISTRY = "NEMO_RL_REGISTRY"


class DockerfileImages(ImageSpecBuilder):
    """Names the image of a Dockerfile of this project and its locked requirements."""

    def should_build(self, image_spec: ImageSpec) -> bool:
        """Returns True, since building only returns the name, once per image and process."""
        return True

    def build_image(self, image_spec: ImageSpec) -> str:
        """Returns `[REGISTRY/]NAME:DIGEST`."""
        return image_name(image_spec)


ImageBuildEngine.register(_BUILDER, DockerfileImages())


def _image(kind: str, requirements: str) -> ImageSpec:
    return ImageSpec(
        name=f"nemo-rl-{kind}",
        builder=_BUILDER,
        platform="linux/amd64",  # else some registries take it from the registering machine
        source_copy_mode=CopyFileDetection.NO_COPY,  # the code comes with the registration
        builder_options={
            "dockerfile": f"deployment/images/{kind}.Dockerfile",
            "requirements": f"deployment/requirements/{requirements}.txt",
        },
    )


TRAINING = _image("training", "gpu")
"""Trainers and engines in one pod: torch, Megatron-core, Transformer Engine, vLLM, Ray."""

GENERATION = _image("generation", "gpu")
"""Engines only: without Megatron-core and other trainer dependencies."""

LAPTOP = _image("laptop", "cpu")
"""The shape `laptop` on a cluster: trainers and engines with torch and vLLM for CPUs."""

LIGHT = _image("light", "cpu")
"""Stages without workers: torch for CPUs, no vLLM."""

IMAGES = (LIGHT, LAPTOP, GENERATION, TRAINING)
"""The images in build order: the smallest first, so that a registry's refusal is seen early."""


def image_name(image: ImageSpec) -> str:
    """Returns the image name of registered stages, which `build.sh` builds and pushes."""
    digest = hashlib.sha256()
    for name in (*sources(image), *_INSTALLED_BY):
        path = _ROOT / name
        if not path.is_file():
            raise ConfigError(
                f"the image {image.name!r} cannot be named",
                expected=f"the file {name}, from which it is made",
                got=f"nothing at {path}",
                fix="register from a checkout of the project",
            )
        digest.update(path.read_bytes())
    # Without any of these the name depends only on the sources.
    for argument in build_arguments(image):
        digest.update(f"{argument}\n".encode())
    for path in sorted(_ROOT.glob(_CERTIFICATES)):
        digest.update(path.read_bytes())
    registry = os.environ.get(REGISTRY, "").rstrip("/")
    return f"{registry}/{image.name}:{digest.hexdigest()[:12]}".removeprefix("/")


def sources(image: ImageSpec) -> tuple[str, str]:
    """Returns the Dockerfile and the requirements, relative to the project's folder."""
    options = image.builder_options
    return options["dockerfile"], options["requirements"]


def build_arguments(image: ImageSpec) -> list[str]:
    """Returns the sorted `NAME=VALUE` of an image that differ from its Dockerfile's defaults."""
    defaults = _defaults(image)
    arguments = _given_arguments()
    return sorted(
        f"{name}={value}"
        for name, value in arguments.items()
        if name in defaults and value != defaults[name]
    )


def _defaults(image: ImageSpec) -> dict[str, str]:
    path = _ROOT / sources(image)[0]
    text = path.read_text() if path.is_file() else ""
    return dict(re.findall(r"(?m)^ARG (\w+)=(\S+)$", text))


def _given_arguments() -> dict[str, str]:
    path = _ROOT / _ARGUMENTS
    names = sorted({name for image in IMAGES for name in _defaults(image)})
    arguments: dict[str, str] = {}
    for number, line in enumerate(path.read_text().splitlines() if path.is_file() else [], 1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        name, _, value = stripped.partition("=")
        if name not in names or not re.fullmatch(r"\S+", value) or name in arguments:
            raise ConfigError(
                f"{_ARGUMENTS}:{number} is not a build argument of an image",
                expected=f"NAME=VALUE, once for each of {', '.join(names)}",
                got=stripped,
                fix="correct or remove the line",
            )
        arguments[name] = value
    return arguments


def main() -> int:
    """Lists the images for `build.sh`; returns the exit code."""
    try:
        lines = [
            " ".join([each.name, sources(each)[0], image_name(each), *build_arguments(each)])
            for each in IMAGES
        ]
    except ConfigError as error:
        sys.stderr.write(f"build: {error}\n")
        return 1
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
