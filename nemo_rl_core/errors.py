"""Errors that a user can cause, each with what was expected, what was found, and a fix."""


class NemoRLError(Exception):
    """Base class of errors that the user can fix.

    Args:
        problem: One sentence on what is wrong, and where.
        expected: Accepted values.
        got: Actual value.
        fix: Action that fixes the problem.

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
        """Problem and actual value, short enough for a table or a list of errors."""
        return self.problem + (f"; got: {self.got}" if self.got else "")

    def __str__(self) -> str:
        hints = (("expected", self.expected), ("got", self.got), ("fix", self.fix))
        return "\n".join([self.problem, *(f"  {word}: {text}" for word, text in hints if text)])


class ConfigError(NemoRLError):
    """A recipe has an unknown key or a contradiction."""


class DataError(NemoRLError):
    """Rows are missing, malformed, empty or too long."""


class MissingColumnError(DataError, KeyError):
    """A batch lacks a required column; also a `KeyError`, like that of any mapping."""


class ModelError(NemoRLError):
    """A model folder, name or tokenizer cannot be used."""


class ResourceError(NemoRLError):
    """The machine or cluster lacks what the recipe asks for."""


class RewardError(NemoRLError):
    """A reward function raised, or returned something that is not a finite number."""


class NotApplicableError(RewardError):
    """A reward function returned None: it does not apply to this completion."""


class ConsistencyError(NemoRLError):
    """Trainer and rollout engine disagree, or received weights differ from the sent ones."""


class StoreError(NemoRLError):
    """The store cannot be written, is full, or has damaged content."""


class DamagedRecordError(StoreError):
    """A row of the store's history cannot be read."""


class UnsafePathError(StoreError, ValueError):
    """A name in external data leads out of its folder.

    It is also a `ValueError`, which readers of damaged files catch.
    """


class NotRecordedError(StoreError):
    """The store's history has no run, node or artifact of that name."""


class WorkerError(NemoRLError):
    """A Ray worker raised or died."""


class MachineError(WorkerError):
    """A machine or the network between machines failed; another machine may succeed."""


class TransferError(MachineError):
    """A transfer of weights or of a save was interrupted: the other end died, hangs or failed."""


class WorkerLostError(MachineError):
    """A Ray worker died or did not answer in time; its request may be sent to a new one."""
