"""Checks that a cluster can pull the images of stages, before anything is registered there.

`python -m tasks.pods.registry FLYTE_CONFIG` exits with 2 if it cannot.
"""

import ipaddress
import os
import sys
from collections.abc import Collection
from urllib.parse import urlsplit

from nemo_rl_core.errors import ConfigError
from tasks.pods.images import REGISTRY

_FIX = (
    f"export {REGISTRY}=REGISTRY as for deployment/images/build.sh, and register again; "
    "REGISTRY is docker.io/library if the machines already have the images"
)


def is_of_this_machine(endpoint: str) -> bool:
    """Whether a cluster runs on this machine, which may have images without a registry.

    Example:
        >>> is_of_this_machine("127.0.0.1:30080"), is_of_this_machine("flyte.example.com")
        (True, False)
    """
    host = urlsplit(f"//{endpoint.rpartition('/')[2]}").hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def refuse_missing_registry(endpoint: str) -> None:
    """Refuses to name images that no machine of a remote cluster can pull."""
    if os.environ.get(REGISTRY) or is_of_this_machine(endpoint):
        return
    raise ConfigError(
        f"{REGISTRY} is not set, so pods on {endpoint} cannot pull their images",
        expected="the registry that deployment/images/build.sh has pushed to",
        got="images called nemo-rl-light:DIGEST, without a registry",
        fix=_FIX,
    )


def refuse_images_without_registry(names: Collection[str], *, workflow: str, endpoint: str) -> None:
    """Refuses to run a workflow on a remote cluster that was registered without a registry."""
    lost = sorted({name for name in names if "/" not in name})
    if not lost or is_of_this_machine(endpoint):
        return
    raise ConfigError(
        f"{workflow} was registered without a registry, so that its pods cannot pull their images",
        expected=f"images of the registry that {REGISTRY} named when it was registered",
        got=", ".join(lost),
        fix=_FIX,
    )


def main(config: str) -> int:
    """Checks the cluster of a configuration of Flyte's client; returns the exit code."""
    from flytekit.configuration import Config

    try:
        refuse_missing_registry(Config.auto(config).platform.endpoint)
    except ConfigError as error:
        sys.stderr.write(f"register: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
