"""The log of a stage's container after it has used S3."""

import os
import subprocess
import sys
from collections.abc import Iterator

import boto3
import pytest
from moto.server import ThreadedMotoServer

STAGE = """
import os, tempfile
{registered}
from flytekit.configuration import DataConfig, S3Config
from flytekit.core.data_persistence import FileAccessProvider

store = S3Config(endpoint=os.environ["STORE"], access_key_id="key", secret_access_key="secret")
access = FileAccessProvider(tempfile.mkdtemp(), "s3://bucket/raw", DataConfig(s3=store))
folder = tempfile.mkdtemp()
open(folder + "/rows", "w").write("42")
access.put_data(folder, "s3://bucket/raw/rows", is_multipart=True)
print("uploaded")
"""
REGISTERED = """
from tasks.stage.container import close_sessions_at_exit
close_sessions_at_exit()
"""


@pytest.fixture
def address() -> Iterator[str]:
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    where = f"http://{host}:{port}"
    client = boto3.client(
        "s3",
        endpoint_url=where,
        aws_access_key_id="key",
        aws_secret_access_key="secret",
        region_name="us-east-1",
    )
    client.create_bucket(Bucket="bucket")
    yield where
    server.stop()


def _log(address: str, registered: str) -> str:
    ended = subprocess.run(
        [sys.executable, "-c", STAGE.format(registered=registered)],
        env=os.environ | {"STORE": address},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "uploaded" in ended.stdout
    return ended.stderr


@pytest.mark.slow
def test_an_upload_ends_without_an_error_in_the_log(address: str) -> None:
    assert "Unclosed" in _log(address, "")  # what flytekit does by itself
    assert "Unclosed" not in _log(address, REGISTERED)
    assert "Traceback" not in _log(address, REGISTERED)
