from collections.abc import Callable

import pytest

from nemo_rl_core.types import Completion, Prompt, Rollout


@pytest.fixture(scope="session")
def rollout() -> Callable[..., Rollout]:
    def make(text: str, *, answer: str = "46", prompt: str = "12+34=", **fields: str) -> Rollout:
        task, metadata = fields.get("task", "arithmetic"), fields.get("metadata", "{}")
        asked = Prompt("0", prompt, (1,), answer, task, metadata)
        return Rollout(asked, Completion((), (), truncated=False), text)

    return make
