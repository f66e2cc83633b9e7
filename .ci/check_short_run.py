"""Asserts the results of a run of `grpo_ci.yaml`: `check_short_run.py STORE FIRST AGAIN`.

STORE is the store of the run; FIRST and AGAIN are the outputs of the run and of its rerun. The
bounds leave room for other processors.
"""

import json
import math
import sys
from pathlib import Path
from typing import Any

MIN_SFT_ACCURACY = 0.25
MIN_IMPROVEMENT = 0.05
NUM_STAGES = 10  # model, data, SFT, 2 evaluations, 2 iterations, promotion, export, lineage


class UnsoundError(Exception):
    """A property of a correct run is missing."""


def require(truth: bool, problem: str) -> None:
    """Raises `UnsoundError` unless the first argument holds."""
    if not truth:
        raise UnsoundError(problem)


def artifacts(store: Path, stage: str) -> list[Path]:
    """Artifacts of a stage, by training step."""
    folders = []
    for manifest in (store / "artifacts").glob("*/manifest.json"):
        record = json.loads(manifest.read_text())
        if record["stage"].split()[0] == stage:
            folders.append((record["step"] or 0, manifest.parent))
    return [folder for _, folder in sorted(folders)]


def steps(folder: Path) -> list[dict[str, Any]]:
    """Metrics of every step."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["metrics"] for line in lines]


def check_sft(store: Path) -> str:
    """The supervised loss falls."""
    (folder,) = artifacts(store, "train_sft")
    losses = [step["loss"] for step in steps(folder)]
    require(len(losses) == 160, f"SFT made {len(losses)} steps, not 160")
    require(losses[-1] < 0.5 * losses[0], f"SFT loss went {losses[0]:.3f} -> {losses[-1]:.3f}")
    return f"SFT loss {losses[0]:.3f} -> {losses[-1]:.3f}"


def check_grpo(store: Path) -> str:
    """Every step has a finite reward, and engine and trainer agree."""
    folders = artifacts(store, "grpo_iteration")
    rows = [step for folder in folders for step in steps(folder)]
    require(len(rows) == 20, f"GRPO made {len(rows)} steps, not 20")
    for row in rows:
        where = f"step {row['global_step']:.0f}"
        finite = all(math.isfinite(row[key]) for key in ("reward", "loss", "grad_norm"))
        require(finite and 0 <= row["reward"] <= 1, f"{where}: {row}")
        error = row["token_mult_prob_error"]
        require(error < 1.001, f"{where}: token_mult_prob_error is {error}")
    return f"GRPO reward {rows[0]['reward']:.3f} -> {rows[-1]['reward']:.3f}"


def check_accuracy(store: Path) -> str:
    """SFT improves the accuracy, and GRPO improves it further."""
    reports = [json.loads((f / "metrics.json").read_text()) for f in artifacts(store, "evaluate")]
    before, after = (report["greedy_accuracy"] for report in reports)
    (decision,) = artifacts(store, "promote")
    difference = json.loads((decision / "decision.json").read_text())["difference"]
    require(before >= MIN_SFT_ACCURACY, f"accuracy after SFT is {before:.3f}")
    require(difference >= MIN_IMPROVEMENT, f"GRPO changed accuracy by {difference:+.3f}")
    return f"accuracy {before:.3f} -> {after:.3f}"


def check_logs(first: Path, again: Path) -> str:
    """The first run ran every stage, the second ran none."""
    ran, cached = first.read_text().count("  ran  "), again.read_text().count("  CACHED  ")
    require(ran == NUM_STAGES, f"the first run ran {ran} stages, not {NUM_STAGES}")
    require(cached == NUM_STAGES, f"the rerun took {cached} stages from the cache")
    require("  ran  " not in again.read_text(), "the rerun ran a stage")
    return f"{ran} stages ran, then {cached} CACHED"


def main(store: Path, first: Path, again: Path) -> int:
    """Prints one line per check; returns the exit code."""
    try:
        results = [check_logs(first, again), check_sft(store), check_grpo(store)]
        results.append(check_accuracy(store))
    except UnsoundError as problem:
        sys.stderr.write(f"the short main job is not sound: {problem}\n")
        return 1
    sys.stdout.write("\n".join(results) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:4])))
