"""Host work of trainer and engine in a weight transfer, on a simulated GPU."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nemo_rl_core.backends.generation.base import GenerationSetup
from nemo_rl_core.backends.generation.vllm import VllmBackend
from nemo_rl_core.backends.training.base import TrainingSetup
from nemo_rl_core.backends.training.dtensor.backend import DTensorBackend
from nemo_rl_core.backends.training.garbage import freeze_libraries
from nemo_rl_core.config.generation import VllmGenerationConfig
from nemo_rl_core.config.optimizer import OptimizerConfig
from nemo_rl_core.config.training import DTensorTraining
from tests.fake_llm import FakeLLM
from tests.simulated_cuda import simulated_cuda


class LLMOnSimulatedGpu(FakeLLM):
    """A fake vLLM whose weights are on the simulated GPU."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.model.to("cuda")


def test_engine_receives_weights_without_copying_them_to_the_host(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import vllm

    monkeypatch.setattr(vllm, "LLM", LLMOnSimulatedGpu, raising=False)
    with simulated_cuda() as transfers:
        engine = VllmBackend()
        config = VllmGenerationConfig(max_new_tokens=1)
        engine.setup(GenerationSetup(tiny_model, config, max_model_len=32, stop_token_ids=(1,)))
        sent = {
            name: weight.detach().clone() * 1.5
            for name, weight in engine._model().named_parameters()
        }
        transfers.clear()
        engine.take_weights(iter(sent.items()))
        parameters = dict(engine._model().named_parameters())
        actual = [(each.kind, each.operator, each.location) for each in transfers]
    assert all(torch.equal(parameters[name].values, sent[name].values) for name in sent)  # type: ignore[attr-defined]
    # One result per tensor is copied: whether it is finite and whether the engine has it.
    assert set(actual) == {
        ("sync", "_local_scalar_dense", "weights.py:require_finite"),
        ("sync", "equal", "incoming.py:refuse_stale"),
    }
    assert len(actual) == 2 * len(sent)


@pytest.fixture
def thawed() -> Iterator[None]:
    freeze_libraries.cache_clear()
    yield
    gc.unfreeze()
    freeze_libraries.cache_clear()


@pytest.mark.slow
def test_trainer_collects_garbage_among_few_objects_including_its_models(
    tiny_model: Path, thawed: None
) -> None:
    training = DTensorTraining(attention="sdpa")  # the simulated GPU has no kernels
    setup = TrainingSetup(tiny_model, OptimizerConfig(), 512, training=training)
    with simulated_cuda():
        trainer = DTensorBackend()
        for _ in range(2):  # a second stage in the same worker
            trainer.setup(setup)
            collected = gc.get_objects()
            assert gc.get_freeze_count() > 10 * len(collected)
            # Frozen objects in a cycle, such as a model with hooks, are never freed.
            assert any(each is trainer._policy.model for each in collected)
        trainer.shutdown()


def test_without_a_gpu_nothing_is_frozen(thawed: None) -> None:
    before = gc.get_freeze_count()
    freeze_libraries()
    assert gc.get_freeze_count() == before
