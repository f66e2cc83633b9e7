"""`nemo-rl cluster-check` on pods that share nothing but a volume and an S3 server."""

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
    """As a user has it, with a line of output as soon as there is one."""
    return subprocess.Popen(
        [
            *(Path(sys.executable).with_name("nemo-rl"), "cluster-check"),
            *("--config", bed.backend.config, "--project", "flytesnacks", *options),
        ],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def states(output: str) -> dict[str, str]:
    """The state of each line by its name."""
    logger.info("%s", output)
    found = re.findall(r"^(ok|warn|fail) +(\S+(?: \S+)*?)  ", output, re.MULTILINE)
    return {name: state for state, name in found}


def fixes(output: str) -> dict[str, str]:
    """The fix of each line that has one, by its name, in one line."""
    parts = re.split(r"^(?:ok|warn|fail) +(\S+(?: \S+)*?)  ", output, flags=re.MULTILINE)[1:]
    told = dict(zip(parts[::2], parts[1::2], strict=True))
    return {
        name: " ".join(text.partition("fix: ")[2].split())
        for name, text in told.items()
        if "fix: " in text
    }


def test_a_cluster_that_works_is_found_so(tmp_path: Path) -> None:
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
def test_each_fault_has_its_line_and_ends_no_other(tmp_path: Path) -> None:
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
        while len(states(seen)) < 7:  # all but that of Ray, which no operator answers
            line = check.stdout.readline()
            assert line, seen
            seen += line
        check.send_signal(signal.SIGINT)
        output = seen + check.communicate(timeout=60)[0]
        (execution,) = bed.backend.executions.values()
    assert check.returncode == 1
    found = states(output)
    found.pop("ray: engines", None)  # whether it had found that it has nothing to try
    well = "pods", "bucket", "nodes", "lifetime: run"
    assert [found.pop(name) for name in well] == ["ok"] * 4
    assert found == dict.fromkeys(["volume", "volume back", "ray", "notices"], "fail"), output
    assert "did not end before the interrupt; Flyte has it as RUNNING" in output
    told = fixes(output)
    assert "ReadWriteMany" in told["volume"]
    assert "helm install kuberay-operator" in told["ray"]
    assert "550" in output
    assert told["notices"].startswith("let pods reach that server")
    assert execution.phase == "ABORTED"


@pytest.mark.thorough
def test_rights_to_the_bucket_that_lack_are_named(tmp_path: Path) -> None:
    with ClusterBed(tmp_path / "bed", at_once=True, faults={"bucket without rights"}) as bed:
        check = started(bed)
        output = check.communicate(timeout=900)[0]
    assert check.returncode == 1
    # Without the bucket no task has inputs and outputs, and the second half of its check no file.
    assert set(states(output).values()) == {"fail"}, output
    told = fixes(output)
    assert all("read and write the bucket" in text for text in told.values())
    names = ["pods", "bucket write", "volume", "volume back", "nodes", "lifetime: run", "ray"]
    assert sorted(told) == sorted([*names, "ray: engines", "notices"])
    assert "PermissionError" in output or "Access Denied" in output or "Forbidden" in output


@pytest.mark.thorough
def test_a_right_to_rayjobs_that_lacks_is_named(tmp_path: Path) -> None:
    with ClusterBed(tmp_path / "bed", at_once=True, faults={"no right to RayJobs"}) as bed:
        check = started(bed)
        output = check.communicate(timeout=900)[0]
    assert check.returncode == 1
    found = states(output)
    assert found.pop("ray") == "fail"
    assert found.pop("notices") == "warn"  # no place is named
    assert set(found.values()) == {"ok"}, output
    assert fixes(output)["ray"].startswith("let Flyte make RayJobs: rbac.extraRules")
    assert "rayjobs.ray.io is forbidden" in output
