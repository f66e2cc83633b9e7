"""Procedurally generated reasoning tasks, sampled in a separate process.

Several tasks iterate over sets of strings, so their questions depend on the interpreter's hash seed
(word_ladder, isomorphic_strings, ransom_note ...). A seed must give the same rows in every run, and
the hash seed can only be set when a process starts.
"""

import json
import os
import subprocess
import sys

from nemo_rl_core.config.generated_data import ReasoningGymData
from nemo_rl_core.errors import DataError
from nemo_rl_core.types import Row


def load(config: ReasoningGymData, *, seed: int) -> tuple[list[Row], list[Row]]:
    """Samples distinct questions of every task, in equal parts and interleaved.

    Returns:
        Training rows and validation rows. `metadata` is JSON with `task`, `options` and `entry`,
        from which `environments.rewards.reasoning_gym` calls the task's scorer.
    """
    search_path = os.pathsep.join(path or os.curdir for path in sys.path)
    child = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "nemo_rl_core.data.datasets.reasoning_gym_draw"],
        input=json.dumps({"config": config.model_dump(), "seed": seed}),
        capture_output=True,
        encoding="utf-8",
        env={**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": search_path},
        check=False,
    )
    if child.returncode:
        raise DataError(
            "the process that samples reasoning-gym questions died",
            got=f"exit code {child.returncode}: {(child.stderr.strip() or 'no output')[-200:]}",
            fix="try the tasks of data.tasks one by one; a negative code -9 means out of memory",
        )
    result = json.loads(child.stdout)
    if "error" in result:
        raise DataError(*result["error"])
    train, validation = result["rows"]
    return train, validation
