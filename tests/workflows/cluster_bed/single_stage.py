"""One stage on the bed, without the workflow around it: shipped, started and read as Flyte does."""

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
from tests.workflows.flyte_backend.containers import Place, run_container

_EXECUTION = "single"


def run_stage(bed: ClusterBed, stage: Any, inputs: Mapping[str, Any], folder: Path) -> Any:
    """Runs one attempt of a stage.

    Args:
        bed: Started.
        stage: A task of this project.
        inputs: As the stage is called with; folders of artifacts are uploaded.
        folder: Of this machine, for the archive of the code and the logs.

    Returns:
        The fields of the artifact that it made.

    Raises:
        ContainerError: If it failed.
    """
    (folder / "pod").mkdir(parents=True)
    bed.bucket.write("single/inputs.pb", _uploaded(bed, stage, inputs, folder / "sandbox"))
    _, outputs = run_container(
        _template(bed, stage, folder),
        Place(
            pod=folder / "pod",
            inputs="single/inputs.pb",
            outputs="single/0",
            raw="single/0/raw",
            checkpoint="single/0/checkpoint",
            previous_checkpoint=None,
        ),
        0,
        bucket=bed.bucket,
        machine=bed,
        environment={
            "FLYTE_INTERNAL_EXECUTION_ID": _EXECUTION,
            "FLYTE_INTERNAL_EXECUTION_PROJECT": "project",
            "FLYTE_INTERNAL_EXECUTION_DOMAIN": "domain",
        },
        started=lambda _: None,
        aborted=threading.Event(),
    )
    literal = literals_pb2.LiteralMap.FromString(outputs).literals["o0"]
    return msgpack.loads(literal.scalar.binary.value)


def _uploaded(bed: ClusterBed, stage: Any, inputs: Mapping[str, Any], sandbox: Path) -> bytes:
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
        given = {name: _as_made_here(value) for name, value in inputs.items()}
        literals = TypeEngine.dict_to_literal_map(uploading, given, types)
    content: bytes = literals.to_flyte_idl().SerializeToString()
    return content


def _as_made_here(value: Any) -> Any:
    """An artifact of a local stage knows its folder as a place to read; only others are sent."""
    if not isinstance(value, Artifact):
        return value
    return value.model_copy(update={"directory": FlyteDirectory(str(value.folder))})


def _template(bed: ClusterBed, stage: Any, folder: Path) -> tasks_pb2.TaskTemplate:
    """As it is registered with `--copy all`."""
    options = FastPackageOptions([], copy_style=CopyFileDetection.ALL)
    archive = Path(fast_package(REPOSITORY, folder, options=options))
    bed.bucket.write(f"single/{archive.name}", archive.read_bytes())
    settings = SerializationSettings(
        project="project",
        domain="domain",
        version="1",
        image_config=ImageConfig.auto(img_name="unused:0"),
        fast_serialization_settings=FastSerializationSettings(
            enabled=True,
            destination_dir=".",
            distribution_location=bed.bucket.url(f"single/{archive.name}"),
        ),
    )
    return get_serializable(OrderedDict(), settings, stage).to_flyte_idl().template
