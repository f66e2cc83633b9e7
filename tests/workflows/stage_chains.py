"""Runs stages one after another, each in a separate process with a hook in it.

The hook (`opened/sitecustomize.py`) records the files that the process, Ray's workers and all other
child processes open and run. The inputs of a stage are those in `stage_graph`.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_rl_core.store.digest_scope import REPORTING
from tests.commands import RECIPE
from tests.workflows.stage_graph import GRAPH, config_of, module_of, plans_of, stages

REPOSITORY = Path(__file__).resolve().parents[2]
_HOOK = Path(__file__).with_name("opened")
_PACKAGES = ("nemo_rl_core", "tasks", "workflows")

HEAD_THREADS = "2"
"""Threads of the stage's main process; the recipe sets those of its workers."""
_ITERATION = {"num_iterations": 1, "num_steps_per_iteration": 2}
SMALL: dict[str, Any] = {
    **RECIPE,
    "sft": {"num_steps": 2, "global_batch_size": 16, "validate_every_num_steps": 2},
    "pairs": {"kind": "rollouts", "num_generations_per_prompt": 4},
    "dpo": {**_ITERATION, "num_pairs_per_step": 4},
    "reward_model": {"num_steps": 2, "num_pairs_per_step": 4},
    "grpo": {**RECIPE["grpo"], **_ITERATION, "validate_every_num_steps": 2},
    "ppo": {**_ITERATION, "num_prompts_per_step": 4},
    "distillation": {"num_steps": 2, "num_prompts_per_step": 4, "top_k": 4},
    "baseline": RECIPE["model"],
}
"""Recipe with as little work as possible for each stage."""


@dataclass
class Chain:
    """Stages that run one after another with a separate store.

    Attributes:
        folder: Folder of the store, the records and the code of a user.
        wrong_reports: Whether reporting modules return wrong texts and numbers.
        made: Outputs of each stage.
        earlier: Outputs of stages of an earlier chain.
    """

    folder: Path
    wrong_reports: bool = False
    made: dict[str, dict[str, Any]] = field(default_factory=dict)
    earlier: dict[str, dict[str, Any]] = field(default_factory=dict)

    def run(self, *names: str, recipe: Mapping[str, Any]) -> None:
        """Runs stages on the outputs of those before them.

        Args:
            names: Names of the stages, in the order of `GRAPH`.
            recipe: Recipe with the keys of all plans. It is loaded in the user's folder, so that
                the user's reward can be imported.
        """
        with contextlib.chdir(self.user):
            plans = plans_of(recipe, over={"seed": [0]})
        for name in names:
            node = GRAPH[name]
            inputs = {role: self._made_as(source) for role, source in node.reads.items()}
            if "reports" in inputs:  # `map_task` passes one for each point
                inputs["reports"] = [inputs["reports"]]
            if node.config:
                inputs["config"] = config_of(node, plans).model_dump(mode="json")
            self.made[name] = self._run(name, {**inputs, **node.constants})

    def _made_as(self, source: str) -> Any:
        stage, _, output = source.partition(".")
        return {**self.earlier, **self.made}[stage][output or stage]

    def _run(self, name: str, inputs: dict[str, Any]) -> dict[str, Any]:
        log = self.log_of(name)
        log.mkdir(parents=True)
        roots = [*(str(REPOSITORY / package) + os.sep for package in _PACKAGES), str(self.user)]
        environment = {
            **os.environ,
            "NEMO_RL_HOME": str(self.folder / "store"),
            "OMP_NUM_THREADS": HEAD_THREADS,
            "PYTHONPATH": os.pathsep.join(map(str, (_HOOK, REPOSITORY, self.user))),
            "OPENED_LOG": str(log),
            "OPENED_ROOTS": os.pathsep.join(roots),
        }
        if self.wrong_reports:
            environment["WRONG_REPORTS"] = json.dumps(sorted(REPORTING))
        done = subprocess.run(
            [sys.executable, Path(__file__).with_name("one_stage.py"), module_of_stage(name), name],
            cwd=self.user,
            env=environment,
            input=json.dumps(inputs),
            capture_output=True,
            text=True,
            check=False,
            timeout=900,
        )
        assert done.returncode == 0, f"{name}: {done.stderr[-3000:]}"
        outputs: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return outputs

    @property
    def user(self) -> Path:
        """Folder of the user."""
        return self.folder / "user"

    def log_of(self, stage: str) -> Path:
        """Returns the folder with the records of all processes of a stage."""
        return self.folder / "opened" / stage

    def opened(self, stage: str) -> Iterator[tuple[Path, Path | None]]:
        """Yields each file that was run or opened, and its reader."""
        for record in sorted(self.log_of(stage).glob("*.jsonl")):
            for line in record.read_text().splitlines():
                file, reader = json.loads(line)
                yield Path(file), Path(reader) if reader else None

    def content(self) -> dict[str, str]:
        """Returns the content hash of every output."""
        return {
            f"{stage}.{name}": each["content_hash"]
            for stage, outputs in self.made.items()
            for name, each in outputs.items()
        }


def module_of_stage(name: str) -> str:
    """Returns the module whose source is in the stage's key."""
    return module_of(stages()[name])


def with_users_reward(chain: Chain) -> dict[str, Any]:
    """Returns a recipe for all pipelines that uses a user's reward and one of the project."""
    chain.user.mkdir(parents=True, exist_ok=True)
    (chain.user / "users_reward.py").write_text(
        "from pathlib import Path\n\n"
        "from users_words import known\n\n"
        "_LIST = Path(__file__).with_name('words.txt')\n\n\n"
        "def score(prompt: str, response: str) -> float:\n"
        "    return float(known(response, _LIST.read_text().split()))\n"
    )
    (chain.user / "users_words.py").write_text(
        "def known(text, words):\n    return sum(text.count(word) for word in words) % 3\n"
    )
    (chain.user / "words.txt").write_text("1 2 3\n")
    function = {"kind": "function", "target": "users_reward:score"}
    parts = [{"environment": function}, {"environment": {"kind": "math"}}]
    environment = {"kind": "weighted_sum", "parts": parts}
    return {**SMALL, "environment": environment, "grpo_reward": environment}


def of_rows(chain: Chain, rows: Mapping[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Returns a recipe for a model that reads text, with data in files of the user.

    Args:
        chain: Chain in whose user folder the files are written.
        rows: Rows of each file, `train` and `validation`.
    """
    chain.user.mkdir(parents=True)
    files = {name: chain.user / f"{name}.jsonl" for name in rows}
    for name, file in files.items():
        file.write_text("\n".join(map(json.dumps, rows[name])))
    data = {"kind": "file", "max_prompt_tokens": 128}
    return {
        **SMALL,
        "model": {**SMALL["model"], "kind": "text_from_config"},
        "data": {**data, **{name: str(file) for name, file in files.items()}},
    }
