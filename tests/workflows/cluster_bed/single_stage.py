"""Runs one stage on the bed as Flyte does, without the workflow around it."""

import threading
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgpack
from flyteidl.core import literals_pb2, tasks_pb2
from flytekit import FlyteContextManager
from flytekit.configuration import (
    DataConfig,
    FastSerializationSettings,
    ImageConfig,
    S3Config,
    SerializationSettings,
)
from flytekit.constants import CopyFileDetection
from flytekit.core.data_persistence import FileAccessProvider
from flytekit.core.type_engine import TypeEngine
from flytekit.tools.fast_registration import FastPackageOptions, fast_package
from flytekit.tools.translator import get_serializable
from flytekit.types.directory import FlyteDirectory

from tasks.artifacts import Artifact
from tests.commands import REPOSITORY
from tests.workflows.cluster_bed.bed import ClusterBed
from tests.workflows.flyte_backend.admin import DOMAIN, PROJECT
from tests.workflows.flyte_backend.catalog import Catalog
from tests.workflows.flyte_backend.graph import Scope, Walk
from tests.workflows.flyte_backend.records import Attempt, ExecutionRecord


class SingleStage:
    """A stage that was registered on a bed, with its inputs in the bucket.

    Args:
        bed: A started bed.
        stage: A task of this project.
        inputs: Inputs of the stage by name; folders of artifacts are uploaded.
        folder: Folder on this machine for the archive of the code and the logs.
        node: Node id of the stage in the execution that all stages of a bed belong to.

    Attributes:
        attempts: Every start of its container so far.
    """

    def __init__(
        self,
        bed: ClusterBed,
        stage: Any,
        inputs: Mapping[str, Any],
        folder: Path,
        *,
        node: str = "n0",
    ) -> None:
        folder.mkdir(parents=True)
        self._bed, self._folder, self._node = bed, folder, node
        self._inputs = _uploaded(bed, stage, inputs, folder / "sandbox")
        self._template = _template(bed, stage, folder)
        self._record = ExecutionRecord("single", "no launch plan", self._inputs)

    @property
    def attempts(self) -> list[Attempt]:
        """Every start of its container so far, in order."""
        return [attempt for node in self._record.nodes.values() for attempt in node.attempts]

    def run(self) -> Any:
        """Runs it, with its allowed number of attempts.

        Returns:
            Fields of the artifact that it produced.

        Raises:
            NodeError: If it failed.
        """
        walk = Walk(
            self._record,
            Catalog(),
            bucket=self._bed.bucket,
            machine=self._bed,
            pods=self._folder / "pods",
            environment={
                "FLYTE_INTERNAL_EXECUTION_ID": self._record.name,
                "FLYTE_INTERNAL_EXECUTION_PROJECT": PROJECT,
                "FLYTE_INTERNAL_EXECUTION_DOMAIN": DOMAIN,
            },
            aborted=threading.Event(),
        )
        scope = Scope(self._bed.backend, {}, {})
        outputs = walk.task(self._template, self._inputs, scope, self._node)
        return msgpack.loads(outputs.literals["o0"].scalar.binary.value)


def _uploaded(
    bed: ClusterBed, stage: Any, inputs: Mapping[str, Any], sandbox: Path
) -> literals_pb2.LiteralMap:
    access = bed.bucket.environment
    data = DataConfig(
        s3=S3Config(
            endpoint=access["FLYTE_AWS_ENDPOINT"],
            access_key_id=access["FLYTE_AWS_ACCESS_KEY_ID"],
            secret_access_key=access["FLYTE_AWS_SECRET_ACCESS_KEY"],
        )
    )
    files = FileAccessProvider(sandbox, bed.bucket.folder("single/given"), data)
    context = FlyteContextManager.current_context().with_file_access(files)
    with FlyteContextManager.with_context(context) as uploading:
        types = {name: stage.python_interface.inputs[name] for name in inputs}
        values = {name: _as_made_here(value) for name, value in inputs.items()}
        literals = TypeEngine.dict_to_literal_map(uploading, values, types)
    return literals.to_flyte_idl()


def _as_made_here(value: Any) -> Any:
    """Returns an artifact that refers to its folder by local path, as only such are uploaded."""
    if not isinstance(value, Artifact):
        return value
    return value.model_copy(update={"directory": FlyteDirectory(str(value.folder))})


def _template(bed: ClusterBed, stage: Any, folder: Path) -> tasks_pb2.TaskTemplate:
    """Returns the template that registration with `--copy all` creates."""
    options = FastPackageOptions([], copy_style=CopyFileDetection.ALL)
    archive = Path(fast_package(REPOSITORY, folder, options=options))
    bed.bucket.write(f"single/{archive.name}", archive.read_bytes())
    settings = SerializationSettings(
        project=PROJECT,
        domain=DOMAIN,
        version="1",
        image_config=ImageConfig.auto(img_name="unused:0"),
        fast_serialization_settings=FastSerializationSettings(
            enabled=True,
            destination_dir=".",
            distribution_location=bed.bucket.url(f"single/{archive.name}"),
        ),
    )
    return get_serializable(OrderedDict(), settings, stage).to_flyte_idl().template
