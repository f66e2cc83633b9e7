"""An environment server of OpenEnv: `openenv_server.py PORT`; it asks twice."""

import sys
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Text(Action):  # type: ignore[misc]
    text: str


class Question(Observation):  # type: ignore[misc]
    text: str = ""


class AskTwice(Environment):  # type: ignore[misc]
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: Any = None, episode_id: Any = None, answer: str = "") -> Question:
        self._answer, self._state = answer, State(episode_id=episode_id, step_count=0)
        return Question(done=False, reward=0.0)

    def step(self, action: Text, timeout_s: Any = None, **_: Any) -> Question:
        self._state.step_count += 1
        is_done = self._state.step_count == 2
        return Question(text="Again?", done=is_done, reward=0.5 * (self._answer in action.text))

    @property
    def state(self) -> State:
        return self._state


uvicorn.run(create_fastapi_app(AskTwice, Text, Question, 8), port=int(sys.argv[1]))
