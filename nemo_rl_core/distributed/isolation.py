"""Installs packages that conflict with the project's into a folder that comes first in PYTHONPATH
of some workers.

Ray starts separate processes for workers with another environment. Those of an isolated component
have the folder first in `PYTHONPATH`: its packages replace the project's, which provide all others,
among them Ray and this library. Ray's `pip` and `uv` would copy the full virtual environment of the
project on every machine, and need an index of packages there.
"""

import json
import os
import re
import subprocess
import sys
import sysconfig
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
from nemo_rl_core.store.files import ASIDE, digest_of, discard, hash_files
from nemo_rl_core.store.store import HashCache, Store
from nemo_rl_core.telemetry.waiting import waiting

_SHARED = ("ray", "nemo-rl-flow")
"""Distributions whose version must equal the project's."""
_PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
_HASHES = re.compile("( --hash=sha256:[0-9a-f]{64})*")
_NOT_HASHED = ("__pycache__/*", "*/__pycache__/*", "*.dist-info/RECORD")
"""Compiled code, and lists with hashes of programs, which have the path of the folder in them."""


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


def add_to_search_path(_: object, folders: Sequence[str]) -> None:
    """Lets a worker also import from these folders."""
    sys.path += [each for each in folders if each not in sys.path]


def _filled(section: IsolatedPackages, path: str) -> IsolatedPackages:
    file = Path(section.requirements or "").expanduser()
    if section.folder is not None:
        packages = _packages_in(Path(section.folder).expanduser(), path)
    elif file.is_file() or not section.packages:
        packages = _pinned(file, path)
    else:  # a machine of a cluster may not have the file
        packages = sorted(_pin(line, f"{path}.packages") for line in section.packages)
    if section.packages and sorted(section.packages) != packages:
        source = f"folder: {section.folder}" if section.folder else f"requirements: {file}"
        raise ConfigError(
            f"{path}.{source} has changed since `packages` were filled in",
            expected=", ".join(sorted({*section.packages} - {*packages})) or "no others",
            got=", ".join(sorted({*packages} - {*section.packages})) or "some are missing",
            fix="wait until nothing changes it, and run again; leave `packages` out of a recipe",
        )
    # Equal pins in another file are the same packages, so its path is not part of the key.
    return section.replace(packages=packages, requirements=None)


def _pinned(file: Path, path: str) -> list[str]:
    if not file.is_file():
        raise ConfigError(
            f"{path}.requirements: no file {file.absolute()}", fix=f"correct {path}.requirements"
        )
    source = f"{path}.requirements: {file}"
    lines = [_pin(line, source) for line in _logical_lines(file.read_text())]
    if not lines:
        raise ConfigError(f"{path}.requirements: {file} names no packages")
    return sorted(lines)


def _logical_lines(text: str) -> Iterator[str]:
    for line in text.replace("\\\n", " ").splitlines():
        if words := f" {line}".partition(" #")[0].split():
            yield " ".join(words)


def _pin(line: str, source: str) -> str:
    text, mark, hashes = line.partition(" --hash=")
    try:
        requirement = Requirement(text)
    except InvalidRequirement:
        requirement = None
    specifiers = list(requirement.specifier) if requirement is not None else []
    is_exact = len(specifiers) == 1 and specifiers[0].operator in ("==", "===")
    has_options = _HASHES.fullmatch(mark + hashes) is None
    if not requirement or not is_exact or specifiers[0].version.endswith("*") or has_options:
        raise ConfigError(
            f"{source} does not pin every package",
            expected="lines such as verifiers==0.4.0, without options except --hash=sha256:...",
            got=line,
            fix="write them by `uv pip compile FILE.in --output-file FILE.txt`",
        )
    _refuse_shared(requirement.name, specifiers[0].version, source)
    return line


def _refuse_shared(name: str, version: str, source: str) -> None:
    if canonicalize_name(name) in _SHARED and version != metadata.version(name):
        raise ConfigError(
            f"{source} has another version of {name} than the other processes",
            expected=f"{name}=={metadata.version(name)}",
            got=f"{name}=={version}",
            fix=f"remove {name} from it: the workers have the project's",
        )


def _packages_in(folder: Path, path: str) -> list[str]:
    """Returns versions of the packages in a folder, with a digest of the files of each."""
    site = _site_of(folder, path)
    digests: dict[str, dict[str, str]] = {}
    owners = {}
    for distribution in metadata.distributions(path=[str(site)]):
        name, version = canonicalize_name(distribution.name), distribution.version
        _refuse_shared(name, version, f"{path}.folder: {folder}")
        origin = json.loads(distribution.read_text("direct_url.json") or "{}")
        if origin.get("dir_info", {}).get("editable"):
            raise ConfigError(
                f"{path}.folder: {name} is an editable installation in {folder}",
                fix="install it without --editable",
            )
        digests[f"{name}=={version}"] = {}
        owners.update({str(file): f"{name}=={version}" for file in distribution.files or ()})
    if not digests:
        raise ConfigError(
            f"{path}.folder: there are no installed packages in {folder.absolute()}",
            expected="a virtual environment, or a folder of `pip install --target`",
            fix=f"correct {path}.folder",
        )
    file_name = f"{sha256(os.fsencode(site)).hexdigest()[:32]}.json"
    hashes = HashCache(site, Store.default().cache / "packages" / file_name)
    with waiting(f"hashing {site}"):
        files = hash_files(site, exclude=_NOT_HASHED, hash_of=hashes)
    hashes.save()
    for file, digest in files.items():
        digests.setdefault(owners.get(file, "other files"), {})[file] = digest
    return sorted(f"{name} {digest_of(each)[:16]}" for name, each in digests.items())


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
    parts = [_PYTHON, sysconfig.get_platform(), *section.packages]
    digest = sha256("\n".join(parts).encode()).hexdigest()[:32]
    folder = Store.default().cache / "packages" / digest
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locks.locked(folder.with_suffix(".lock"), "packages"):
        if not folder.is_dir():
            aside = folder.with_name(f".{digest}.{uuid.uuid4().hex[:8]}{ASIDE}")
            try:
                with waiting(f"installing {len(section.packages)} packages"):
                    _install(section.packages, aside)
                aside.rename(folder)
            finally:
                discard(aside)
    return folder


def _install(packages: Sequence[str], target: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    # A source distribution would run its build, with requirements that are not pinned.
    command += ["--no-deps", "--only-binary=:all:", "--target", str(target)]
    command += ["--requirement", "/dev/stdin"]
    lines = "\n".join(packages)
    done = subprocess.run(command, input=lines, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(
            "the pinned packages of isolation cannot be installed",
            expected="a wheel of each version for this Python and platform",
            got=(done.stderr.strip() or "no message of pip").splitlines()[-1],
            fix="correct the pins; if there is only source, build a wheel, set PIP_FIND_LINKS to "
            "its folder; without an index of packages set PIP_NO_INDEX=1, too",
        )
    problems = list(_unmet(packages, target))
    if problems:
        raise ConfigError(
            "the pinned packages of isolation need versions that are not there",
            got="; ".join(problems),
            fix="add these versions to the pins; `uv pip compile` finds them",
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
