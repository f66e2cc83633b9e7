"""What stages open and run of the project and of a user's code is what their keys cover.

Each stage runs in a process of its own, with a hook in it, in Ray's workers and in all that they
start (`opened/sitecustomize.py`). A file that is run or read by code of the key must be in the key,
or on one of the lists of `digest_scope`. What only reports imports is theirs. A module that such a
report has imported first, and that code of the key asks for again by a computed name, is not seen.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_core.store import source_digest
from nemo_rl_core.store.digest_scope import NOT_RUN_BY_STAGES, REPORTING
from nemo_rl_core.store.manifest import Manifest
from nemo_rl_core.store.user_source import read_user_source
from tasks.recipes.grpo import GRPOPlan, GRPORecipe, plan_grpo
from tests.commands import RECIPE

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).resolve().parents[2]
HOOK = Path(__file__).with_name("opened")
PACKAGES = ("nemo_rl_core", "tasks", "workflows")
NOT_CHOSEN = (
    *("nemo_rl_core.backends.generation", "nemo_rl_core.backends.training.megatron"),
    *("nemo_rl_core.checkpoints.dcp_metadata", "nemo_rl_core.data.datasets"),
    *("nemo_rl_core.environments", "nemo_rl_core.games"),
)
"""Where the parts are that a recipe chooses from: other backends, sources of data, environments."""
NUM_NOT_CHOSEN = 60
"""How many files of them are in a key and opened by no stage below. A higher number is a key that
has grown by what nothing here runs."""


@dataclass
class Chain:
    """Stages one after another over a store of their own.

    Attributes:
        folder: Has the store, the records, and the code of a user.
        wrong_reports: Whether modules that report return wrong texts and numbers.
        made: What each stage has returned.
    """

    folder: Path
    wrong_reports: bool = False
    made: dict[str, dict[str, Any]] = field(default_factory=dict)

    def run(self, stage: str, **inputs: Any) -> None:
        """Runs a stage once."""
        log = self.log_of(stage)
        log.mkdir(parents=True)
        roots = [*(str(REPOSITORY / package) + os.sep for package in PACKAGES), str(self.user)]
        environment = {
            **os.environ,
            "NEMO_RL_HOME": str(self.folder / "store"),
            "PYTHONPATH": os.pathsep.join(map(str, (HOOK, REPOSITORY, self.user))),
            "OPENED_LOG": str(log),
            "OPENED_ROOTS": os.pathsep.join(roots),
        }
        if self.wrong_reports:
            environment["WRONG_REPORTS"] = json.dumps(sorted(REPORTING))
        done = subprocess.run(
            [sys.executable, Path(__file__).with_name("one_stage.py"), stage],
            cwd=self.user,
            env=environment,
            input=json.dumps(inputs),
            capture_output=True,
            text=True,
            check=False,
            timeout=900,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        self.made[stage] = json.loads(done.stdout.splitlines()[-1])

    @property
    def user(self) -> Path:
        """The user's folder."""
        return self.folder / "user"

    def log_of(self, stage: str) -> Path:
        """The records of all processes of a stage."""
        return self.folder / "opened" / stage

    def opened(self, stage: str) -> Iterator[tuple[Path, Path | None]]:
        """Each file that was run or opened, and by whom."""
        for record in sorted(self.log_of(stage).glob("*.jsonl")):
            for line in record.read_text().splitlines():
                file, reader = json.loads(line)
                yield Path(file), Path(reader) if reader else None

    def content(self) -> dict[str, str]:
        """The content hash of everything that was made."""
        return {
            f"{stage}.{name}": each["content_hash"]
            for stage, outputs in self.made.items()
            for name, each in outputs.items()
        }


def start(folder: Path, *, wrong_reports: bool = False) -> tuple[Chain, GRPOPlan]:
    """A chain whose recipe scores with a user's function beside the project's own."""
    chain = Chain(folder, wrong_reports)
    chain.user.mkdir(parents=True)
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
    return chain, planned(chain, {"environment": {"kind": "weighted_sum", "parts": parts}})


def planned(chain: Chain, changes: dict[str, Any]) -> GRPOPlan:
    """The settings of all stages, made in the user's folder, where the reward is found."""
    recipe = {
        **RECIPE,
        "sft": {"num_steps": 2, "global_batch_size": 16},
        "grpo": {**RECIPE["grpo"], "num_iterations": 1, "num_steps_per_iteration": 2},
        **changes,
    }
    with contextlib.chdir(chain.user):
        plan: GRPOPlan = plan_grpo(config=GRPORecipe.model_validate(recipe))
    return plan


def settings(config: Any) -> dict[str, Any]:
    """A stage's config as it is handed on."""
    fields: dict[str, Any] = config.model_dump(mode="json")
    return fields


def run_plain(chain: Chain, plan: GRPOPlan) -> None:
    """Model and data, which need no Ray."""
    chain.run("prepare_model", config=settings(plan.model))
    tokenizer = chain.made["prepare_model"]["tokenizer"]
    chain.run("prepare_data", config=settings(plan.data), tokenizer=tokenizer)


def run_trained(chain: Chain, plan: GRPOPlan) -> None:
    """The rest of the pipeline."""
    base, rows = chain.made["prepare_model"]["base"], chain.made["prepare_data"]
    chain.run("train_sft", config=settings(plan.sft), base=base, train=rows["train"])
    start = chain.made["train_sft"]["train_sft"]
    chain.run(
        "grpo_iteration",
        config=settings(plan.grpo),
        start=start,
        reference=start,
        train=rows["train"],
        iteration=1,
    )
    trained = chain.made["grpo_iteration"]["grpo_iteration"]
    chain.run(
        "evaluate",
        config=settings(plan.evaluation),
        checkpoint=trained,
        validation=rows["validation"],
    )
    measured = chain.made["evaluate"]["evaluate"]
    chain.run(
        "promote",
        config=settings(plan.promotion),
        incumbent=start,
        candidate=trained,
        before=measured,
        after=measured,
    )
    promoted = chain.made["promote"]
    chain.run("export", checkpoint=promoted["checkpoint"], decision=promoted["decision"])
    chain.run("lineage_report", model=chain.made["export"]["export"])


def module_of(file: Path) -> str:
    """The module of a file of the project."""
    parts = file.relative_to(REPOSITORY).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def not_covered(chain: Chain, stage: str) -> list[str]:
    """Files of the project that code of the key has opened, and that are in no key or list."""
    key = source_digest.reachable_modules(f"tasks.{stage}")
    found = []
    for file, reader in chain.opened(stage):
        if not file.is_relative_to(REPOSITORY):
            continue
        module = module_of(file)
        by = module_of(reader) if reader and reader.is_relative_to(REPOSITORY) else ""
        if file.suffix == ".py" and (module in key or source_digest._is_left_out(module)):
            continue
        if by in key or not by:
            declared = NOT_RUN_BY_STAGES.get(by, set())
            if not declared & {*source_digest._with_packages(module), module}:
                found.append(f"{module if file.suffix == '.py' else file} by {by or 'a library'}")
    return sorted(set(found))


def opened_modules(chain: Chain) -> set[str]:
    """Modules of the project that some stage has opened."""
    files = {file for stage in chain.made for file, _ in chain.opened(stage)}
    return {module_of(file) for file in files if file.is_relative_to(REPOSITORY)}


def never_opened(chain: Chain) -> set[str]:
    """Modules that are in the key of a stage that ran, and that no stage has opened."""
    keys = (source_digest.reachable_modules(f"tasks.{stage}") for stage in chain.made)
    return set().union(*keys) - opened_modules(chain)


def assert_covered(chain: Chain) -> None:
    for stage in chain.made:
        assert module_opened(chain, stage, f"tasks.{stage}"), "the hook has recorded nothing"
        assert not_covered(chain, stage) == [], stage


def module_opened(chain: Chain, stage: str, module: str) -> bool:
    return any(
        file.is_relative_to(REPOSITORY) and module_of(file) == module
        for file, _ in chain.opened(stage)
    )


def test_plain_stages_open_what_their_keys_cover(tmp_path: Path) -> None:
    chain, plan = start(tmp_path)
    run_plain(chain, plan)
    assert_covered(chain)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    """All stages of a pipeline."""
    chain, plan = start(tmp_path_factory.mktemp("whole"))
    run_plain(chain, plan)
    run_trained(chain, plan)
    return chain


@pytest.mark.thorough
def test_all_stages_open_what_their_keys_cover(whole: Chain) -> None:
    assert_covered(whole)
    # In workers of Ray and in the program that checks mathematics, which has no hook of its own:
    engine = "nemo_rl_core.backends.generation.vllm"
    assert module_opened(whole, "grpo_iteration", engine)
    assert module_opened(whole, "train_sft", "nemo_rl_core.backends.training.dtensor.backend")
    checker = "nemo_rl_core.environments.rewards.math_worker"
    assert module_opened(whole, "grpo_iteration", checker)


@pytest.fixture(scope="module")
def coded(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    """An evaluation by programs in a sandbox."""
    chain = Chain(tmp_path_factory.mktemp("coded"))
    chain.user.mkdir(parents=True)
    tests = {"metadata": {"tests": ["assert add(1, 2) == 3"]}}
    files = {"train": chain.user / "train.jsonl", "validation": chain.user / "validation.jsonl"}
    for name, file in files.items():
        prompts = [f"Add the numbers {n} of {name}." for n in range(4)]
        lines = [json.dumps({"id": each, "prompt": each, **tests}) for each in prompts]
        file.write_text("\n".join(lines))
    changes = {
        "model": {**RECIPE["model"], "kind": "text_from_config"},
        "data": {
            **{"kind": "file", "max_prompt_tokens": 128},
            **{name: str(file) for name, file in files.items()},
        },
        "environment": {"kind": "code"},
    }
    plan = planned(chain, changes)
    run_plain(chain, plan)
    chain.run(
        "evaluate",
        config=settings(plan.evaluation),
        checkpoint=chain.made["prepare_model"]["base"],
        validation=chain.made["prepare_data"]["validation"],
    )
    return chain


@pytest.mark.thorough
def test_programs_of_the_sandbox_are_covered(coded: Chain) -> None:
    assert_covered(coded)
    # Read as text, and started in isolation:
    assert module_opened(coded, "evaluate", "nemo_rl_core.environments.sandbox.launcher")
    checker = "nemo_rl_core.environments.rewards.code_checker.checker"
    assert module_opened(coded, "evaluate", checker)


@pytest.mark.thorough
def test_few_files_are_in_a_key_and_opened_by_nothing(whole: Chain, coded: Chain) -> None:
    never = sorted(never_opened(whole) - opened_modules(coded))
    chosen = [module for module in never if not module.startswith(NOT_CHOSEN)]
    assert chosen == []
    assert len(never) <= NUM_NOT_CHOSEN, "\n".join(never)


@pytest.mark.thorough
def test_of_a_users_reward_everything_is_covered(
    whole: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(whole.user)
    covered = {file.name for file in read_user_source("users_reward").files}
    assert covered == {"users_reward.py", "users_words.py", "words.txt"}
    for stage in ("grpo_iteration", "evaluate"):
        files = {file for file, _ in whole.opened(stage) if file.parent == whole.user}
        assert {file.name for file in files if file.is_file()} == covered, stage


@pytest.mark.thorough
def test_wrong_reports_change_no_result(whole: Chain, tmp_path: Path) -> None:
    chain, plan = start(tmp_path, wrong_reports=True)
    run_plain(chain, plan)
    run_trained(chain, plan)
    changed = {path.stem for path in chain.folder.rglob("*.wrong")}
    assert {"nemo_rl_core.telemetry.cost", "nemo_rl_core.telemetry.curves"} <= changed
    trained = Path(chain.made["train_sft"]["train_sft"]["directory"])
    assert (trained / "deck.html").read_text().startswith("wrong")
    assert chain.content() == whole.content()


@pytest.mark.thorough
def test_manifests_have_how_the_workers_computed(whole: Chain) -> None:
    made = Path(whole.made["grpo_iteration"]["grpo_iteration"]["directory"])
    processes = Manifest.read(made).machine.processes
    assert set(processes) == {"training", "generation"}
    assert all(each["threads"] == "1" for each in processes.values())
    assert all(each["cpu_capability"] for each in processes.values())
    assert processes["generation"]["attention"] == "CPU_ATTN"
