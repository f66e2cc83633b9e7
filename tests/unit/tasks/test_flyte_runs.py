"""Where a pod that looks for rows asks Flyte."""

import pytest

from tasks.platform.flyte_runs import INSECURE, URL, FlyteRuns


def asked_at() -> tuple[str, bool]:
    named = {"project": "p", "domain": "d", "name": "n", "version": "v"}
    runs = FlyteRuns.of(**named, endpoint="recorded:80", insecure=True)
    return runs._client._cfg.endpoint, runs._client._cfg.insecure


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ("recorded:80", True)),
        # Of the address alone, how the schedule's was reached still holds.
        ({URL: "inner:81"}, ("inner:81", True)),
        ({URL: "inner:81", INSECURE: "false"}, ("inner:81", False)),
    ],
)
def test_the_environment_comes_before_what_the_schedule_recorded(
    given: dict[str, str], expected: tuple[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (URL, INSECURE):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert asked_at() == expected
