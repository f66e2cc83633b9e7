"""Runs code blocks of NeMo RL's documents with real workers and engines.

Blocks for clusters of GPUs run in a process whose Ray counts GPUs that this machine lacks.
"""

import importlib
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl_core import AsyncGRPOTrainer, GRPOTrainer, SFTTrainer, algorithms, train
from nemo_rl_core.algorithms import DPOLossFn
from nemo_rl_core.api.functional import _ALGORITHM_REGISTRY
from nemo_rl_core.backends.training.base import _TRAINING_BACKENDS
from nemo_rl_core.config.model import ModelFromConfig
from nemo_rl_core.config.training import TRAINING_SECTIONS
from nemo_rl_core.converters.materialize import materialize
from nemo_rl_core.data import BatchedDataLoader
from nemo_rl_core.data.pretrained import load_tokenizer
from nemo_rl_core.distributed import BatchedDataDict
from nemo_rl_core.distributed.session import ClusterSession
from nemo_rl_core.environments import MathEnvironment
from nemo_rl_core.models import HuggingFacePolicy, MegatronPolicy, VllmGeneration
from nemo_rl_core.models.generation.streaming import StreamingGeneration
from tests.reference.code_blocks import SUMS, make_folders, run, source

REPOSITORY = Path(__file__).resolve().parents[2]
ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in SUMS]
EXAMPLES = [{"prompt": row["prompt"], "completion": row["answer"]} for row in ROWS]
# The same as in conftest.py, so that all tests share one engine.
SMALL = {
    "cluster": {"num_threads": 1},
    "generation": {"max_new_tokens": 6, "kv_cache_gib": 1, "max_num_seqs": 64},
    "max_prompt_tokens": 16,
    "num_prompts_per_step": 4,
    "num_generations_per_prompt": 2,
    "num_steps_per_iteration": 1,
}
BATCH = {
    "input_ids": torch.tensor([[1, 5, 6, 7], [1, 8, 9, 0]]),
    "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]]),
}
PAIR = {
    **BATCH,
    "pair_ids": torch.tensor([0, 0]),
    "is_chosen": torch.tensor([True, False]),
}


@pytest.fixture
def model_folder(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory that contains the documents' models and data sets."""
    make_folders(tmp_path, tiny_model)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def shut_down(names: dict[str, Any]) -> None:
    """Stops the workers that a block has started."""
    for value in names.values():
        if hasattr(value, "shutdown") and not isinstance(value, type):
            value.shutdown()


@pytest.mark.thorough
def test_a_pipeline_is_composed(
    session: ClusterSession, model_folder: Path, engine: VllmGeneration, generation_setup: Any
) -> None:
    tokenizer = load_tokenizer(model_folder / "llama2-7b")
    rows = BatchedDataLoader(ROWS[:6], tokenizer=tokenizer)
    (batch,) = rows
    padded = zip(batch["input_ids"], batch["input_lengths"], strict=True)
    ids = [row[:length] for row, length in padded]
    after = run(
        "000_L110",
        {
            "BatchedDataLoader": BatchedDataLoader,
            "HuggingFacePolicy": HuggingFacePolicy,
            "MathEnvironment": MathEnvironment,
            "VllmGeneration": VllmGeneration,
            "cluster": session,
            "config": generation_setup,
            "dataset": [
                {**row, "input_ids": each.tolist()} for row, each in zip(ROWS[:6], ids, strict=True)
            ],
        },
    )
    assert after["rewards"].shape == (6,)
    assert len(after["generations"]["completions"]) == 6
    after["environment"].close()
    after["policy"].shutdown()


@pytest.mark.thorough
def test_one_interface_for_two_backends(session: ClusterSession, model_folder: Path) -> None:
    names = {"HuggingFacePolicy": HuggingFacePolicy, "MegatronPolicy": MegatronPolicy}
    after = run("000_L128", {**names, "batch": BatchedDataDict(BATCH)})
    assert after["generations"].size == 2
    assert (after["generations"]["generation_lengths"] >= 1).all()
    shut_down(after)


@pytest.mark.thorough
def test_a_policy_generates_and_trains(session: ClusterSession, model_folder: Path) -> None:
    after = run("004_L154", {"batch": BatchedDataDict(PAIR), "DPOLossFn": DPOLossFn})
    assert after["generations"].size == 2
    assert after["logprobs"]["logprobs"].shape == (2, 3)
    assert after["loss"]["loss"] == pytest.approx(math.log(2), abs=1e-2)  # in bfloat16
    shut_down(after)


@pytest.mark.thorough
def test_a_policy_samples_as_its_options_say(session: ClusterSession, model_folder: Path) -> None:
    config = {**run("004_L520")["gen_config"], "max_new_tokens": 4}
    plain = HuggingFacePolicy("llama2-7b", session, max_new_tokens=4)
    greedy = plain.generate(BatchedDataDict(BATCH), greedy=True)
    first = int(greedy["output_ids"][0, 4])
    plain.shutdown()
    options = {"do_sample": False, "repetition_penalty": 1.0, "eos_token_id": first}
    policy = HuggingFacePolicy("llama2-7b", session, **{**config, **options})
    output = policy.generate(BatchedDataDict(BATCH))
    assert output["generation_lengths"][0] == 1
    assert output["output_ids"][0, 4] == first
    policy.shutdown()


@pytest.mark.thorough
def test_the_complete_pipeline_and_its_validation(
    session: ClusterSession, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"model_name": "meta-llama/Llama-2-7b-hf", "max_new_tokens": 4, "max_model_len": 64}
    names = {"cluster": session, "vllm_config": config, "dataloader": [BatchedDataDict(PAIR)] * 2}
    after = run("004_L558", names)
    assert after["ref_logprobs"]["logprobs"].shape == after["logprobs"]["logprobs"].shape
    assert after["loss"]["loss"] == pytest.approx(math.log(2), abs=1e-3)  # of the first steps
    after["generator"].update_weights(after["policy"].policy)
    validation = {"validation_batch": BatchedDataDict(BATCH)}
    assert run("004_L582", {**after, **validation})["is_consistent"]
    assert "Warning" not in capsys.readouterr().out
    after["policy"].shutdown()


@pytest.mark.thorough
def test_rewards_as_a_function_and_callbacks(
    session: ClusterSession, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = GRPOTrainer.from_pretrained(tiny_model, **SMALL)
    after = run("002_L325", {"trainer": trainer, "data": ROWS})
    assert after["my_reward"]("p", "correct") == 1.0
    trainer = SFTTrainer.from_pretrained(
        tiny_model, num_steps=100, global_batch_size=60, cluster=SMALL["cluster"]
    )
    run("002_L427", {"trainer": trainer, "data": EXAMPLES})
    run("002_L549", {"trainer": trainer, "data": EXAMPLES})
    output = capsys.readouterr().out
    assert "Epoch 0: " in output
    assert "Step 100: loss=" in output


@pytest.mark.thorough
@pytest.mark.parametrize("block", ["002_L516", "002_L528"])
def test_five_lines_with_all_their_defaults(
    session: ClusterSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: str
) -> None:
    # A context of 516 tokens leaves room for completions of 4 after prompts of 512.
    small = {"hidden_size": 64, "intermediate_size": 96, "num_heads": 2}
    model = tmp_path / "tiny"
    materialize(ModelFromConfig(**small, max_position_embeddings=516), model, seed=0)
    make_folders(tmp_path, model)
    monkeypatch.chdir(tmp_path)
    after = run(block, {"my_reward": lambda prompt, response: float(len(response))})
    if block == "002_L516":
        assert len(after["result"].metrics) == 50
        assert after["result"].manifest.config["generation"]["max_new_tokens"] == 4
    else:
        assert after["trainer"].config.num_prompts_per_step == 32


@pytest.mark.thorough
def test_an_asynchronous_engine_by_the_words_of_the_documents(
    session: ClusterSession, model_folder: Path
) -> None:
    engine_options = {"async_engine": True, "max_model_len": 32, "precision": "float32"}
    sampling = {"model_name": "llama2-7b", "max_new_tokens": 4, "temperature": 1.0}
    config = {**sampling, "vllm_cfg": engine_options}
    engine = VllmGeneration(session, config, name="asynchronous")
    assert isinstance(engine, StreamingGeneration)
    prompts = BatchedDataDict(BATCH)
    assert engine.generate(prompts)["output_ids"].shape[0] == 2
    lengths = {"input_lengths": torch.tensor([4, 3]), "seeds": torch.tensor([0, 1])}
    engine.submit([7, 8], BatchedDataDict({"input_ids": BATCH["input_ids"], **lengths}))
    completions = dict(engine.poll(wait_seconds=60))
    while len(completions) < 2:
        completions |= dict(engine.poll(wait_seconds=60))
    assert {*completions} == {7, 8}
    trainer = AsyncGRPOTrainer.from_pretrained(
        "llama2-7b",
        generation=engine,
        asynchronous={"max_staleness": 1},
        **{name: value for name, value in SMALL.items() if name not in ("generation", "cluster")},
    )
    result = trainer.fit(ROWS, reward_fn=lambda prompt, response: float(len(response)))
    assert result.metrics[0]["token_mult_prob_error"] < 1.001
    engine.shutdown()


@pytest.fixture
def myalgo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Adds the package of the document's tree, with its trainer, to the real algorithms."""
    folder, *files = (line.split("#")[0].strip("├└─│ ") for line in source("002_L196").splitlines())
    package = tmp_path / Path(folder).name
    package.mkdir()
    texts = {
        "config.py": "class MyAlgoConfig(dict):\n    ...\n",
        "trainer.py": f"{source('002_L207')}\nloss_value = 0.5\n",
        "__init__.py": "from nemo_rl_core.algorithms.myalgo.config import MyAlgoConfig\n"
        "from nemo_rl_core.algorithms.myalgo.trainer import MyAlgoTrainer\n",
    }
    for file in files:
        (package / file).write_text(texts.get(file, ""))
    monkeypatch.setattr(algorithms, "__path__", [*algorithms.__path__, str(tmp_path)])
    yield importlib.import_module("nemo_rl_core.algorithms.myalgo")
    for name in [name for name in sys.modules if name.startswith("nemo_rl_core.algorithms.myalgo")]:
        del sys.modules[name]
    del algorithms.myalgo


@pytest.mark.thorough
def test_an_algorithm_is_added(
    session: ClusterSession, tiny_model: Path, myalgo: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered = dict(_ALGORITHM_REGISTRY._registered)
    monkeypatch.setattr(_ALGORITHM_REGISTRY, "_registered", registered)
    exported = run("002_L236", {"__all__": list(algorithms.__all__)})["__all__"]
    assert exported[-2:] == ["MyAlgoTrainer", "MyAlgoConfig"]
    run("002_L244", {"_ALGORITHM_REGISTRY": _ALGORITHM_REGISTRY})
    options = {"my_param": 2.0, "num_steps": 2, "cluster": {"num_threads": 1}}
    result = train(tiny_model, EXAMPLES, algorithm="myalgo", **options)
    assert [step["loss"] for step in result.metrics] == [0.5, 0.5]
    assert result.manifest.config["myalgo"] == {"my_param": 2.0}
    names = {"config": {"myalgo": {"my_param": 2.0}}, "batch": EXAMPLES}
    run("002_L488", names)["TestMyAlgoTrainer"]().test_train_step_returns_loss()


@pytest.mark.thorough
@pytest.mark.parametrize("base", ["(TrainingBackend)", ""])
def test_a_custom_training_backend_is_driven(
    session: ClusterSession, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, base: str
) -> None:
    monkeypatch.setattr(_TRAINING_BACKENDS, "_registered", {})
    monkeypatch.setattr(TRAINING_SECTIONS, "_classes", {})
    text = source("002_L256").replace("(TrainingBackend)", base)
    exec(text, {"__name__": "custom", "loss_value": 0.5, "logprobs": torch.zeros(1, 2)})
    result = SFTTrainer.from_pretrained(
        tiny_model,
        training={"backend": "custom"},
        num_steps=2,
        global_batch_size=8,
        cluster={"num_threads": 1},
    ).fit(EXAMPLES)
    assert [step["loss"] for step in result.metrics] == [0.5, 0.5]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "block", ["000_L142", "001_L170", "000_L157", "001_L137", "004_L290", "004_L207"]
)
def test_a_block_on_a_cluster_of_gpus(tiny_model: Path, tmp_path: Path, block: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.reference.on_four_gpus", block, str(tmp_path)],
        cwd=REPOSITORY,
        env={**os.environ, "NEMO_RL_HOME": str(tmp_path / "store"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"\n{block} did what it says\n" in f"\n{done.stdout}"
