"""Calls of `VllmBackend` to vLLM around a weight transfer on a GPU, and their order.

A fake `LLM` records them (`tests/fake_llm.py`). The installed vLLM accepts every recorded call.
"""

import inspect
import shutil
import threading
import weakref
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed import TCPStore
from transformers import AutoModelForCausalLM

from nemo_rl_core.backends.generation import incoming
from nemo_rl_core.backends.generation import vllm as vllm_module
from nemo_rl_core.backends.generation.base import GenerationSetup
from nemo_rl_core.backends.generation.vllm import VllmBackend
from nemo_rl_core.backends.generation.vllm_loader import load_format_of
from nemo_rl_core.backends.generation.vllm_streaming import StreamingVllmBackend
from nemo_rl_core.checkpoints.tensors import save_weights
from nemo_rl_core.config.generation import VllmGenerationConfig
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.distributed.weight_sync.link import SendsWeights
from nemo_rl_core.distributed.weight_sync.transport import LinkSpec
from nemo_rl_core.errors import ConfigError, ConsistencyError, ModelError
from tests.fake_llm import ALL, FakeLLM


class Trainer(SendsWeights):
    """Sends a model's weights and records when it leaves the GPU."""

    def __init__(self, model: Any, events: list[str]) -> None:
        self._model, self._events = model, events

    def release_memory(self, *, keeps_weights: bool = False) -> None:
        self._events.append("release all but weights" if keeps_weights else "release weights")

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._model.named_parameters()


@pytest.fixture
def backend(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> VllmBackend:
    """Creates an engine with the fake LLM, on a machine that claims to have one GPU."""
    import vllm

    monkeypatch.setattr(vllm, "LLM", FakeLLM, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    started = VllmBackend()
    started.setup(setup_of(tiny_model))
    return started


def setup_of(folder: Path, **config: Any) -> GenerationSetup:
    config = {"max_new_tokens": 1, **config}
    return GenerationSetup(
        folder, VllmGenerationConfig(**config), max_model_len=32, stop_token_ids=(1,)
    )


def prompts() -> BatchedDataDict:
    ids = torch.tensor([[3, 4, 5], [3, 4, 6]])
    return BatchedDataDict(
        input_ids=ids, input_lengths=torch.tensor([3, 3]), seeds=torch.tensor([1, 2])
    )


def other_weights(folder: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    return model


def transfer(trainer: SendsWeights, engine: VllmBackend) -> list[Exception]:
    """Runs both ends of a link in threads of this process."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    link = LinkSpec("127.0.0.1", store.port, 1, "gloo", timeout_seconds=60.0, token="secret")
    errors: list[Exception] = []

    def run(method: Any, *args: Any) -> None:
        try:
            method(*args)
        except Exception as error:  # noqa: BLE001 (returned)
            errors.append(error)

    ends = [(trainer.send_weights, link), (engine.receive_weights, link, 0)]
    threads = [threading.Thread(target=run, args=each) for each in ends]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return errors


@pytest.mark.slow
def test_trainer_and_engine_take_turns_on_the_gpu(backend: VllmBackend, tiny_model: Path) -> None:
    llm: Any = backend._llm
    trainer = Trainer(other_weights(tiny_model), llm.events)
    for _ in range(2):
        llm.events.clear()
        backend.sleep(level=2)
        assert not transfer(trainer, backend)
        backend.wake()
        backend.generate(prompts(), greedy=False)
        assert llm.events == [
            "sleep 2",
            "release all but weights",
            "wake_up ['weights']",
            "reload_weights",
            "reset_prefix_cache",
            "release weights",
            "wake_up ['kv_cache']",
            "generate",
        ]
    for weight, sent in zip(llm.model.parameters(), trainer._model.parameters(), strict=True):
        assert torch.equal(weight, sent)


@pytest.mark.slow
def test_memory_is_read_before_sleep(backend: VllmBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    llm: Any = backend._llm
    used = iter([41.0, 44.0, 43.0])
    monkeypatch.setattr(vllm_module, "used_gpu_gib", lambda: 0.0 if llm.asleep else next(used))
    for most in (41.0, 44.0, 44.0):
        backend.sleep()
        backend.sleep()  # is asleep already
        assert backend.peak_gpu_gib == most
        backend.wake()


def test_weights_that_stay_are_kept_on_the_host(backend: VllmBackend, tiny_model: Path) -> None:
    backend.load_weights(tiny_model)
    llm: Any = backend._llm
    llm.events.clear()
    backend.sleep()
    backend.sleep()
    backend.generate(prompts(), greedy=True)
    backend.wake()
    assert llm.events == ["sleep 1", "wake_up ['weights', 'kv_cache']", "generate"]


def test_discarded_weights_are_not_used(backend: VllmBackend, tiny_model: Path) -> None:
    backend.sleep(level=2)
    for call in (backend.wake, lambda: backend.generate(prompts(), greedy=True)):
        with pytest.raises(ConsistencyError, match="discarded its weights") as refused:
            call()
        assert "update_weights" in str(refused.value.fix)
    backend.load_weights(tiny_model)  # like a new stage with running workers
    backend.generate(prompts(), greedy=True)


@pytest.fixture
def streaming(backend: VllmBackend, tiny_model: Path) -> Iterator[StreamingVllmBackend]:
    started = StreamingVllmBackend()
    started.setup(setup_of(tiny_model, placement={"own": 1}))
    yield started
    started.shutdown()


@pytest.mark.parametrize("kind", ["backend", "streaming"])
def test_tensors_are_read_one_by_one(
    kind: str, tiny_model: Path, request: pytest.FixtureRequest
) -> None:
    backend: VllmBackend = request.getfixturevalue(kind)
    counts = []

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        live: list[weakref.ref[torch.Tensor]] = []
        for name, weight in other_weights(tiny_model).named_parameters():
            tensor = weight.detach().clone()
            live.append(weakref.ref(tensor))
            counts.append(sum(each() is not None for each in live))
            yield name, tensor

    backend.take_weights(tensors())
    assert len(counts) > 10
    assert max(counts) <= 3  # this one, the one before, and the embedding for the tied head


def test_folder_is_converted_one_tensor_at_a_time(
    backend: VllmBackend, tiny_model: Path, tmp_path: Path
) -> None:
    """Its float32 files are converted to the engine's dtype, in every rank of a machine."""
    sent = other_weights(tiny_model)
    shutil.copytree(tiny_model, folder := tmp_path / "model")
    (folder / "model.safetensors").unlink()
    save_weights(folder, reversed(list(sent.named_parameters())), max_shard_bytes=2**13)
    assert len(list(folder.glob("*.safetensors"))) > 3
    backend._setup = replace(backend._setup, dtype="bfloat16")
    backend.load_weights(folder)
    llm: Any = backend._llm
    names = [name for name in llm.arrived if name != "lm_head.weight"]
    assert names == sorted(name for name, _ in sent.named_parameters())
    assert llm.most_alive <= 3  # this one, the one before, and the embedding for the tied head
    for weight, expected in zip(llm.model.parameters(), sent.parameters(), strict=True):
        assert torch.equal(weight, expected.bfloat16().float())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda weights: weights.pop("model.norm.weight"), "lacks weights"),
        (lambda weights: weights.update({"extra": torch.ones(1)}), "does not have"),
        (lambda weights: weights["model.norm.weight"].fill_(float("inf")), "model.norm.weight"),
        (
            lambda weights: weights.update({"model.norm.weight": torch.ones(3)}),
            "of another shape",
        ),
    ],
    ids=["missing", "surplus", "infinite", "misshapen"],
)
def test_wrong_weights_are_named(
    damage: Any, message: str, backend: VllmBackend, tiny_model: Path
) -> None:
    weights = {
        name: each.detach().clone() for name, each in other_weights(tiny_model).named_parameters()
    }
    damage(weights)
    with pytest.raises(ModelError, match=message):
        backend.take_weights(iter(weights.items()))


def test_reload_that_does_nothing_is_detected(
    backend: VllmBackend, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reads(*_: Any, **kwargs: Any) -> None:
        for _ in kwargs["kwargs"]["weights_iterator"]:
            pass

    monkeypatch.setattr(FakeLLM, "collective_rpc", staticmethod(reads))
    with pytest.raises(ConsistencyError, match="still has old weights"):
        backend.take_weights(iter(other_weights(tiny_model).named_parameters()))


def test_engine_on_dedicated_gpus_never_sleeps(tiny_model: Path, backend: VllmBackend) -> None:
    backend.setup(setup_of(tiny_model, placement={"own": 1}))
    llm: Any = backend._llm
    backend.sleep(level=2)
    assert not transfer(Trainer(other_weights(tiny_model), []), backend)
    backend.generate(prompts(), greedy=True)
    assert llm.events == ["reload_weights", "reset_prefix_cache", "generate"]


def test_engine_on_a_gpu_uses_caches_and_graphs(backend: VllmBackend) -> None:
    fake: Any = backend._llm
    options = fake.calls[0][2]
    assert options["enable_prefix_caching"]
    assert options["enable_chunked_prefill"]
    assert options["enable_sleep_mode"]
    assert not options["enforce_eager"]
    assert options["gpu_memory_utilization"] == 0.5


def test_engine_on_a_gpu_reads_its_weights_once(backend: VllmBackend, tiny_model: Path) -> None:
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader import get_model_loader

    fake: Any = backend._llm
    loader = get_model_loader(LoadConfig(load_format=fake.calls[0][2]["load_format"]))
    model = torch.nn.BatchNorm1d(2)  # its buffers are in no checkpoint
    loader.load_weights(model, None)
    assert [each.tolist() for each in model.parameters()] == [[0, 0], [0, 0]]
    assert model.running_var.tolist() == [1, 1]
    backend.load_weights(tiny_model)
    backend.generate(prompts(), greedy=True)
    assert fake.events == ["reload_weights", "reset_prefix_cache", "generate"]
    # If no weights are sent, it reads its own before it generates.
    backend.setup(setup_of(tiny_model))
    fake = backend._llm
    backend.generate(prompts(), greedy=True)
    backend.generate(prompts(), greedy=True)
    assert fake.events == ["reload_weights", "reset_prefix_cache", "generate", "generate"]


def test_explicit_load_formats_and_those_of_fp8_and_cpus_are_kept() -> None:
    plain, dummy = VllmGenerationConfig(), VllmGenerationConfig(load_format="dummy")
    rounded = VllmGenerationConfig(quantization="fp8_per_channel")
    assert load_format_of(plain, has_gpu=True) == "zeros"
    assert load_format_of(plain, has_gpu=False) == "auto"
    assert load_format_of(dummy, has_gpu=True) == "dummy"
    assert load_format_of(rounded, has_gpu=True) == "auto"


@pytest.mark.parametrize("quantization", ["fp8_per_tensor", "fp8_per_channel", "fp8_per_block"])
def test_fp8_uses_vllm_and_is_refused_without_a_kernel(
    quantization: str, backend: VllmBackend, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS

    assert quantization in QUANTIZATION_METHODS
    plain: Any = backend._llm
    assert plain.calls[0][2]["quantization"] is None
    setup = replace(setup_of(tiny_model, quantization=quantization), dtype="bfloat16")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    backend.setup(setup)
    fake: Any = backend._llm
    assert fake.calls[0][2]["quantization"] == quantization
    with pytest.raises(ConfigError, match=r"compute capability 9.0, float32"):
        backend.setup(replace(setup, dtype="float32"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(ConfigError, match=r"compute capability 8.0, bfloat16"):
        backend.setup(setup)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=f"{quantization} cannot be computed here"):
        backend.setup(setup)


def test_rounded_weights_are_not_stale() -> None:
    sent = [("norm", torch.ones(4)), ("o_proj", torch.eye(4) * 3), ("embedding", torch.ones(2, 4))]
    expected = SimpleNamespace()
    parameters = {name: tensor.clone() for name, tensor in sent}
    parameters["o_proj"] = parameters["o_proj"].to(torch.float8_e4m3fn)
    with mock.patch.object(incoming, "check_weights"):
        weights = incoming.IncomingWeights(
            expected, parameters, is_tensor_parallel=False, source="test"
        )
        list(weights.checked(iter(sent)))
    weights.refuse_stale({**parameters, "o_proj": torch.zeros(4, 4).to(torch.float8_e4m3fn)})
    with pytest.raises(ConsistencyError, match="norm"):
        weights.refuse_stale({**parameters, "norm": torch.zeros(4)})


def test_stale_weights_are_detected_with_the_engines_names_and_dtypes() -> None:
    """Covers GPT-NeoX in vLLM's generic class, the xIELU of Apertus, and fused biases of BLOOM."""
    fused = "h.0.query_key_value.bias"
    sent = [("gpt_neox.norm.weight", torch.rand(4)), (fused, torch.arange(6))]
    parameters = {"model.norm.weight": sent[0][1].bfloat16(), fused: torch.arange(6).flip(0)}
    with mock.patch.object(incoming, "check_weights"):
        weights = incoming.IncomingWeights(
            SimpleNamespace(),
            parameters,
            is_tensor_parallel=False,
            source="test",
            rename=lambda name: name.replace("gpt_neox.", "model."),
        )
        list(weights.checked(iter(sent)))
    weights.refuse_stale(parameters)
    with pytest.raises(ConsistencyError, match=r"old weights in 'model\.norm\.weight'"):
        weights.refuse_stale({**parameters, "model.norm.weight": torch.zeros(4)})


def test_vllm_accepts_every_call(tiny_model: Path, backend: VllmBackend) -> None:
    fake: Any = backend._llm
    backend.sleep(level=2)
    backend.load_weights(tiny_model)
    backend.generate(prompts(), greedy=False)
    backend.sleep()
    from vllm.engine.arg_utils import EngineArgs
    from vllm.entrypoints.llm import LLM
    from vllm.v1.executor.abstract import SLEEP_TAGS
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as SecondRunner
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as FirstRunner

    options = {each.name for each in fields(EngineArgs)}
    (_, args, kwargs), *calls = fake.calls
    bound = inspect.signature(LLM.__init__).bind(None, *args, **kwargs)
    assert options >= set(bound.arguments.get("kwargs", {}))
    assert {name for name, *_ in calls} >= {"sleep", "wake_up", "collective_rpc", "generate"}
    for name, args, kwargs in calls:
        inspect.signature(getattr(LLM, name)).bind(None, *args, **kwargs)
        if name == "collective_rpc":
            for runner in (FirstRunner, SecondRunner):  # CUDA uses the second one if it can
                method = getattr(runner, args[0])
                inspect.signature(method).bind(None, **kwargs["kwargs"])
    for runner in (FirstRunner, SecondRunner):
        inspect.signature(runner.get_model).bind(None)
        assert "self.attn_groups" in inspect.getsource(runner)  # `kernels` reads it
    assert ALL == SLEEP_TAGS
