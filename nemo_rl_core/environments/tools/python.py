"""Programs that the policy runs for itself."""

from nemo_rl_core.environments.sandbox import Limits, Sandbox


class PythonRunner:
    """Runs a program in a sandbox of its own; nothing stays from one call to the next.

    Args:
        limits: For one program.

    Raises:
        ResourceError: When this machine gives no sandbox.
    """

    def __init__(self, limits: Limits) -> None:
        self._sandbox = Sandbox(limits)

    def __call__(self, program: str) -> str:
        """What the program printed.

        Raises:
            ValueError: When it did not end well: its last words, behind what it printed.
            ResourceError: When the sandbox could not start.
        """
        ended = self._sandbox.run({"main.py": program})
        if ended.succeeded:
            return ended.stdout.strip()
        if ended.output_cut:
            reason = "too much output"
        elif ended.exit_code is None or ended.exit_code < 0:
            reason = "the program passed its limits"
        else:
            lines = ended.stderr.strip().splitlines()
            reason = lines[-1] if lines else f"exit code {ended.exit_code}"
        raise ValueError(f"{ended.stdout.strip()}\n{reason}".strip())
