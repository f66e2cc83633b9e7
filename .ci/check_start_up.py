"""Checks the start-up cost of commands: `check_start_up.py STORE`, after `make grpo` into STORE.

Each figure is a ratio of CPU-seconds to those of `import flytekit`, the minimum for any command of
this project. Figures are medians of alternating runs, so that the speed and load of the machine do
not change them. STORE contains a finished run of `grpo_ci.yaml`; the rerun finds it in the cache.
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
RECIPE = (
    "from tasks.recipes.grpo import GRPORecipe;"
    "GRPORecipe.model_validate({'recipe': 'grpo_arithmetic'})"
)
# Command, its exit code, and the maximum ratio.
COMMANDS = {
    "read a recipe": ([".venv/bin/python", "-c", RECIPE], 0, 0.8),
    "nemo-rl --help": ([".venv/bin/nemo-rl", "--help"], 0, 0.3),
    "an unknown pipeline": ([".venv/bin/nemo-rl", "run", "nosuch"], 2, 0.35),
    "an unknown recipe": ([".venv/bin/nemo-rl", "run", "grpo", "nosuch"], 2, 0.35),
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
    """Returns the CPU-seconds of the command and its child processes, and its output."""
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
    """Prints each ratio with its spread; exits with 1 if one is too large."""
    base: list[float] = []
    ratios: dict[str, list[float]] = {name: [] for name in COMMANDS}
    problems = []
    cpu_seconds(FLYTEKIT, 0, store)  # compiles modules that are not compiled yet
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
