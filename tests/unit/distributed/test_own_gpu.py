"""The GPU that a process computes on, according to Ray and the environment."""

from types import SimpleNamespace

import pytest
import ray
import torch

from nemo_rl_core.distributed.process_group import local_device, own_gpu, visible_gpus
from nemo_rl_core.errors import ResourceError


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Simulates eight GPUs without Ray."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    return monkeypatch


def give(gpus: pytest.MonkeyPatch, *given: str) -> None:
    """Sets what Ray would in a worker of a bundle with that GPU."""
    context = SimpleNamespace(get_accelerator_ids=lambda: {"GPU": list(given), "TPU": []})
    gpus.setattr(ray, "is_initialized", lambda: True)
    gpus.setattr(ray, "get_runtime_context", lambda: context)


def test_a_worker_that_sees_one_gpu_computes_on_it(gpus: pytest.MonkeyPatch) -> None:
    gpus.setenv("CUDA_VISIBLE_DEVICES", "5")
    gpus.setenv("LOCAL_RANK", "3")
    give(gpus, "5")
    assert (own_gpu(), local_device()) == ("5", torch.device("cuda", 0))


def test_a_worker_that_sees_all_gpus_takes_that_of_its_bundle(gpus: pytest.MonkeyPatch) -> None:
    # The second engine of a machine has a local rank 0 too.
    gpus.setenv("LOCAL_RANK", "0")
    give(gpus, "4")
    assert (own_gpu(), local_device()) == ("4", torch.device("cuda", 4))
    # Ray was started with some GPUs of the machine, by number or by name.
    gpus.setenv("CUDA_VISIBLE_DEVICES", "6,4,7")
    assert (own_gpu(), local_device()) == ("4", torch.device("cuda", 1))
    gpus.setenv("CUDA_VISIBLE_DEVICES", "GPU-aa,GPU-bb")
    give(gpus, "GPU-bb")
    assert (own_gpu(), local_device()) == ("GPU-bb", torch.device("cuda", 1))


def test_without_ray_the_local_rank_decides(gpus: pytest.MonkeyPatch) -> None:
    assert visible_gpus() == [str(index) for index in range(8)]
    assert local_device() == torch.device("cuda", 0)
    gpus.setenv("LOCAL_RANK", "2")
    assert (own_gpu(), local_device()) == ("2", torch.device("cuda", 2))
    give(gpus)  # the process that started Ray has no GPU
    assert local_device() == torch.device("cuda", 2)


def test_a_worker_that_cannot_see_its_gpu_says_so(gpus: pytest.MonkeyPatch) -> None:
    gpus.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    give(gpus, "3")
    with pytest.raises(ResourceError, match="does not see the GPU of its bundle"):
        local_device()
