"""Asserts what commands cost to start: `check_start_up.py STORE`, after `make grpo` into STORE.

Each figure is a ratio of CPU-seconds to `import flytekit`, below which no command of this project
can come: medians of alternating runs, so that neither a slow nor a busy machine moves them. STORE
holds a finished run of `grpo_ci.yaml`, and the rerun finds all of it in the cache.
"""

import os
import statistics
import subprocess
import sys
from pathlib import Path

ROUNDS = 3
MAX_HELP_LINES = 60
FLYTEKIT = [".venv/bin/python", "-c", "import flytekit"]
GRPO = [".venv/bin/pyflyte", "run", "workflows/grpo.py", "grpo"]
# What is started, its exit code, and the largest ratio.
COMMANDS = {
    "import workflows.grpo": ([".venv/bin/python", "-c", "import workflows.grpo"], 0, 2.0),
    "a misspelt key": ([*GRPO, "--config", '{"gepo": {}}'], 2, 2.5),
    "pyflyte run … --help": ([*GRPO, "--help"], 0, 2.5),
    "make grpo, all cached": (
        ["make", "grpo", "CONFIG=workflows/recipes/grpo_ci.yaml"],
        0,
        4.0,
    ),
    "make package": (["make", "package"], 0, 10.0),
}


def cpu_seconds(command: list[str], exit_code: int, store: Path) -> tuple[float, str]:
    """Of the command and all processes that it has waited for; and what it printed."""
    before = os.times()
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "NEMO_RL_HOME": str(store)},
    )
    after = os.times()
    if done.returncode != exit_code:
        sys.exit(f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    spent = after.children_user + after.children_system
    return spent - before.children_user - before.children_system, done.stdout


def main(store: Path) -> None:
    """Prints each ratio with its spread; exits with 1 where one is too large."""
    base: list[float] = []
    ratios: dict[str, list[float]] = {name: [] for name in COMMANDS}
    problems = []
    cpu_seconds(FLYTEKIT, 0, store)  # compiles what has not been compiled
    for _ in range(ROUNDS):
        base.append(cpu_seconds(FLYTEKIT, 0, store)[0])
        for name, (command, exit_code, _) in COMMANDS.items():
            spent, printed = cpu_seconds(command, exit_code, store)
            ratios[name].append(spent / base[-1])
            if command[-1] == "--help" and len(printed.splitlines()) > MAX_HELP_LINES:
                problems.append(f"{name}: {len(printed.splitlines())} lines")
    print(f"import flytekit: {statistics.median(base):.2f} CPU-s")  # noqa: T201
    for name, found in ratios.items():
        ratio, bound = statistics.median(found), COMMANDS[name][2]
        print(f"{name}: {ratio:.2f} times ({min(found):.2f} to {max(found):.2f}), at most {bound}")  # noqa: T201
        if ratio > bound:
            problems.append(f"{name}: {ratio:.2f} times import flytekit, at most {bound}")
    if problems:
        sys.exit("too slow to start:\n  " + "\n  ".join(problems))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
