"""Errors a user can cause: each says what was expected, what came, and the fix."""


class NemoRLError(Exception):
    """Base of every error that is the user's to mend.

    Args:
        problem: One sentence: what is wrong, and where.
        expected: What would have been accepted.
        got: What came instead.
        fix: What to do now.

    Example:
        >>> str(ConfigError("unknown shape", got="laptp", fix="use 'laptop'"))
        "unknown shape\\n  got: laptp\\n  fix: use 'laptop'"
    """

    def __init__(
        self,
        problem: str,
        expected: str | None = None,
        got: str | None = None,
        fix: str | None = None,
    ) -> None:
        # All four stay in `args`, so that the error survives pickling between Ray processes.
        super().__init__(problem, expected, got, fix)
        self.problem, self.expected, self.got, self.fix = problem, expected, got, fix

    @property
    def in_one_line(self) -> str:
        """Problem and what came instead: what a table or a list of errors has room for."""
        return self.problem + (f"; got: {self.got}" if self.got else "")

    def __str__(self) -> str:
        hints = (("expected", self.expected), ("got", self.got), ("fix", self.fix))
        return "\n".join([self.problem, *(f"  {word}: {text}" for word, text in hints if text)])


class ConfigError(NemoRLError):
    """A recipe holds an unknown key or a contradiction."""


class DataError(NemoRLError):
    """Rows are missing, malformed, empty or too long."""


class MissingColumnError(DataError, KeyError):
    """A batch lacks a column that is read; also a `KeyError`, as of any mapping."""


class ModelError(NemoRLError):
    """A model folder, name or tokenizer cannot be used."""


class ResourceError(NemoRLError):
    """The machine or cluster lacks what the recipe asks for."""


class RewardError(NemoRLError):
    """A reward function raised, or returned something that is not a finite number."""


class NotApplicableError(RewardError):
    """A reward function returned None: it says nothing of this completion."""


class ConsistencyError(NemoRLError):
    """Trainer and rollout engine disagree, or weights did not arrive as they were sent."""


class StoreError(NemoRLError):
    """The store cannot be written, is full, or holds something damaged."""


class DamagedRecordError(StoreError):
    """A row of the store's history cannot be read."""


class UnsafePathError(StoreError, ValueError):
    """A name from outside leads out of its folder; a `ValueError`, as for other damaged files."""


class NotRecordedError(StoreError):
    """The store's history has no run, node or artifact of that name."""


class WorkerError(NemoRLError):
    """A Ray worker raised or died."""


class MachineError(WorkerError):
    """A machine, or the network between machines, did not do its part; others may."""


class TransferError(MachineError):
    """A transfer of weights or of a save broke off: the other end died, is stuck, or has failed."""


class WorkerLostError(MachineError):
    """A Ray worker died, or did not answer in time; what it was asked, a new one may be asked."""
