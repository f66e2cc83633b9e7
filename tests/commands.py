"""Runs the user's command on a recipe of a few small steps, and reads its results."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
NUM_STEPS, SAVE_EVERY = 12, 4
RECIPE: dict[str, Any] = {
    "model": {
        "kind": "from_config",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_layers": 1,
        "num_heads": 2,
    },
    "data": {"kind": "arithmetic", "num_train": 64, "num_validation": 16, "max_operand": 9},
    "sft": {"num_steps": 6, "global_batch_size": 16},
    "grpo": {
        "num_iterations": 2,
        "num_steps_per_iteration": NUM_STEPS,
        "num_prompts_per_step": 4,
        "num_generations_per_prompt": 4,
        "save_every_num_steps": SAVE_EVERY,
    },
    "generation": {"max_new_tokens": 3},
    "cluster": {"num_threads": 1},
    "evaluation": {"num_samples_per_prompt": 2},
}


@dataclass(frozen=True)
class Run:
    """Terminal output and store of a run."""

    store: Path
    exit_code: int
    output: str
    seconds: float

    @property
    def lines(self) -> list[str]:
        return self.output.splitlines()

    def stages(self, state: str) -> list[str]:
        """Returns the names of the stages with this outcome, in order: `ran` or `CACHED`."""
        marker = f"  {state}"
        return [line.partition(marker)[0] for line in self.lines if marker in line[:40]]

    def value(self, word: str) -> str:
        """Returns the rest of the only line that starts with the word."""
        (line,) = [line for line in self.lines if line.startswith(word)]
        return line.removeprefix(word).strip()

    def artifact(self, stage: str) -> Path:
        """Returns the only artifact of that stage."""
        (folder,) = [
            manifest.parent
            for manifest in (self.store / "artifacts").glob("*/manifest.json")
            if json.loads(manifest.read_text())["stage"] == stage
        ]
        return folder

    def metrics(self, stage: str) -> list[dict[str, float]]:
        """Returns the metrics of every step of that stage, without times."""
        return step_metrics(self.artifact(stage))


GRPO = ("grpo", "grpo")
"""The module under `workflows/`, and the workflow in it."""


def start(
    recipe: dict[str, Any] | None, store: Path, workflow: tuple[str, str] = GRPO
) -> "subprocess.Popen[str]":
    """Starts the user's command in a separate process group."""
    pyflyte = Path(sys.executable).with_name("pyflyte")
    module, name = workflow
    config = [] if recipe is None else ["--config", json.dumps(recipe)]
    return subprocess.Popen(
        [pyflyte, "run", f"workflows/{module}.py", name, *config],
        cwd=REPOSITORY,
        env={**os.environ, "NEMO_RL_HOME": str(store)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def run(
    recipe: dict[str, Any] | None,
    store: Path,
    workflow: tuple[str, str] = GRPO,
    timeout_seconds: float = 1500,
) -> Run:
    began = time.monotonic()
    process = start(recipe, store, workflow)
    try:
        output, _ = process.communicate(timeout=timeout_seconds)
    finally:
        end_group(process)
    return Run(store, process.returncode, output, time.monotonic() - began)


def end_group(process: "subprocess.Popen[str]") -> None:
    """Ends the processes that a killed run has left in its process group."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def step_metrics(folder: Path) -> list[dict[str, float]]:
    """Returns the metrics that are equal in every rerun, without times."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["metrics"] for line in lines]
