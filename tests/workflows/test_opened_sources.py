"""What stages open and run of the project and of a user's code is what their keys cover.

Each stage runs in a process of its own, with a hook in it, in Ray's workers and in all that they
start (`opened/sitecustomize.py`). A file that is run or read by code of the key must be in the key,
or on one of the lists of `digest_scope`; a file of the key must be opened by the stage, or be one
that another recipe chooses. What only reports imports is theirs. A module that such a report has
imported first, and that code of the key asks for again by a computed name, is not seen.
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
"""Model and data, which need no Ray."""
PIPELINE = (
    *(*PLAIN, "train_sft", "grpo_iteration", "evaluate"),
    *("promote", "export", "lineage_report"),
)
FROM_ROWS = (*PLAIN, "tokenize_pairs")
"""On pairs of the data, which are rows of another kind than those that prompts are taken from."""
OTHERS = tuple(stage for stage in GRAPH if stage not in {*PIPELINE, *FROM_ROWS})
"""All others with a key, after the pipeline. `test_cache_table.py` fails where GRAPH lacks one."""
NOT_CHOSEN = (
    *("nemo_rl_core.backends.generation", "nemo_rl_core.backends.training.megatron"),
    *("nemo_rl_core.data.datasets", "nemo_rl_core.environments", "nemo_rl_core.games"),
    "nemo_rl_core.converters.float32_copy",
)
"""Where the parts are that a recipe chooses from: other backends, sources of data, environments,
published models."""
NOT_CHOSEN_IN_A_STAGE = (
    *(*NOT_CHOSEN, "nemo_rl_core.backends", "nemo_rl_core.functional.logprobs"),
    *("nemo_rl_core.checkpoints.dcp_metadata", "nemo_rl_core.checkpoints.tensors"),
    "nemo_rl_core.distributed.gathered_writes",
)
"""The same for one stage: a reward model scores with a trainer's backend, which also reads
quantized weights and what Megatron has saved; published models are read as that backend does."""
NUM_NOT_CHOSEN = 31
"""How many files of them are in a key and opened by no stage below. A higher number is a key that
has grown by what nothing here runs."""


def module_of(file: Path) -> str:
    """The module of a file of the project."""
    parts = file.relative_to(REPOSITORY).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def not_covered(chain: Chain, stage: str) -> list[str]:
    """Files of the project that code of the key has opened, and that are in no key or list."""
    key = source_digest.reachable_modules(module_of_stage(stage))
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


def modules_of_keys(chain: Chain) -> set[str]:
    """Modules that are in the key of a stage that ran."""
    reached = (source_digest.reachable_modules(module_of_stage(stage)) for stage in chain.made)
    return set().union(*reached)


def needless(chain: Chain, stage: str) -> list[str]:
    """Modules of a stage's key that the stage has not opened, and that no recipe lets it choose."""
    key = source_digest.reachable_modules(module_of_stage(stage))
    opened = opened_modules(replace(chain, made={stage: chain.made[stage]}))
    return [each for each in sorted(key - opened) if not each.startswith(NOT_CHOSEN_IN_A_STAGE)]


def assert_covered(chain: Chain) -> None:
    for stage in chain.made:
        assert module_opened(chain, stage, module_of_stage(stage)), "the hook has recorded nothing"
        assert not_covered(chain, stage) == [], stage
        assert needless(chain, stage) == [], stage


def module_opened(chain: Chain, stage: str, module: str) -> bool:
    return any(
        file.is_relative_to(REPOSITORY) and module_of(file) == module
        for file, _ in chain.opened(stage)
    )


@pytest.fixture(scope="module")
def from_rows(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    """Stages without workers, on preferences of a user's files."""
    sides = {"chosen": "Three.", "rejected": "Four."}
    chain = Chain(tmp_path_factory.mktemp("rows"))
    chain.run(*FROM_ROWS, recipe=of_rows(chain, _files({"kind": "preference", **sides})))
    return chain


def test_plain_stages_open_what_their_keys_cover(from_rows: Chain) -> None:
    assert_covered(from_rows)
    assert module_opened(from_rows, "tokenize_pairs", "nemo_rl_core.data.pairs")


def _files(fields: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Four rows of a prompt and these fields in each file."""
    return {
        name: [{"id": f"{name} {n}", "prompt": f"Add {n} of {name}.", **fields} for n in range(4)]
        for name in ("train", "validation")
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    """All stages of a pipeline."""
    chain = Chain(tmp_path_factory.mktemp("whole"))
    chain.run(*PIPELINE, recipe=with_users_reward(chain))
    return chain


@pytest.fixture(scope="module")
def others(whole: Chain) -> Chain:
    """The stages of all other pipelines, after those of `whole`, with transformers' engine."""
    return run_others(whole)


def run_others(pipeline: Chain) -> Chain:
    """Runs the stages of other pipelines on what that one has made."""
    chain = Chain(pipeline.folder, pipeline.wrong_reports, given=pipeline.made)
    recipe = with_users_reward(chain)
    engine = {**recipe["generation"], "backend": "hf"}
    chain.run(*OTHERS, recipe={**recipe, "generation": engine})
    return chain


@pytest.mark.thorough
def test_stages_of_a_pipeline_open_what_their_keys_cover(whole: Chain) -> None:
    assert_covered(whole)
    # In workers of Ray and in the program that checks mathematics, which has no hook of its own:
    engine = "nemo_rl_core.backends.generation.vllm"
    assert module_opened(whole, "grpo_iteration", engine)
    assert module_opened(whole, "train_sft", "nemo_rl_core.backends.training.dtensor.backend")
    checker = "nemo_rl_core.environments.rewards.math_worker"
    assert module_opened(whole, "grpo_iteration", checker)


@pytest.mark.thorough
def test_all_other_stages_open_what_their_keys_cover(others: Chain) -> None:
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
    """An evaluation by programs in a sandbox."""
    tests = {"metadata": {"tests": ["assert add(1, 2) == 3"], "entry_point": "add"}}
    chain = Chain(tmp_path_factory.mktemp("coded"))
    recipe = {**of_rows(chain, _files(tests)), "environment": {"kind": "code"}}
    chain.run(*PLAIN, recipe=recipe)
    chain.given["grpo_iteration"] = {"grpo_iteration": chain.made["prepare_model"]["base"]}
    chain.run("evaluate", recipe=recipe)
    return chain


@pytest.mark.thorough
def test_programs_of_the_sandbox_are_covered(coded: Chain) -> None:
    assert_covered(coded)
    # Read as text, and started in isolation:
    assert module_opened(coded, "evaluate", "nemo_rl_core.environments.sandbox.launcher")
    checker = "nemo_rl_core.environments.rewards.code_checker.checker"
    assert module_opened(coded, "evaluate", checker)


@pytest.mark.thorough
def test_few_files_are_in_a_key_and_opened_by_nothing(
    whole: Chain, others: Chain, coded: Chain, from_rows: Chain
) -> None:
    chains = (whole, others, coded, from_rows)
    in_keys = set().union(*map(modules_of_keys, chains))
    never = sorted(in_keys.difference(*map(opened_modules, chains)))
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


@pytest.mark.timeout(3600)  # by itself it runs 42 stages
@pytest.mark.thorough
def test_wrong_reports_change_no_result(whole: Chain, others: Chain, tmp_path: Path) -> None:
    chain = Chain(tmp_path, wrong_reports=True)
    chain.run(*PIPELINE, recipe=with_users_reward(chain))
    after = run_others(chain)
    changed = {path.stem for path in chain.folder.rglob("*.wrong")}
    assert {"nemo_rl_core.telemetry.cost", "nemo_rl_core.telemetry.curves"} <= changed
    trained = Path(chain.made["train_sft"]["train_sft"]["directory"])
    assert (trained / "deck.html").read_text().startswith("wrong")
    assert chain.content() == whole.content()
    assert after.content() == others.content()


@pytest.mark.thorough
def test_manifests_have_how_the_workers_computed(whole: Chain) -> None:
    made = Path(whole.made["grpo_iteration"]["grpo_iteration"]["directory"])
    machine = Manifest.read(made).machine
    processes = machine.processes
    assert set(processes) == {"training", "generation"}
    assert all(each["threads"] == "1" for each in processes.values())
    assert all(each["cpu_capability"] for each in processes.values())
    assert processes["generation"]["attention"] == "CPU_ATTN"
    assert machine.variables["OMP_NUM_THREADS"] == HEAD_THREADS
    others = machine.process_variables
    assert others == {name: {"OMP_NUM_THREADS": "1"} for name in processes}
