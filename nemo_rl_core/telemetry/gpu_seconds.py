"""GPU-seconds of the attempts of an execution on a cluster, as its shared volume remembers them.

Each attempt of a stage has a file of its own, written anew while it runs: what a killed attempt has
used is known to within `NOTE_EVERY_SECONDS`.
"""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from uuid import uuid4

from nemo_rl_core.store.files import write_atomic
from nemo_rl_core.store.stage_run import StageRun
from nemo_rl_core.store.store import Store

NOTE_EVERY_SECONDS = 20.0


class AttemptRecord:
    """The record of one attempt, beside those of all others of its execution.

    Args:
        run: The attempt.
    """

    def __init__(self, run: StageRun) -> None:
        self._run = run
        self._folder = Store.default().gpu_seconds / run.execution
        self._path = self._folder / f"{run.task}-{run.attempt}-{uuid4().hex[:8]}.json"

    def note(self, gpu_seconds: float) -> None:
        """Writes what the attempt has used up to now."""
        self._folder.mkdir(parents=True, exist_ok=True)
        record = {"run": self._run.model_dump(), "gpu_seconds": gpu_seconds}
        write_atomic(self._path, json.dumps(record))

    def of_others(self) -> dict[StageRun, float]:
        """GPU-seconds of all other attempts of the execution."""
        records = [
            json.loads(path.read_text())
            for path in self._folder.glob("[!.]*.json")
            if path != self._path
        ]
        return {StageRun(**each["run"]): each["gpu_seconds"] for each in records}

    @contextmanager
    def kept(self, note: Callable[[], None]) -> Iterator[None]:
        """Within it, `note` is called from time to time, and once more at the end.

        A volume that fails meanwhile does not end the stage for the sake of a note.
        """
        ended = threading.Event()

        def keep() -> None:
            while not ended.wait(NOTE_EVERY_SECONDS):
                with suppress(OSError):
                    note()

        thread = threading.Thread(target=keep, name="gpu-seconds", daemon=True)
        note()
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            with suppress(OSError):
                note()
