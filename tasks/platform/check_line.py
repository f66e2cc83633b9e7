"""What a check of a cluster has found: a line of `nemo-rl cluster-check`."""

from pydantic import BaseModel, ConfigDict

from nemo_rl_core.maintenance.doctor.check import State


class CheckLine(BaseModel):
    """One line of the check.

    Attributes:
        name: What was tried.
        state: `fail` if stages cannot work so, `warn` if something is lost.
        found: What came of it.
        fix: What to do; empty if nothing.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    state: State
    found: str
    fix: str = ""
