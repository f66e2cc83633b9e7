"""`trust_remote_code`: who runs the Python code of a model, and what without the option."""

import ast
import io
import json
import os
import pickle
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import constants
from tokenizers import AddedToken
from transformers import BatchEncoding

import nemo_rl_core
from nemo_rl_core import SFTTrainer
from nemo_rl_core.algorithms.sft.loss import NLLLoss
from nemo_rl_core.backends.generation.base import GenerationSetup
from nemo_rl_core.backends.generation.vllm import VllmBackend
from nemo_rl_core.backends.training.base import TrainingSetup
from nemo_rl_core.backends.training.dtensor.backend import DTensorBackend
from nemo_rl_core.checkpoints import model_code
from nemo_rl_core.checkpoints.model_code import (
    allow,
    allow_or_refuse,
    code_files,
    code_options,
    described_config,
    worker_environment,
)
from nemo_rl_core.checkpoints.weights import load_config
from nemo_rl_core.config.generation import HuggingFaceGenerationConfig, VllmGenerationConfig
from nemo_rl_core.config.model import ModelFromConfig, PretrainedModel
from nemo_rl_core.config.optimizer import OptimizerConfig
from nemo_rl_core.config.training import DTensorTraining
from nemo_rl_core.converters.export import export_model
from nemo_rl_core.converters.gguf_file import write_gguf
from nemo_rl_core.converters.materialize import check_pretrained, materialize
from nemo_rl_core.converters.vllm_ready import vllm_ready
from nemo_rl_core.data import tokenizer_process
from nemo_rl_core.data.loader import save_frame
from nemo_rl_core.data.module import DataModule
from nemo_rl_core.data.pretrained import context_length, load_tokenizer
from nemo_rl_core.data.tokenized import is_storable
from nemo_rl_core.data.tokenizer_process import TokenizerProcess, tokenizer_with_code
from nemo_rl_core.distributed.batched_data_dict import collate
from nemo_rl_core.distributed.local_ranks import run_ranks
from nemo_rl_core.environments.contents import model_content
from nemo_rl_core.errors import ConfigError, ModelError, ResourceError
from nemo_rl_core.history.card import model_usage
from nemo_rl_core.model_files.loading import load_causal_model
from nemo_rl_core.models import HuggingFacePolicy
from nemo_rl_core.models.generation.layout import engine_key
from nemo_rl_core.models.generation.options import read_setup
from nemo_rl_core.trainers.loop import RunSpec
from tests.local_workers import LocalSession
from tests.model_with_code import FILES, write_model
from tests.unit.algorithms.grpo.test_remote_training import trained

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model with code that no process may run yet; runs are logged to `runs`."""
    monkeypatch.setattr(model_code, "_allowed", set())
    monkeypatch.setenv("TOY_LOG", str(tmp_path / "runs"))
    path = tmp_path / "toy"
    path.mkdir()
    return write_model(path)


@pytest.fixture
def in_worker(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same model in a process that is a worker."""
    allow(code_files(folder), called="the model")
    for name, value in worker_environment().items():
        monkeypatch.setenv(name, value)
    return folder


def plain_model(folder: Path) -> Any:
    """The model as plain transformers reads it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()


def test_nothing_of_the_code_runs_outside_of_workers(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    check_pretrained(str(folder), trust_remote_code=True)
    assert "unknown before the run" in caplog.text
    assert all(name in caplog.text for name in FILES)
    model = PretrainedModel(name=str(folder), trust_remote_code=True)
    copy = tmp_path / "copy"
    materialize(model, copy, seed=None)
    assert f"workers run the Python code of the model '{folder}'" in caplog.text
    assert code_files(copy) == code_files(folder)
    assert context_length(copy) == 64
    assert described_config(copy).hidden_size == 32
    assert load_tokenizer(copy).decode([5, 15]) == load_tokenizer(folder).decode([5, 15])
    for load in (load_config, load_causal_model):
        with pytest.raises(ModelError, match="code of the model 'copy' is not run in this process"):
            load(copy)
    assert not (tmp_path / "runs").exists()


def test_without_the_option_the_line_to_write_is_named(folder: Path, tmp_path: Path) -> None:
    line = f"write model: {{name: {folder}, trust_remote_code: true}} in a recipe"
    calls: Mapping[str, Any] = {
        "preflight": lambda: check_pretrained(str(folder)),
        "prepare": lambda: materialize(
            PretrainedModel(name=str(folder)), tmp_path / "copy", seed=None
        ),
        "policy": lambda: HuggingFacePolicy(folder).policy,
        "fit": lambda: SFTTrainer(str(folder)).fit([{"prompt": "1+1=", "completion": "2"}]),
    }
    for call in calls.values():
        with pytest.raises(ModelError, match="needs Python code that comes with it") as caught:
            call()
        assert caught.value.got == ", ".join(FILES)
        assert line in str(caught.value.fix)
        assert f"train({{'name': '{folder}', 'trust_remote_code': True}}" in str(caught.value.fix)
    assert not (tmp_path / "runs").exists()


def test_the_code_of_a_hub_model_needs_a_commit(folder: Path) -> None:
    snapshot = folder.rename(folder.with_name(COMMIT))
    with pytest.raises(ModelError, match="no pinned commit") as caught:
        allow_or_refuse(snapshot, trust=True, name="org/toy")
    assert f"revision: {COMMIT}, trust_remote_code: true" in str(caught.value.fix)
    with pytest.raises(ModelError, match="no pinned commit") as caught:
        allow_or_refuse(snapshot, trust=True, name="org/toy", revision="main")
    assert caught.value.got == "revision 'main'"
    allow_or_refuse(snapshot, trust=True, name="org/toy", revision=COMMIT)
    options: dict[str, Any] = {"revision": "main", "trust_remote_code": True}
    with pytest.raises(ValueError, match="String should match pattern"):
        PretrainedModel(name="org/toy", **options)
    with pytest.raises(ConfigError, match=r"revision.*match pattern"):
        HuggingFacePolicy("org/toy", **options)
    with pytest.raises(ConfigError, match=r"revision.*match pattern"):
        read_setup({"model_name": "org/toy", **options}, HuggingFaceGenerationConfig)


def test_a_revision_of_anything_but_a_hub_name_is_refused(tmp_path: Path) -> None:
    for name in (str(tmp_path), "alias:best", "s3://bucket/model"):
        with pytest.raises(ValueError, match=f"revision is .* but '{name}' is a folder"):
            PretrainedModel(name=name, revision=COMMIT)
        with pytest.raises(ConfigError, match="leave revision out"):
            HuggingFacePolicy(name, revision=COMMIT)


def test_a_text_is_no_trust(folder: Path) -> None:
    for text in ("false", "true"):
        with pytest.raises(ConfigError, match="trust_remote_code"):
            HuggingFacePolicy(folder, trust_remote_code=text)


def test_each_use_of_a_model_needs_the_option(folder: Path) -> None:
    assert HuggingFacePolicy(folder, trust_remote_code=True)._base_folder() == folder
    for call in (
        lambda: HuggingFacePolicy(folder).policy,
        lambda: SFTTrainer(str(folder)).fit([{"prompt": "1+1=", "completion": "2"}]),
    ):
        with pytest.raises(ModelError, match="trusted earlier in this process") as caught:
            call()
        assert caught.value.fix == "pass the option, or use another process"


def test_files_of_hidden_folders_are_not_code(folder: Path) -> None:
    (folder / ".venv" / "lib").mkdir(parents=True)
    (folder / ".venv" / "lib" / "six.py").write_text("")
    assert sorted(code_files(folder)) == sorted(FILES)


def test_conversions_refuse_code(folder: Path, tmp_path: Path) -> None:
    for convert in (write_gguf, vllm_ready):
        with pytest.raises(ModelError, match="Python code, which a conversion would leave") as e:
            convert(folder, tmp_path / "target")
        assert e.value.got == ", ".join(FILES)
    assert not (tmp_path / "target").exists()


def test_transformers_never_asks_on_the_terminal_whether_to_run_code() -> None:
    root = Path(nemo_rl_core.__file__).parents[1]
    call_of_auto_class = re.compile(r"Auto\w+\.from_(pretrained|config)$")
    asking = []
    for path in [*root.glob("nemo_rl_core/**/*.py"), *root.glob("tasks/**/*.py")]:
        if "from_pretrained(" not in (text := path.read_text()):
            continue
        for call in ast.walk(ast.parse(text)):
            if isinstance(call, ast.Call) and call_of_auto_class.match(ast.unparse(call.func)):
                options = {each.arg for each in call.keywords}
                if not options & {"trust_remote_code", None}:  # None is `**options`
                    asking.append(f"{path.name}: {ast.unparse(call)}")
    assert asking == []


def test_a_model_of_the_hub_is_prepared_at_its_commit(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    snapshot = tmp_path / "hub" / "models--org--toy" / "snapshots" / COMMIT
    shutil.copytree(folder, snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text(COMMIT)
    line = f"model: {{name: org/toy, revision: {COMMIT}, trust_remote_code: true}}"
    for trusts in (False, True):
        model = PretrainedModel(name="org/toy", trust_remote_code=trusts)
        with pytest.raises(ModelError) as caught:
            materialize(model, tmp_path / "copy", seed=None)
        assert line in str(caught.value.fix)
    model = PretrainedModel(name="org/toy", trust_remote_code=True, revision=COMMIT)
    assert model_content(model) == COMMIT
    materialize(model, tmp_path / "copy", seed=None, commit=COMMIT)
    assert code_files(tmp_path / "copy") == code_files(folder)
    assert not (tmp_path / "runs").exists()


def test_code_in_another_repository_is_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"]["AutoConfig"] = "other/toy--configuration_toy.ToyConfig"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="another repository") as caught:
        allow_or_refuse(folder, trust=True, name=str(folder))
    assert caught.value.got == "other/toy--configuration_toy.ToyConfig"


def test_a_type_of_transformers_needs_no_code(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    materialize(ModelFromConfig(num_layers=1), folder, seed=0)
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_other.Other"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "modeling_other.py").write_text("raise AssertionError('this file was run')")
    allow_or_refuse(folder, trust=False, name=str(folder))
    assert code_options(folder) == {"trust_remote_code": False}
    assert type(load_causal_model(folder)).__name__ == "Qwen2ForCausalLM"


def test_a_changed_line_changes_the_keys(folder: Path) -> None:
    model = PretrainedModel(name=str(folder), trust_remote_code=True)
    setup = GenerationSetup(folder, HuggingFaceGenerationConfig(), 32, (2,))
    before = model_content(model), engine_key(setup), code_files(folder)
    layers = folder / "layers_toy.py"
    layers.write_text(layers.read_text().replace("SCALE = 1.0", "SCALE = 0.5"))
    after = model_content(model), engine_key(setup), code_files(folder)
    assert before[0] != after[0]
    assert before[1] != after[1]
    assert {name for name in FILES if before[2][name] != after[2][name]} == {"layers_toy.py"}


def test_changed_code_replaces_earlier_code_in_a_worker(
    in_worker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The config's class is the same, by which transformers would find the earlier model class."""
    changed = in_worker.with_name("changed")
    shutil.copytree(in_worker, changed)
    layers = changed / "layers_toy.py"
    layers.write_text(layers.read_text().replace("SCALE = 1.0", "SCALE = 0.0"))
    allow(code_files(changed), called="the changed model")
    for name, value in worker_environment().items():
        monkeypatch.setenv(name, value)
    ids = torch.tensor([[1, 5, 15, 6]])
    one, other, again = (
        load_causal_model(path)(input_ids=ids).logits for path in (in_worker, changed, in_worker)
    )
    assert torch.equal(one, again)
    assert (one - other).abs().max() > 1e-3


def test_the_backend_computes_and_saves_what_transformers_does(
    in_worker: Path, tmp_path: Path
) -> None:
    backend = DTensorBackend()
    backend.setup(TrainingSetup(in_worker, OptimizerConfig(), max_tokens_per_microbatch=64))
    rows = [(1, 5, 15, 6), (1, 7, 8)]
    batch = collate(rows, [[True] * len(row) for row in rows])
    logprobs = backend.get_logprobs(batch)
    model = plain_model(in_worker)
    for row, ids in enumerate(rows):
        logits = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
        expected = [logits[at, token] for at, token in enumerate(ids[1:])]
        assert logprobs[row, : len(ids) - 1] == pytest.approx(torch.stack(expected).detach())
    saved = tmp_path / "saved"
    saved.mkdir()
    backend.save_checkpoint(saved)
    assert code_files(saved / "model") == code_files(in_worker)
    again = plain_model(saved / "model")
    ids = torch.tensor([rows[0]])
    assert torch.equal(again(input_ids=ids).logits, model(input_ids=ids).logits)


def test_sft_and_grpo_train_the_model_in_process(in_worker: Path, tmp_path: Path) -> None:
    work = trained(in_worker, tmp_path / "grpo")
    ids = torch.tensor([[1, 5, 15, 6]])
    before = plain_model(in_worker)(input_ids=ids).logits
    assert (plain_model(work / "model")(input_ids=ids).logits - before).abs().max() > 1e-3

    rows = [{"prompt": f"{a}+1=", "completion": str(a + 1)} for a in range(8)]
    data = DataModule.of(
        rows,
        validation=[{"prompt": "8+1=", "completion": "9"}],
        tokenizer=load_tokenizer(in_worker),
    )
    train = tmp_path / "train"
    train.mkdir()
    save_frame(data.train, train)
    sft = {"num_steps": 8, "global_batch_size": 8, "learning_rate": 0.01}
    trainer = SFTTrainer({"sft": sft}, session=LocalSession())  # type: ignore[arg-type]
    trainer.run(RunSpec(train=train, start=in_worker, work=tmp_path / "sft"))
    losses = [step["loss"] for step in trainer.history]
    assert losses[-1] < losses[0] / 2
    plain_model(tmp_path / "sft" / "model")


@pytest.mark.slow
def test_an_export_is_loaded_by_another_process(folder: Path, tmp_path: Path) -> None:
    allow(code_files(folder), called="the model")
    count = export_model(folder, tmp_path / "exported")
    assert model_usage(folder).count("(folder, trust_remote_code=True)") == 2
    assert count == sum(each.numel() for each in plain_weights(folder))
    assert code_files(tmp_path / "exported") == code_files(folder)
    assert str(os.getpid()) not in (tmp_path / "runs").read_text().split()


def plain_weights(folder: Path) -> list[torch.Tensor]:
    from safetensors.torch import load_file

    return list(load_file(folder / "model.safetensors").values())


@pytest.mark.slow
def test_code_of_a_tokenizer_runs_in_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_code, "_allowed", set())
    monkeypatch.setenv("TOY_LOG", str(tmp_path / "runs"))
    folder = tmp_path / "toy"
    folder.mkdir()
    write_model(folder, with_tokenizer_code=True)
    with pytest.raises(ModelError, match="is not run in this process"):
        load_tokenizer(folder)
    copy = tmp_path / "copy"
    materialize(PretrainedModel(name=str(folder), trust_remote_code=True), copy, seed=None)
    assert code_files(copy) == code_files(folder)
    tokenizer = load_tokenizer(copy)
    ids = tokenizer("1-2=")["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "1minus 2="
    assert len(tokenizer) == len(tokenizer.get_vocab()) == 19
    assert tokenizer.init_kwargs["template_date"] == "2024-07-26"
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = tokenizer.no_such_name
    tensors = tokenizer("1-2=", return_tensors="pt")
    assert type(tensors) is BatchEncoding
    assert tensors["input_ids"].tolist() == [ids]
    assert tokenizer.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    with pytest.raises(ModelError, match="returned what this process does not read"):
        _ = tokenizer.unreadable
    assert len(tokenizer) == 19
    runs = (tmp_path / "runs").read_text().split()
    assert runs
    assert str(os.getpid()) not in runs


def test_a_process_without_permission_starts_no_other(folder: Path) -> None:
    with pytest.raises(ModelError, match="is not run in this process"):
        tokenizer_process._serve(folder)


def test_tokens_of_a_tokenizer_with_code_are_not_stored() -> None:
    tokenizer = TokenizerProcess.__new__(TokenizerProcess)
    assert not is_storable(tokenizer, 20_000)


class Attack:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("attacked",)


class TorchAttack:
    def __reduce__(self) -> tuple[Any, ...]:
        saved = io.BytesIO()
        torch.save(Attack(), saved)
        return torch.storage._load_from_bytes, (saved.getvalue(),)


@pytest.mark.parametrize("attack", [Attack(), TorchAttack(), os.system, eval, TokenizerProcess])
def test_answers_of_a_tokenizer_run_nothing(
    attack: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(pickle.UnpicklingError):
        tokenizer_process._Unpickler(io.BytesIO(pickle.dumps([attack]))).load()
    assert not list(tmp_path.iterdir())


def test_answers_of_a_tokenizer_are_read() -> None:
    token = AddedToken("<end>", special=True)
    sent = BatchEncoding(
        {"ids": torch.tensor([[1, 2]]), "mask": np.array([1, 0]), "count": np.int64(2)}
    )
    data = pickle.dumps((None, [sent, {token}, torch.float32, Path("a"), {1: (2.5, None, b"x")}]))
    _, (read, *others) = tokenizer_process._Unpickler(io.BytesIO(data)).load()
    assert read["ids"].tolist() == [[1, 2]]
    assert read["mask"].tolist() == [1, 0]
    assert read["count"] == 2
    assert others == [{token}, torch.float32, Path("a"), {1: (2.5, None, b"x")}]


def test_changed_code_or_an_ended_process_starts_a_new_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Started:
        def __init__(self, _: Path) -> None:
            self.ended: int | None = None
            self._child = SimpleNamespace(poll=lambda: self.ended)

    monkeypatch.setattr(tokenizer_process, "TokenizerProcess", Started)
    tokenizer_process._shared.cache_clear()
    first = tokenizer_with_code(folder)
    assert tokenizer_with_code(folder) is first
    (folder / "layers_toy.py").write_text("SCALE = 2.0")
    second = tokenizer_with_code(folder)
    assert second is not first
    second.ended = 1
    assert tokenizer_with_code(folder) not in (first, second)
    tokenizer_process._shared.cache_clear()


@pytest.mark.parametrize(
    ("device_map", "shape"),
    [
        ("auto", "cluster"),
        (None, "cluster"),
        ("cuda", "cluster"),
        ({"": 0}, "cluster"),
        ("cpu", "laptop"),
        ({"": "cpu"}, "laptop"),
    ],
)
def test_a_device_map_becomes_a_placement(
    device_map: Any, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nemo_rl_core.models.policy.pretrained.count_gpus", lambda: 1)
    policy = HuggingFacePolicy("org/model", device_map=device_map)
    assert policy.options()["cluster"].shape == shape


def test_other_device_maps_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for device_map in ("balanced", "sequential", "disk", {"": 1}, {"model": 0, "lm_head": "cpu"}):
        with pytest.raises(ConfigError, match="device_map does not say") as caught:
            HuggingFacePolicy("org/model", device_map=device_map)
        assert caught.value.got == repr(device_map)
        assert "tensor_parallel_size" in str(caught.value.fix)
    monkeypatch.setattr("nemo_rl_core.models.policy.pretrained.count_gpus", lambda: 0)
    with pytest.raises(ResourceError, match="device_map names a GPU"):
        HuggingFacePolicy("org/model", device_map="cuda").options()


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, {"rank": 4}])
def test_ranks_and_adapters_train_and_resume(lora: Any, folder: Path, tmp_path: Path) -> None:
    allow(code_files(folder), called="the model")
    training = DTensorTraining(lora=lora)
    one = run_ranks(_steps, folder, tmp_path / "one", training, world_size=1)
    assert one[0]["losses"][-1] < one[0]["losses"][0]
    assert torch.equal(one[0]["saved"], one[0]["loaded"])
    assert code_files(tmp_path / "one" / "model") == code_files(folder)
    if lora is None:
        two = run_ranks(_steps, folder, tmp_path / "two", training, world_size=2)
        assert two[0]["losses"] == pytest.approx(one[0]["losses"], abs=1e-5)
    else:
        assert code_files(tmp_path / "one" / "trainer" / "base") == code_files(folder)


def _steps(folder: Path, path: Path, training: DTensorTraining) -> dict[str, Any]:
    setup = TrainingSetup(
        folder, OptimizerConfig(learning_rate=0.01), training=training, max_tokens_per_microbatch=64
    )
    rows = [(1, 5, 15, 6), (1, 7, 8)]
    batch = collate(rows, [[True] * len(row) for row in rows])
    backend, resumed = DTensorBackend(), DTensorBackend()
    backend.setup(setup)
    losses = [backend.train_step(batch, NLLLoss())["loss"] for _ in range(3)]
    path.mkdir(exist_ok=True)
    backend.save_checkpoint(path)
    resumed.setup(setup)
    resumed.load_checkpoint(path)
    saved, loaded = (each.get_logprobs(batch) for each in (backend, resumed))
    return {"losses": losses, "saved": saved, "loaded": loaded}


def test_vllm_refuses_attention_that_it_cannot_replace(in_worker: Path) -> None:
    setup = GenerationSetup(in_worker, VllmGenerationConfig(kv_cache_gib=1), 32, (2,))
    with pytest.raises(ModelError, match="vLLM cannot sample from the model folder") as caught:
        VllmBackend().setup(setup)
    assert caught.value.got == "ToyForCausalLM, which computes attention itself"
    assert caught.value.fix == "set generation.backend: hf"
