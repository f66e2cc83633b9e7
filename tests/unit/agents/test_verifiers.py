"""An environment of the real package `verifiers`, with its own packages, as an agent.

Its pinned versions conflict with this project's. `make test-verifiers` installs it into a folder
and runs this file; otherwise the test is skipped.
"""

import os
import sys
from pathlib import Path

import pytest

from tests.unit.agents.conftest import RecordedEngine
from tests.unit.agents.test_episode import play

FOLDER = os.environ.get("VERIFIERS_FOLDER")
AGENT = str(Path(__file__).with_name("verifiers_agent.py"))


@pytest.mark.skipif(FOLDER is None, reason="`make test-verifiers` installs verifiers")
def test_an_environment_of_verifiers_plays_the_policy(engine: RecordedEngine) -> None:
    command = ["env", f"PYTHONPATH={FOLDER}", sys.executable, AGENT]
    ((sample,),) = play(engine, {"command": command}, [("Hi", "abc")])
    assert sample.error is None
    # Its three messages after the prompt, and the three characters of the answer.
    assert sample.turns.rewards == (0.0, 6.0)
    assert [each["content"] for each in sample.turns.messages][::2] == ["Hi", "And then?"]
