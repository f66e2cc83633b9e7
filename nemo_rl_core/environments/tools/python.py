"""Tool that runs Python programs of the policy."""

from nemo_rl_core.environments.sandbox import Limits, Sandbox


class PythonRunner:
    """Runs each program in a new sandbox; nothing is kept between calls."""

    def __init__(self, limits: Limits) -> None:
        self._sandbox = Sandbox(limits)

    def __call__(self, program: str) -> str:
        """Returns the output of the program; if it failed, raises ValueError with the reason."""
        ended = self._sandbox.run({"main.py": program})
        if ended.succeeded:
            return ended.stdout.strip()
        if ended.output_cut:
            reason = "too much output"
        elif ended.exit_code is None or ended.exit_code < 0:
            reason = "the program exceeded its limits"
        else:
            lines = ended.stderr.strip().splitlines()
            reason = lines[-1] if lines else f"exit code {ended.exit_code}"
        raise ValueError(f"{ended.stdout.strip()}\n{reason}".strip())
