"""What trainer and engine do on the host in a transfer of weights, on a simulated GPU."""

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
    """A fake vLLM whose weights lie on the simulated GPU."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.model.to("cuda")


def test_an_engine_takes_weights_without_a_copy_of_one_to_the_host(
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
        held = dict(engine._model().named_parameters())
        found = [(each.kind, each.operator, each.place) for each in transfers]
    assert all(torch.equal(held[name].values, sent[name].values) for name in sent)  # type: ignore[attr-defined]
    # One answer a tensor, whether it is finite and whether the engine has it: never its bytes.
    assert set(found) == {
        ("sync", "_local_scalar_dense", "weights.py:require_finite"),
        ("sync", "equal", "incoming.py:refuse_stale"),
    }
    assert len(found) == 2 * len(sent)


@pytest.fixture
def thawed() -> Iterator[None]:
    freeze_libraries.cache_clear()
    yield
    gc.unfreeze()
    freeze_libraries.cache_clear()


def test_a_trainer_collects_garbage_among_few_objects_its_models_among_them(
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
            # What is frozen is never freed once it is part of a cycle, as a model with hooks is.
            assert any(each is trainer._policy.model for each in collected)
        trainer.shutdown()


def test_without_a_gpu_nothing_is_frozen(thawed: None) -> None:
    before = gc.get_freeze_count()
    freeze_libraries()
    assert gc.get_freeze_count() == before
