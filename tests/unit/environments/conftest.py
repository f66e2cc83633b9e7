import subprocess
from collections.abc import Callable

import pytest

from nemo_rl_core.types import Completion, Prompt, Rollout


@pytest.fixture(scope="session")
def rollout() -> Callable[..., Rollout]:
    def make(text: str, *, answer: str = "46", prompt: str = "12+34=", **fields: str) -> Rollout:
        task, metadata = fields.get("task", "arithmetic"), fields.get("metadata", "{}")
        row = Prompt("0", prompt, (1,), answer, task, metadata)
        return Rollout(row, Completion((), (), truncated=False), text)

    return make


@pytest.fixture(scope="session")
def namespaces() -> None:
    """Skips tests of the sandbox on machines that do not allow namespaces."""
    command = ["unshare", "--map-root-user", "--net", "--pid", "--mount", "--fork", "true"]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("this machine does not allow namespaces")
