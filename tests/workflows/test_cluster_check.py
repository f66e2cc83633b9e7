"""`nemo-rl cluster-check` on pods that share only a volume and an S3 server."""

import logging
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import REPOSITORY
from tests.notice_servers import hook, mail_server
from tests.workflows.cluster_bed import ClusterBed, why_no_pods

logger = logging.getLogger(__name__)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(why_no_pods() is not None, reason=f"{why_no_pods()}"),
]
NAMES = [
    *("pods", "bucket", "volume back", "volume", "locks", "nodes", "lifetime: run"),
    *("ray: laptop", "notices"),
]


def started(bed: ClusterBed, *options: str) -> "subprocess.Popen[str]":
    """Starts the command as a user would, with unbuffered output."""
    return subprocess.Popen(
        [
            *(Path(sys.executable).with_name("nemo-rl"), "cluster-check"),
            *("--flyte-config", bed.backend.config, "--project", "flytesnacks", *options),
        ],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def states(output: str) -> dict[str, str]:
    """Returns the state of each line by name."""
    logger.info("%s", output)
    lines = re.findall(r"^(ok|warn|fail) +(\S+(?: \S+)*?)  ", output, re.MULTILINE)
    return {name: state for state, name in lines}


def fixes(output: str) -> dict[str, str]:
    """Returns the fix of each line that has one, by name, joined into one line."""
    parts = re.split(r"^(?:ok|warn|fail) +(\S+(?: \S+)*?)  ", output, flags=re.MULTILINE)[1:]
    texts = dict(zip(parts[::2], parts[1::2], strict=True))
    return {
        name: " ".join(text.partition("fix: ")[2].split())
        for name, text in texts.items()
        if "fix: " in text
    }


@pytest.mark.thorough
def test_a_working_cluster_passes_all_checks(tmp_path: Path) -> None:
    with (
        ClusterBed(tmp_path / "bed", at_once=True) as bed,
        hook(host=bed.address) as (url, posted),
        mail_server(bed.address) as mailbox,
    ):
        bed.secrets["NEMO_RL_NOTIFY"] = f"{url}, ops@example.com"
        bed.secrets["NEMO_RL_SMTP"] = f"smtp://{mailbox.address}"
        check = started(bed)
        output = check.communicate(timeout=900)[0]
        assert not any((bed.volume / "cluster-check").iterdir())
    assert check.returncode == 0, output
    assert states(output) == dict.fromkeys(NAMES, "ok"), output
    assert "a file written on machine-of-share-volume is read on machine-of-join-volume" in output
    assert "9 ok, 0 warn, 0 fail" in output
    assert [each["text"].split("\n")[0] for each in posted] == ["nemo-rl: cluster-check"]
    ((_, to, text),) = mailbox.kept
    assert to == ["ops@example.com"]
    assert "Subject: nemo-rl: cluster-check" in text


@pytest.mark.thorough
def test_each_fault_fails_only_its_check(tmp_path: Path) -> None:
    faults = {"volume not shared", "no operator"}
    with (
        ClusterBed(tmp_path / "bed", at_once=True, faults=faults) as bed,
        mail_server(bed.address, refuses=True) as mailbox,
    ):
        bed.secrets["NEMO_RL_NOTIFY"] = "ops@example.com"
        bed.secrets["NEMO_RL_SMTP"] = f"smtp://{mailbox.address}"
        check = started(bed, "--volume-wait", "5")
        assert check.stdout is not None
        seen = ""
        while len(states(seen)) < 7:  # all but Ray's, which waits for an operator
            line = check.stdout.readline()
            assert line, seen
            seen += line
        check.send_signal(signal.SIGINT)
        output = seen + check.stdout.read()
        check.wait(timeout=60)
        (execution,) = bed.backend.executions.values()
    assert check.returncode == 1
    results = states(output)
    results.pop("ray: engines", None)  # missing if interrupted before that check was skipped
    passed = "pods", "bucket", "nodes", "lifetime: run"
    assert [results.pop(name) for name in passed] == ["ok"] * 4
    assert results == dict.fromkeys(["volume", "volume back", "ray", "notices"], "fail"), output
    assert "did not end before the interrupt; Flyte reports it as RUNNING" in output
    texts = fixes(output)
    assert "ReadWriteMany" in texts["volume"]
    assert "helm install kuberay-operator" in texts["ray"]
    assert "550" in output
    assert texts["notices"].startswith("let pods reach that server")
    assert execution.phase == "ABORTED"


@pytest.mark.thorough
def test_missing_rights_to_the_bucket_are_named(tmp_path: Path) -> None:
    with ClusterBed(tmp_path / "bed", at_once=True, faults={"bucket without rights"}) as bed:
        check = started(bed)
        output = check.communicate(timeout=900)[0]
    assert check.returncode == 1
    # Without the bucket no task can read inputs or write outputs.
    assert set(states(output).values()) == {"fail"}, output
    texts = fixes(output)
    assert all("read and write the bucket" in text for text in texts.values())
    names = ["pods", "bucket write", "volume", "volume back", "nodes", "lifetime: run", "ray"]
    assert sorted(texts) == sorted([*names, "ray: engines", "notices"])
    assert "PermissionError" in output or "Access Denied" in output or "Forbidden" in output


@pytest.mark.thorough
def test_a_missing_right_to_rayjobs_is_named(tmp_path: Path) -> None:
    with ClusterBed(tmp_path / "bed", at_once=True, faults={"no right to RayJobs"}) as bed:
        check = started(bed)
        output = check.communicate(timeout=900)[0]
    assert check.returncode == 1
    results = states(output)
    assert results.pop("ray") == "fail"
    assert results.pop("notices") == "warn"  # no recipient is configured
    assert set(results.values()) == {"ok"}, output
    assert fixes(output)["ray"].startswith("let Flyte make RayJobs: rbac.extraRules")
    assert "rayjobs.ray.io is forbidden" in output
