"""The history database that all requests share; it is reopened if the file is replaced."""

import threading
import time

from nemo_rl_core.history.database import path_of
from nemo_rl_core.history.queries import History
from nemo_rl_core.store.store import Store

_SWEEP_SECONDS = 5.0


class HistorySource:
    """Opens the history of a store; the file may appear, be replaced or vanish at any time.

    Args:
        store: The store.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self._lock = threading.Lock()
        self._history: History | None = None
        self._file: tuple[int, int] | None = None
        self._swept = 0.0

    def is_empty(self) -> bool:
        """True if the store has no recorded run."""
        return self._identity() is None

    def history(self) -> History:
        """Returns the current history.

        Raises:
            StoreError: If there is none, or it is damaged or newer than this code.
        """
        with self._lock:
            file = self._identity()
            if self._history is None or file is None or file != self._file:
                # The earlier connection is not closed: another thread may be querying it.
                self._history = History(self.store)
                self._file, self._swept = self._identity(), time.monotonic()
            elif time.monotonic() - self._swept > _SWEEP_SECONDS:
                self._swept = time.monotonic()
                self._history.sweep()
            return self._history

    def _identity(self) -> tuple[int, int] | None:
        try:
            found = path_of(self.store).stat()
        except OSError:
            return None
        return found.st_dev, found.st_ino
