"""`--overwrite-cache` on Flyte's protocol runs all tasks and replaces their cache entries."""

from pathlib import Path

import pytest
from flyteidl.core import literals_pb2, tasks_pb2
from flytekit import task, workflow
from flytekit.configuration import Config, Image, ImageConfig, SerializationSettings
from flytekit.remote import FlyteRemote

from tests.workflows.flyte_backend import Backend
from tests.workflows.flyte_backend.admin import DOMAIN, PROJECT
from tests.workflows.flyte_backend.containers import Container


@task(cache=True, cache_version="1")
def numbered(word: str) -> int:
    """Task whose output is set by `Counter`: the number of containers so far."""
    return -len(word)


@workflow
def counting(word: str) -> int:
    return numbered(word=word)


class Counter:
    """Ends each container immediately, with the number of containers as its output."""

    pid = 0

    def __init__(self) -> None:
        self.count = 0

    def start(
        self, task: tasks_pb2.TaskTemplate, command: list[str], pod: Path, environment: object
    ) -> Container:
        self.count += 1
        outputs = literals_pb2.LiteralMap()
        outputs.literals["o0"].scalar.primitive.integer = self.count
        folder = Path(command[command.index("--output-prefix") + 1])
        (folder / "outputs.pb").write_bytes(outputs.SerializeToString())
        (pod / "log").touch()
        return self

    def poll(self) -> int | None:
        return 0

    def remove(self) -> None:
        """Does nothing."""


@pytest.mark.parametrize("at_once", [False, True])
def test_a_run_can_replace_cache_entries(tmp_path: Path, at_once: bool) -> None:
    with Backend(tmp_path / "flyte", machine=Counter(), at_once=at_once) as backend:
        remote = FlyteRemote(Config.auto(str(backend.config)), PROJECT, DOMAIN)
        images = ImageConfig(default_image=Image("unused", "unused", "0"))
        settings = SerializationSettings(images, project=PROJECT, domain=DOMAIN)
        registered = remote.register_workflow(counting, settings, version="1")

        def run(*, overwrite_cache: bool) -> int:
            inputs = {"word": "same"}
            launched = remote.execute(registered, inputs=inputs, overwrite_cache=overwrite_cache)
            ended = remote.wait(launched, poll_interval=0.1, sync_nodes=False)
            return int(ended.outputs["o0"])

        outputs = [run(overwrite_cache=each) for each in (False, False, True, False)]
    assert outputs == [1, 1, 2, 2]
