"""The result of a check of a cluster: a line of `nemo-rl cluster-check`."""

from pydantic import BaseModel, ConfigDict

from nemo_rl_core.maintenance.doctor.check import State


class CheckLine(BaseModel):
    """One line of the check."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    state: State
    found: str
    fix: str = ""
