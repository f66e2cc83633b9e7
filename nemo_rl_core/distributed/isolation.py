"""Packages of workers that the project's versions conflict with, in a folder of their search path.

Ray starts separate processes for workers with another environment. Those of an isolated component
have the folder first in `PYTHONPATH`: its packages replace the project's, which provide all others,
among them Ray and this library. Ray's `pip` and `uv` would copy the full virtual environment of the
project on every machine, and need an index of packages there.
"""

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from hashlib import sha256
from importlib import metadata
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from nemo_rl_core.config.isolation import IsolatedPackages, IsolationConfig
from nemo_rl_core.errors import ConfigError
from nemo_rl_core.store import locks
from nemo_rl_core.store.files import ASIDE, discard
from nemo_rl_core.store.store import Store
from nemo_rl_core.telemetry.waiting import waiting

_SHARED = ("ray", "nemo-rl-flow")
"""Distributions of which every process has the project's version."""
_PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"


def with_packages(config: IsolationConfig) -> IsolationConfig:
    """Returns the config with the packages of each component.

    Raises:
        ConfigError: If a file or folder is missing or cannot be used, or has changed since the
            packages were filled in.
    """
    sections = {name: section for name, section in config if section is not None}
    return config.replace(
        **{name: _filled(section, f"isolation.{name}") for name, section in sections.items()}
    )


def isolated_path(section: IsolatedPackages | None) -> dict[str, str]:
    """Returns the environment of workers that import these packages; empty without any.

    Packages of a requirements file are installed into the store, unless they are there.
    """
    if section is None:
        return {}
    section = _filled(section, "isolation")
    if section.folder is not None:
        folder = _site_of(Path(section.folder).expanduser(), "isolation")
    else:
        folder = _installed(section)
    return {
        "PYTHONPATH": os.pathsep.join([str(folder), *search_path()]),
        "NEMO_RL_ISOLATED_PACKAGES": str(folder),  # read by nemo_rl_core/__init__.py
    }


def search_path() -> list[str]:
    """Returns the folders from which this process imports, for workers."""
    return [str(Path(each).absolute()) for each in sys.path]


def _filled(section: IsolatedPackages, path: str) -> IsolatedPackages:
    if section.requirements is not None:
        if section.packages:  # a stage on a cluster may not have the file
            return section
        packages = _pinned(Path(section.requirements).expanduser(), path)
    else:
        packages = _packages_in(Path(str(section.folder)).expanduser(), path)
    if section.packages not in ([], packages):
        raise ConfigError(
            f"{path}.folder: the packages in {section.folder} have changed since the run began",
            expected=", ".join(sorted({*section.packages} - {*packages})) or "no others",
            got=", ".join(sorted({*packages} - {*section.packages})) or "some are missing",
            fix="wait until nothing installs into it, and run again",
        )
    return section.replace(packages=packages)


def _pinned(file: Path, path: str) -> list[str]:
    if not file.is_file():
        raise ConfigError(
            f"{path}.requirements: no file {file.absolute()}", fix=f"correct {path}.requirements"
        )
    lines = [_pin(line, file, path) for line in _logical_lines(file.read_text())]
    if not lines:
        raise ConfigError(f"{path}.requirements: {file} names no packages")
    return sorted(lines)


def _logical_lines(text: str) -> Iterator[str]:
    for line in text.replace("\\\n", " ").splitlines():
        if words := f" {line}".partition(" #")[0].split():
            yield " ".join(words)


def _pin(line: str, file: Path, path: str) -> str:
    try:
        requirement = Requirement(line.partition(" --hash=")[0])
    except InvalidRequirement:
        requirement = None
    specifiers = list(requirement.specifier) if requirement is not None else []
    is_exact = len(specifiers) == 1 and specifiers[0].operator in ("==", "===")
    if requirement is None or not is_exact or specifiers[0].version.endswith("*"):
        raise ConfigError(
            f"{path}.requirements: {file} does not pin every package",
            expected="lines such as verifiers==0.4.0, without options except --hash",
            got=line,
            fix=f"write them by `uv pip compile FILE.in --output-file {file}`",
        )
    _refuse_shared(requirement.name, specifiers[0].version, file, path)
    return line


def _refuse_shared(name: str, version: str, source: Path, path: str) -> None:
    if canonicalize_name(name) in _SHARED and version != metadata.version(name):
        raise ConfigError(
            f"{path}: {source} has another version of {name} than the other processes",
            expected=f"{name}=={metadata.version(name)}",
            got=f"{name}=={version}",
            fix=f"remove {name} from it: the workers have the project's",
        )


def _packages_in(folder: Path, path: str) -> list[str]:
    """Returns versions of the packages in a folder, with a digest of the files of each."""
    packages = []
    for distribution in metadata.distributions(path=[str(_site_of(folder, path))]):
        name, version = canonicalize_name(distribution.name), distribution.version
        _refuse_shared(name, version, folder, path)
        if '"editable": true' in (distribution.read_text("direct_url.json") or ""):
            raise ConfigError(
                f"{path}.folder: {name} is an editable installation in {folder}",
                fix="install it without --editable",
            )
        lines = (distribution.read_text("RECORD") or "").splitlines()
        # Programs, which have the path of the folder in their first line, are outside of it.
        files = sorted(line for line in lines if "sha256=" in line and not line.startswith(".."))
        digest = sha256("\n".join(files).encode()).hexdigest()[:16]
        packages.append(f"{name}=={version} {digest}")
    if not packages:
        raise ConfigError(
            f"{path}.folder: there are no installed packages in {folder.absolute()}",
            expected="a virtual environment, or a folder of `pip install --target`",
            fix=f"correct {path}.folder",
        )
    return sorted(packages)


def _site_of(folder: Path, path: str) -> Path:
    if not folder.is_dir():
        raise ConfigError(
            f"{path}.folder: no folder {folder.absolute()}", fix=f"correct {path}.folder"
        )
    sites = sorted(folder.glob("lib/python*/site-packages"))
    if not sites:
        return folder.absolute()
    matching = [each for each in sites if each.parent.name == _PYTHON]
    if not matching:
        raise ConfigError(
            f"{path}.folder: {folder} is a virtual environment of another Python",
            expected=_PYTHON,
            got=", ".join(each.parent.name for each in sites),
            fix=f"make it by `{_PYTHON} -m venv {folder}`",
        )
    return matching[0].absolute()


def _installed(section: IsolatedPackages) -> Path:
    digest = sha256("\n".join([_PYTHON, *section.packages]).encode()).hexdigest()[:32]
    folder = Store.default().cache / "packages" / digest
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locks.locked(folder.with_suffix(".lock"), "packages"):
        if not folder.is_dir():
            aside = folder.with_name(f".{digest}.{uuid.uuid4().hex[:8]}{ASIDE}")
            try:
                with waiting(f"installing {len(section.packages)} packages"):
                    _install(section, aside)
                aside.rename(folder)
            finally:
                discard(aside)
    return folder


def _install(section: IsolatedPackages, target: Path) -> None:
    lines = target.with_suffix(".txt")
    lines.write_text("\n".join(section.packages))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--target", str(target), "--requirement", str(lines)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    finally:
        lines.unlink()
    if done.returncode:
        raise ConfigError(
            f"the packages of {section.requirements} cannot be installed",
            got=(done.stderr.strip() or "no message of pip").splitlines()[-1],
            fix="correct the file; without an index of packages set PIP_FIND_LINKS to a folder of "
            "wheels, and PIP_NO_INDEX=1",
        )
    problems = list(_unmet(section.packages, target))
    if problems:
        raise ConfigError(
            f"{section.requirements} lacks versions that its packages need",
            got="; ".join(problems),
            fix="add these versions to the file; `uv pip compile` finds them",
        )


def _unmet(lines: Sequence[str], folder: Path) -> Iterator[str]:
    """Yields what installed packages need of others, and the folder and the project do not have."""
    installed = {
        canonicalize_name(each.name): each for each in metadata.distributions(path=[str(folder)])
    }
    for line in lines:
        pinned = Requirement(line.partition(" --hash=")[0])
        owner = installed.get(canonicalize_name(pinned.name))
        for text in (owner.requires or ()) if owner else ():
            needed = Requirement(text)
            extras = ["", *pinned.extras]
            if needed.marker and not any(needed.marker.evaluate({"extra": e}) for e in extras):
                continue
            name = canonicalize_name(needed.name)
            version = installed[name].version if name in installed else _project_version(name)
            if version is None or not needed.specifier.contains(version, prereleases=True):
                yield f"{pinned.name} needs {needed} ({version or 'missing'})"


def _project_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
