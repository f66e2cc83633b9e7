"""Code blocks of NeMo RL's documents that need no worker; the blocks are in `tests/reference`."""

import importlib
import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional, Protocol, TypedDict

import pytest
import torch

from nemo_rl_core import SFTTrainer
from nemo_rl_core.backends import get_training_backend, register_training_backend
from nemo_rl_core.backends.generation.base import _GENERATION_BACKENDS, GenerationSetup
from nemo_rl_core.backends.training.base import _TRAINING_BACKENDS, TrainingBackend
from nemo_rl_core.config.generation import GENERATION_SECTIONS, VllmGenerationConfig
from nemo_rl_core.config.training import TRAINING_SECTIONS
from nemo_rl_core.distributed import BatchedDataDict, RayVirtualCluster
from nemo_rl_core.environments import FunctionalRewardWrapper
from nemo_rl_core.environments.adapt import as_scorer
from nemo_rl_core.errors import DataError
from nemo_rl_core.functional.protocols import LossFunction
from nemo_rl_core.models.generation.custom import CustomEngineAdapter
from nemo_rl_core.models.generation.interfaces import GenerationInterface
from nemo_rl_core.models.generation.options import read_setup
from nemo_rl_core.models.interfaces import PolicyInterface
from nemo_rl_core.models.policy.pretrained import HuggingFacePolicy, MegatronPolicy
from tests.reference.code_blocks import BLOCKS, DRAWINGS, MODELS, make_folders, run, source

REPOSITORY = Path(__file__).resolve().parents[2]
TESTS = (
    "unit/test_reference_blocks.py",
    "unit/test_reference_drawings.py",
    "ray/test_reference_blocks.py",
)
GPU_BLOCKS = "reference/on_four_gpus.py"

DECLARED = {
    "002_L374": "nemo_rl_core.backends.training.base",
    "004_L015": "nemo_rl_core.models.interfaces",
    "004_L054": "nemo_rl_core.models.generation.interfaces",
    "004_L082": "nemo_rl_core.models.generation.interfaces",
    "004_L094": "nemo_rl_core.models.generation.interfaces",
    "004_L108": "nemo_rl_core.models.generation.interfaces",
    "004_L125": "nemo_rl_core.models",
    "004_L178": "nemo_rl_core.models",
    "004_L234": "nemo_rl_core.models.generation",
    "004_L265": "nemo_rl_core.models.generation",
    "004_L329": "nemo_rl_core.models.generation",
    "004_L362": "nemo_rl_core.models.validation",
    "004_L388": "nemo_rl_core.models.validation",
}
"""Blocks that declare an interface of the project, and the module that contains it."""

NOT_NAMED = {
    ("TrainingBackend.setup", "config"): "`setup`, a TrainingSetup; it is given by position",
}
"""Declared names that the project lacks, and why."""

COMMON = {
    "ABC": ABC,
    "Any": Any,
    "BatchedDataDict": BatchedDataDict,
    "Callable": Callable,
    "Dict": dict,
    "GenerationConfig": dict,
    "GenerationInterface": GenerationInterface,
    "LossFunction": LossFunction,
    "PolicyInterface": PolicyInterface,
    "Protocol": Protocol,
    "RayVirtualCluster": RayVirtualCluster,
    "TypedDict": TypedDict,
    "abstractmethod": abstractmethod,
    "torch": torch,
}


@pytest.fixture(autouse=True)
def _registries_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    for registry in (_TRAINING_BACKENDS, _GENERATION_BACKENDS):
        monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    for table in (TRAINING_SECTIONS, GENERATION_SECTIONS):
        monkeypatch.setattr(table, "_classes", dict(table._classes))


@pytest.fixture
def model_folder(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory that contains the documents' models and data sets."""
    make_folders(tmp_path, tiny_model)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_block_is_tested() -> None:
    tests = "".join((REPOSITORY / "tests" / file).read_text() for file in (*TESTS, GPU_BLOCKS))
    blocks = {file.stem for file in BLOCKS.iterdir()}
    assert len(blocks) == 57
    assert DRAWINGS.keys() < blocks
    assert {name for name in blocks if name not in tests} == set()
    with pytest.raises(SyntaxError):
        compile(source("002_L162"), "002_L162", "exec")


def test_every_model_of_the_blocks_has_its_folder() -> None:
    text = "".join(source(file.stem) for file in BLOCKS.glob("*.py"))
    named = re.findall(r'(?:model_name["]?\s*[=:]|Policy\(|from_pretrained\()\s*"([^"]+)"', text)
    assert {*named} == {*MODELS}


def test_every_test_that_the_page_names_exists() -> None:
    page = (REPOSITORY / "tests/reference/README.md").read_text()
    named = re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", page)
    files = [(file, test) for file, test in named if not file.startswith("nemo_rl_core/")]
    assert len(files) > 40
    for file, test in files:
        text = (REPOSITORY / "tests" / file).read_text()
        assert not test or re.search(rf"(?m)^(?:async )?def {test}\(", text), f"{file}::{test}"


def _parameters(function: Any) -> list[inspect.Parameter]:
    return list(inspect.signature(function).parameters.values())


def _missing(name: str, documented: Any, real: Any) -> list[str]:
    """Returns parameters of a documented function that the real one lacks or has elsewhere."""
    if isinstance(documented, staticmethod | classmethod):
        documented = documented.__func__
    flexible = {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}
    ours = _parameters(real)
    wrong = []
    for position, theirs in enumerate(_parameters(documented)):
        if theirs.kind in flexible:
            if all(each.kind is not theirs.kind for each in ours) and not _all_options(ours):
                wrong.append(f"{name}: {theirs}")
        elif len(ours) <= position or ours[position].kind in flexible:
            wrong.append(f"{name}: {theirs}")
        elif ours[position].name != theirs.name and (name, theirs.name) not in NOT_NAMED:
            wrong.append(f"{name}: {theirs} is {ours[position]}")
        elif theirs.default not in (theirs.empty, ours[position].default):
            wrong.append(f"{name}: the default of {theirs} is {ours[position].default}")
    needed = [
        each.name
        for each in ours[len(_parameters(documented)) :]
        if each.default is each.empty and each.kind not in flexible
    ]
    return [*wrong, *(f"{name} needs {each}" for each in needed)]


def _all_options(ours: list[inspect.Parameter]) -> bool:
    """Whether a method takes options by name instead of `**kwargs`."""
    return any(each.kind is inspect.Parameter.KEYWORD_ONLY for each in ours)


def _differences(documented: Any, real: Any) -> list[str]:
    if not isinstance(documented, type):
        return _missing(documented.__name__, documented, real)
    if issubclass(documented, dict):  # a TypedDict
        keys = documented.__annotations__
        return [
            f"{documented.__name__} lacks {key}"
            for key in keys
            if key not in real.__annotations__ and (documented.__name__, key) not in NOT_NAMED
        ]
    bases = {GenerationInterface, PolicyInterface} & {*documented.__bases__}
    wrong = [
        f"{real.__name__} is not a {base.__name__}" for base in bases if base not in real.mro()
    ]
    for name, method in vars(documented).items():
        if callable(method) and (name == "__init__" or not name.startswith("_")):
            wrong += _missing(f"{real.__name__}.{name}", method, getattr(real, name))
    return wrong


@pytest.mark.parametrize("block", DECLARED)
def test_a_declaration_is_that_of_the_project(block: str) -> None:
    module = importlib.import_module(DECLARED[block])
    after = run(block, COMMON)
    declared = {
        name: value
        for name, value in after.items()
        if getattr(value, "__module__", "") == f"block_{block}" and COMMON.get(name) is not value
    }
    assert declared
    for name, value in declared.items():
        assert _differences(value, getattr(module, name)) == [], name


def test_the_tree_of_modules_exists() -> None:
    folders: list[str] = []
    modules = []
    for line in source("002_L051").splitlines()[1:]:
        drawn, name = re.fullmatch(r"([│ ]*[├└]── |[│ ]*)([\w.]*/?).*", line).groups()  # type: ignore[union-attr]
        folders = folders[: len(drawn) // 4 - 1] if name else folders
        path = [*folders, name.rstrip("/").removesuffix(".py")]
        if name.endswith("/"):
            folders = path
        if name:
            modules.append(".".join(path))
    assert len(modules) == 48
    assert "algorithms.grpo.trainer" in modules
    for module in modules:
        importlib.import_module(f"nemo_rl_core.{module}")


def test_the_packages_of_the_reference_exist() -> None:
    names = re.findall(r"nemo_rl_core/(nemo_rl_core[\w.]*)", source("000_L223"))
    assert len(names) == 6
    for name in names:
        importlib.import_module(name)


def test_clusters_of_any_size_are_described_before_ray_starts() -> None:
    after = run("001_L185")
    assert after["cluster"].world_size == 4
    assert after["Policy"].__name__ == "Policy"
    assert callable(after["dpo_setup"]) and callable(after["dpo_train"])
    named = re.findall(r"nemo_rl_core[\w.]*", source("001_L161"))
    module, _, name = named[0].rpartition(".")
    assert getattr(importlib.import_module(module), name) is after["Policy"]
    assert run("001_L161").keys() >= {"__name__"}


@pytest.mark.parametrize("block", ["000_L177", "001_L200"])
def test_the_least_policy(block: str) -> None:
    policy = run(block)["CustomPolicy"]()
    assert isinstance(policy, PolicyInterface)
    assert policy.generate({}) is policy.train({}, None) is None


def test_a_custom_training_backend_is_found_by_its_name() -> None:
    values = {"loss_value": 0.5, "logprobs": torch.zeros(1, 2)}
    custom = run("002_L256", values)["CustomTrainingBackend"]
    assert run("002_L292")["backend"] is custom
    assert custom().train_step({}, None) == {"loss": 0.5}
    names = {"register_training_backend": register_training_backend, **COMMON}
    names |= {"TrainingBackend": TrainingBackend, "get_training_backend": get_training_backend}
    after = run("002_L394", names)
    assert after["backend"] is after["CustomBackend"]


def test_a_custom_generation_backend_is_found_by_its_name() -> None:
    custom = run("002_L302", {"responses": ["4"]})["CustomGenerationBackend"]
    assert _GENERATION_BACKENDS.get("custom") is custom
    assert custom().generate(["2+2="], {}) == ["4"]


def test_backends_are_selected_by_name() -> None:
    after = run("002_L540")
    assert after["training"].__name__ == "DTensorBackend"
    assert after["generation"].__name__ == "VllmBackend"


def test_a_function_of_batches_is_wrapped() -> None:
    after = run("002_L334", {"score": lambda prompt, response: len(prompt) + len(response)})
    assert after["env"].rewards(["1+1="] * 2, ["2", "22"]) == [5.0, 6.0]
    after = run("002_L413", {"FunctionalRewardWrapper": FunctionalRewardWrapper})
    logs = [[{"role": "user", "content": "p"}, {"role": "assistant", "content": "r"}]]
    assert after["wrapper"].step(logs, [{}]).rewards.tolist() == [1.0]


def test_an_environment_scores_conversations() -> None:
    made = run("002_L345", {"torch": torch})["MyEnvironment"]

    class Scored(made):  # type: ignore[misc,valid-type]
        def _compute_rewards(self, message_log_batch: Any) -> list[float]:
            return [float(log[-1]["content"] == "4") for log in message_log_batch]

    logs = [[{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4"}]] * 2
    played = Scored().step(logs, [{}, {}])
    assert (played.rewards.tolist(), played.terminateds.tolist()) == ([1, 1], [True, True])
    assert Scored().global_post_process_and_metrics({"rewards": played.rewards})[1] == {
        "mean_reward": 1.0
    }
    assert as_scorer(Scored()) is not None


def test_a_function_with_its_docstring() -> None:
    function = run("002_L448", {"Any": Any, "Optional": Optional})
    assert function["my_function"]("test") is None


def test_a_custom_policy_is_trained_and_asked(model_folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    names = {**COMMON, "load_custom_model": AutoModelForCausalLM.from_pretrained}
    policy = run("004_L406", names)["CustomPolicy"]("llama2-7b")
    batch = BatchedDataDict({"input_ids": torch.tensor([[1, 5, 6], [1, 7, 8]])})
    output = policy.generate(BatchedDataDict({**batch, "max_new_tokens": 4}), greedy=True)
    assert torch.equal(output["output_ids"][:, :3], batch["input_ids"])
    assert policy.get_logprobs(batch)["logprobs"].shape[:2] == (2, 3)
    # It computes the loss but no gradient, so every step has the loss of the same weights.
    trainer = SFTTrainer(policy, model="llama2-7b", num_steps=2, global_batch_size=8)
    rows = [{"prompt": f"{n}+1=", "completion": str(n + 1)} for n in range(9)]
    first, second = (step["loss"] for step in trainer.fit(rows).metrics)
    assert first == pytest.approx(second)


def test_a_custom_engine_is_asked_for_completions(model_folder: Path) -> None:
    names = {**COMMON, "load_custom_model": str}
    engine = run("004_L451", names)["CustomGeneration"]("llama2-7b", top_k=3)
    assert isinstance(engine, GenerationInterface)
    setup = GenerationSetup(model_folder, VllmGenerationConfig(), 64, stop_token_ids=(2,))
    adapter = CustomEngineAdapter(engine, setup)
    adapter.prepare_for_generation()
    prompts = {"input_ids": torch.tensor([[1, 5]]), "input_lengths": torch.tensor([2])}
    with pytest.raises(DataError, match=r"CustomGeneration\.generate returned no batch"):
        adapter.generate(BatchedDataDict({**prompts, "seeds": torch.tensor([0])}))


def test_the_configurations_are_read(model_folder: Path) -> None:
    after = run("004_L483")
    options = HuggingFacePolicy(**after["hf_config"]).options()
    assert options["dtype"] == "bfloat16"
    training = MegatronPolicy(**after["megatron_config"]).options()["training"]
    assert (training.ranks_per_replica, training.sequence_parallel) == (8, True)
    setup = read_setup(after["vllm_config"], VllmGenerationConfig)
    assert (setup.max_model_len, setup.config.temperature) == (2048, 0.7)
    sampling = run("004_L520")["gen_config"]
    setup = read_setup({"model_name": "llama2-7b", **sampling}, VllmGenerationConfig)
    assert (setup.config.top_k, setup.config.repetition_penalty) == (50, 1.1)
    assert 2 in setup.stop_token_ids
    assert HuggingFacePolicy("llama2-7b", **sampling).options()["top_p"] == 0.9
