"""Keys of stages cover the files of the project and of users that stages open and run.

Each stage runs in a separate process. A hook (`opened/sitecustomize.py`) runs in it, in Ray's
workers and in everything that they start. A file that code of the key runs or reads must be in the
key or on one of the lists of `digest_scope`. A file of the key must be opened by the stage or be
used by another recipe. Files that only reporting modules import do not count. The hook misses a
module that a report has imported first and that code of the key imports by a computed name.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_core.store import source_digest
from nemo_rl_core.store.digest_scope import NOT_RUN_BY_STAGES
from nemo_rl_core.store.manifest import Manifest
from nemo_rl_core.store.user_source import read_user_source
from tests.workflows.stage_chains import (
    HEAD_THREADS,
    REPOSITORY,
    Chain,
    module_of_stage,
    of_rows,
    with_users_reward,
)
from tests.workflows.stage_graph import GRAPH

pytestmark = pytest.mark.slow

PLAIN = ("prepare_model", "prepare_data")
"""Stages of model and data, which do not need Ray."""
PIPELINE = (
    *(*PLAIN, "train_sft", "grpo_iteration", "evaluate"),
    *("promote", "export", "lineage_report"),
)
FROM_ROWS = (*PLAIN, "tokenize_pairs")
"""Stages for preference data, whose rows differ from rows with prompts."""
OTHERS = tuple(stage for stage in GRAPH if stage not in {*PIPELINE, *FROM_ROWS})
"""All other stages with a key. `test_cache_table.py` fails if GRAPH lacks one."""
NOT_CHOSEN = (
    *("nemo_rl_core.backends.generation", "nemo_rl_core.backends.training.megatron"),
    *("nemo_rl_core.data.datasets", "nemo_rl_core.environments", "nemo_rl_core.games"),
    "nemo_rl_core.converters.float32_copy",
)
"""Packages of parts that a recipe chooses from: backends, data sources, environments, published
models."""
NOT_CHOSEN_IN_A_STAGE = (
    *(*NOT_CHOSEN, "nemo_rl_core.backends", "nemo_rl_core.functional.logprobs"),
    *("nemo_rl_core.checkpoints.dcp_metadata", "nemo_rl_core.checkpoints.tensors"),
    *("nemo_rl_core.distributed.gathered_writes", "nemo_rl_core.model_files"),
)
"""The same for one stage. A reward model scores with a training backend, which also reads quantized
weights and Megatron's checkpoints, and which loads published models."""
NUM_NOT_CHOSEN = 31
"""Number of their files that are in a key but opened by no stage below. If it grows, a key has
grown by code that nothing here runs."""


def module_of(file: Path) -> str:
    """Returns the module of a file of the project."""
    parts = file.relative_to(REPOSITORY).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def not_covered(chain: Chain, stage: str) -> list[str]:
    """Returns files of the project that code of the key has opened but no key or list contains."""
    key = source_digest.reachable_modules(module_of_stage(stage))
    missing = []
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
                missing.append(f"{module if file.suffix == '.py' else file} by {by or 'a library'}")
    return sorted(set(missing))


def opened_modules(chain: Chain) -> set[str]:
    """Returns modules of the project that some stage has opened."""
    files = {file for stage in chain.made for file, _ in chain.opened(stage)}
    return {module_of(file) for file in files if file.is_relative_to(REPOSITORY)}


def modules_of_keys(chain: Chain) -> set[str]:
    """Returns modules that are in the key of a stage that ran."""
    reached = (source_digest.reachable_modules(module_of_stage(stage)) for stage in chain.made)
    return set().union(*reached)


def unused(chain: Chain, stage: str) -> list[str]:
    """Returns modules of a stage's key that it has not opened and that no recipe could choose."""
    key = source_digest.reachable_modules(module_of_stage(stage))
    opened = opened_modules(replace(chain, made={stage: chain.made[stage]}))
    return [each for each in sorted(key - opened) if not each.startswith(NOT_CHOSEN_IN_A_STAGE)]


def assert_covered(chain: Chain) -> None:
    for stage in chain.made:
        assert module_opened(chain, stage, module_of_stage(stage)), (
            "the hook did not record anything"
        )
        assert not_covered(chain, stage) == [], stage
        assert unused(chain, stage) == [], stage


def module_opened(chain: Chain, stage: str, module: str) -> bool:
    return any(
        file.is_relative_to(REPOSITORY) and module_of(file) == module
        for file, _ in chain.opened(stage)
    )


@pytest.fixture(scope="module")
def from_rows(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    """Stages without workers, with preferences in files of a user."""
    sides = {"chosen": "Three.", "rejected": "Four."}
    chain = Chain(tmp_path_factory.mktemp("rows"))
    chain.run(*FROM_ROWS, recipe=of_rows(chain, _files({"kind": "preference", **sides})))
    return chain


@pytest.mark.thorough
def test_plain_stages_open_only_files_in_their_keys(from_rows: Chain) -> None:
    assert_covered(from_rows)
    assert module_opened(from_rows, "tokenize_pairs", "nemo_rl_core.data.pairs")


def _files(fields: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Returns four rows for each file, with a prompt and these fields."""
    return {
        name: [{"id": f"{name} {n}", "prompt": f"Add {n} of {name}.", **fields} for n in range(4)]
        for name in ("train", "validation")
    }


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    """All stages of a pipeline."""
    chain = Chain(tmp_path_factory.mktemp("pipeline"))
    chain.run(*PIPELINE, recipe=with_users_reward(chain))
    return chain


@pytest.fixture(scope="module")
def others(pipeline: Chain) -> Chain:
    """The stages of all other pipelines, after those of `pipeline`, with transformers' engine."""
    return run_others(pipeline)


def run_others(pipeline: Chain) -> Chain:
    """Runs the stages of other pipelines on the outputs of this one."""
    chain = Chain(pipeline.folder, pipeline.wrong_reports, earlier=pipeline.made)
    recipe = with_users_reward(chain)
    engine = {**recipe["generation"], "backend": "hf"}
    chain.run(*OTHERS, recipe={**recipe, "generation": engine})
    return chain


@pytest.mark.thorough
def test_stages_of_a_pipeline_open_only_files_in_their_keys(pipeline: Chain) -> None:
    assert_covered(pipeline)
    # In workers of Ray and in the program that checks mathematics, which does not run the hook:
    engine = "nemo_rl_core.backends.generation.vllm"
    assert module_opened(pipeline, "grpo_iteration", engine)
    assert module_opened(pipeline, "train_sft", "nemo_rl_core.backends.training.dtensor.backend")
    checker = "nemo_rl_core.environments.rewards.math_worker"
    assert module_opened(pipeline, "grpo_iteration", checker)


@pytest.mark.thorough
def test_all_other_stages_open_only_files_in_their_keys(others: Chain) -> None:
    assert set(others.made) == {*OTHERS}
    assert_covered(others)
    algorithms = {
        **{"dpo_iteration": "dpo.trainer", "train_reward_model": "reward_model.trainer"},
        **{"ppo_iteration": "ppo.trainer", "train_student": "distillation.trainer"},
    }
    for stage, trainer in algorithms.items():
        assert module_opened(others, stage, f"nemo_rl_core.algorithms.{trainer}")


@pytest.fixture(scope="module")
def coded(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    """An evaluation that runs programs in a sandbox."""
    tests = {"metadata": {"tests": ["assert add(1, 2) == 3"], "entry_point": "add"}}
    chain = Chain(tmp_path_factory.mktemp("coded"))
    recipe = {**of_rows(chain, _files(tests)), "environment": {"kind": "code"}}
    chain.run(*PLAIN, recipe=recipe)
    chain.earlier["grpo_iteration"] = {"grpo_iteration": chain.made["prepare_model"]["base"]}
    chain.run("evaluate", recipe=recipe)
    return chain


@pytest.mark.thorough
def test_programs_of_the_sandbox_are_covered(coded: Chain) -> None:
    assert_covered(coded)
    # Read as text and started in isolation:
    assert module_opened(coded, "evaluate", "nemo_rl_core.environments.sandbox.launcher")
    checker = "nemo_rl_core.environments.rewards.code_checker.checker"
    assert module_opened(coded, "evaluate", checker)


@pytest.mark.thorough
def test_few_files_of_keys_are_never_opened(
    pipeline: Chain, others: Chain, coded: Chain, from_rows: Chain
) -> None:
    chains = (pipeline, others, coded, from_rows)
    in_keys = set().union(*map(modules_of_keys, chains))
    never = sorted(in_keys.difference(*map(opened_modules, chains)))
    chosen = [module for module in never if not module.startswith(NOT_CHOSEN)]
    assert chosen == []
    assert len(never) <= NUM_NOT_CHOSEN, "\n".join(never)


@pytest.mark.thorough
def test_all_files_of_a_users_reward_are_covered(
    pipeline: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(pipeline.user)
    covered = {file.name for file in read_user_source("users_reward").files}
    assert covered == {"users_reward.py", "users_words.py", "words.txt"}
    for stage in ("grpo_iteration", "evaluate"):
        files = {file for file, _ in pipeline.opened(stage) if file.parent == pipeline.user}
        assert {file.name for file in files if file.is_file()} == covered, stage


@pytest.mark.timeout(3600)  # on its own it runs 42 stages
@pytest.mark.thorough
def test_wrong_reports_change_no_result(pipeline: Chain, others: Chain, tmp_path: Path) -> None:
    chain = Chain(tmp_path, wrong_reports=True)
    chain.run(*PIPELINE, recipe=with_users_reward(chain))
    after = run_others(chain)
    changed = {path.stem for path in chain.folder.rglob("*.wrong")}
    assert {"nemo_rl_core.telemetry.cost", "nemo_rl_core.telemetry.curves"} <= changed
    trained = Path(chain.made["train_sft"]["train_sft"]["directory"])
    assert (trained / "deck.html").read_text().startswith("wrong")
    assert chain.content() == pipeline.content()
    assert after.content() == others.content()


@pytest.mark.thorough
def test_manifests_record_the_settings_of_workers(pipeline: Chain) -> None:
    made = Path(pipeline.made["grpo_iteration"]["grpo_iteration"]["directory"])
    machine = Manifest.read(made).machine
    processes = machine.processes
    assert set(processes) == {"training", "generation"}
    assert all(each["threads"] == "1" for each in processes.values())
    assert all(each["cpu_capability"] for each in processes.values())
    assert processes["generation"]["attention"] == "CPU_ATTN"
    assert machine.variables["OMP_NUM_THREADS"] == HEAD_THREADS
    others = machine.process_variables
    assert others == {name: {"OMP_NUM_THREADS": "1"} for name in processes}
