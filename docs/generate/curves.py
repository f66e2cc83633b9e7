"""Runs recipes whose metrics are healthy or not, and draws the curves of the documentation.

    cd docs && ../.venv/bin/python -m generate.curves run FOLDER [NAME ...]  # minutes on 2 cores
    cd docs && ../.venv/bin/python -m generate.curves draw

`run` writes the metrics of each step to `docs/pictures/curves.json`, `draw` the pictures from it.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from nemo_rl_core.telemetry.curves import curves_svg

REPOSITORY = Path(__file__).resolve().parents[2]
PICTURES = REPOSITORY / "docs" / "pictures"
VALUES = PICTURES / "curves.json"
METRICS = ("reward", "approx_entropy", "kl", "zero_variance_fraction")
WIDTH, HEIGHT, GAP = 420, 236, 12

REWARD = '''
def starts_with_nine(completion):
    """Pays for a first digit instead of the right sum."""
    return float(completion.startswith("9"))
'''
BASE: Mapping[str, Any] = {
    "recipe": "grpo_arithmetic",
    "data": {"num_validation": 200},
    "sft": {"num_steps": 160},
    "grpo": {"num_iterations": 1, "num_steps_per_iteration": 40},
    "evaluation": {"num_samples_per_prompt": 0, "environment": {"kind": "exact"}},
}
RECIPES: Mapping[str, Mapping[str, Any]] = {
    "healthy": {},
    "learning rate 0.005": {"grpo": {"learning_rate": 0.005}},
    "wrong reward": {
        "environment": {"kind": "function", "target": "my_rewards:starts_with_nine"},
        "grpo": {"loss": {"kl": None}},
    },
    "too little SFT": {"sft": {"num_steps": 40}},
}
"""Changes of `BASE` by run."""


@dataclass(frozen=True)
class Picture:
    """Panels next to each other, one per metric, with a line for each run."""

    metrics: Sequence[str]
    runs: Sequence[str]


DRAWN = {
    "kl": Picture(("reward", "kl"), ("healthy", "learning rate 0.005")),
    "entropy": Picture(("reward", "approx_entropy"), ("healthy", "wrong reward")),
    "groups": Picture(("reward", "zero_variance_fraction"), ("healthy", "too little SFT")),
}


def recipe_of(name: str) -> dict[str, Any]:
    """The recipe of a run of `RECIPES`."""
    changes = RECIPES[name]
    keys = [*BASE, *(key for key in changes if key not in BASE)]
    return {key: _merged(BASE.get(key), changes.get(key)) for key in keys}


def _merged(value: Any, change: Any) -> Any:
    if isinstance(value, dict) and isinstance(change, dict):
        return {**value, **change}
    return value if change is None else change


def run(folder: Path, name: str) -> dict[str, list[float]]:
    """Runs a recipe in a folder, and returns the values of `METRICS` by step."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "my_rewards.py").write_text(REWARD)
    recipe = folder / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(recipe_of(name)))
    log = folder / "metrics.jsonl"
    log.unlink(missing_ok=True)
    tracking = f"tracking={{trackers: [{{kind: jsonl, path: {json.dumps(str(log))}}}]}}"
    subprocess.run(
        [Path(sys.executable).with_name("nemo-rl"), "run", "grpo", recipe, tracking],
        cwd=folder,
        env={**os.environ, "NEMO_RL_HOME": str(folder / "store")},
        check=True,
    )
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    steps = [line for line in lines if line["stage"].startswith("grpo") and "reward" in line]
    return {
        metric: [float(f"{step[metric]:.4g}") for step in steps]
        for metric in METRICS
        if metric in steps[0]
    }


def drawn(values: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[str, str]:
    """The pictures as SVG by file name."""
    return {f"{name}.svg": _svg(picture, values) for name, picture in DRAWN.items()}


def _svg(picture: Picture, values: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    width = len(picture.metrics) * (WIDTH + GAP)
    panels = []
    for number, metric in enumerate(picture.metrics):
        lines = {
            run: list(enumerate(values[run][metric], start=1))
            for run in picture.runs
            if metric in values[run]
        }
        at = f'<svg x="{number * (WIDTH + GAP)}" '
        panels.append(curves_svg(metric, lines).replace("<svg ", at, 1))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" role="img">',
            f'<rect width="{width}" height="{HEIGHT}" fill="#ffffff"/>',
            *panels,
            "</svg>\n",
        ]
    )


def main(words: Sequence[str]) -> None:
    """Runs recipes, or draws all pictures."""
    values = json.loads(VALUES.read_text()) if VALUES.exists() else {}
    if words[0] == "run":
        for name in words[2:] or RECIPES:
            values[name] = run(Path(words[1]).resolve(), name)
            lines = (f"{json.dumps(name)}: {json.dumps(each)}" for name, each in values.items())
            VALUES.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    else:
        for file, text in drawn(values).items():
            (PICTURES / file).write_text(text)


if __name__ == "__main__":
    main(sys.argv[1:])
