"""The backend `megatron` on a simulated CUDA device: results of the CPU, and few waits."""

from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from nemo_rl_core.algorithms.grpo.loss import GRPOLossFn
from nemo_rl_core.algorithms.grpo.loss_config import ClippedLoss, KLInLoss
from nemo_rl_core.backends.training.base import TrainingSetup
from nemo_rl_core.config.optimizer import OptimizerConfig
from nemo_rl_core.config.training import MegatronTraining
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict, collate
from nemo_rl_core.distributed.local_ranks import run_ranks
from nemo_rl_core.errors import ConfigError
from tests.simulated_cuda import count, simulated_cuda

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real device")
LOSS = GRPOLossFn(ClippedLoss(kl=KLInLoss(beta=0.1)))


def make_batch(num_rows: int) -> BatchedDataDict:
    """Creates rows of one length, so that twice as many rows need twice as many micro-batches."""
    generator = torch.Generator().manual_seed(2)
    rows = torch.randint(3, 16, (num_rows, 12), generator=generator).tolist()
    batch = collate(rows, [[False] * 5 + [True] * 7 for _ in rows])
    shape = batch["token_mask"].shape
    batch["advantages"] = torch.randn(shape, generator=generator)
    for name in ("prev_logprobs", "reference_logprobs"):
        batch[name] = -3 * torch.rand(shape, generator=generator)
    return batch


def started(folder: Path) -> Any:
    from nemo_rl_core.backends.training.megatron.backend import MegatronBackend

    backend = MegatronBackend()
    backend.setup(
        TrainingSetup(
            model_folder=folder,
            optimizer=OptimizerConfig(learning_rate=1e-2, adam_epsilon=1e-3),
            max_tokens_per_microbatch=24,
            # Set, so that an operator without a deterministic kernel raises.
            training=MegatronTraining(attention="sdpa", deterministic=True),
            reference_folder=folder,
        )
    )
    return backend


def trained(folder: Path, simulated: bool) -> dict[str, Any]:
    with simulated_cuda() if simulated else nullcontext():
        backend, batch = started(folder), make_batch(6)
        results: dict[str, Any] = {"before": backend.get_logprobs(batch)}
        results["reference"] = backend.get_reference_logprobs(batch)
        results["step"] = backend.train_step(batch, LOSS)
        results["after"] = backend.get_logprobs(batch)
        parameters = backend._models[0].parameters()
        results["devices"] = {parameter.device.type for parameter in parameters}
    return results


@pytest.mark.slow
def test_training_matches_the_cpu(tiny_model: Path) -> None:
    # In separate processes: Megatron is permanently redirected to the CPU if it finds no GPU.
    actual = {
        simulated: run_ranks(trained, tiny_model, simulated, world_size=1)[0]
        for simulated in (False, True)
    }
    assert actual[True].pop("devices") == {"cuda"}
    assert actual[False].pop("devices") == {"cpu"}
    assert not torch.equal(actual[True]["before"], actual[True]["after"])
    torch.testing.assert_close(actual[True], actual[False], rtol=0, atol=1e-6)


def waits(folder: Path) -> dict[str, Any]:
    """Returns syncs and copies added by one more micro-batch, and those of the optimizer's step."""
    calls = {
        "training": lambda backend, batch: backend.forward_backward(
            batch, LOSS, returns_outputs=False
        ),
        "logprobs": lambda backend, batch: backend.get_logprobs(batch),
        "top k": lambda backend, batch: backend.get_reference_topk_logprobs(batch, 3),
    }
    results: dict[str, Any] = {}
    with simulated_cuda() as transfers:
        backend = started(folder)
        for name, call in calls.items():
            call(backend, make_batch(2))
            seen = []
            for num_rows in (4, 8):
                batch = make_batch(num_rows)
                transfers.clear()
                call(backend, batch)
                seen.append(Counter(transfers))
            added = seen[1] - seen[0]  # by two micro-batches
            assert all(number % 2 == 0 for number in added.values()), added
            each = [one for one, number in added.items() for _ in range(number // 2)]
            kinds = {kind: count(each, kind) for kind in ("sync", "upload", "pinned")}  # type: ignore[arg-type]
            results[name] = kinds, [f"{e.kind} {e.operator} {e.location}" for e in each]
        backend.forward_backward(make_batch(4), LOSS, returns_outputs=False)
        transfers.clear()
        backend.optimizer_step()
        results["optimizer"] = [each.operator for each in transfers if each.kind == "sync"]
    return results


@pytest.mark.slow
def test_microbatch_needs_one_copy_and_results_one_wait(tiny_model: Path) -> None:
    (actual,) = run_ranks(waits, tiny_model, world_size=1)
    for name, syncs in {"training": 0, "logprobs": 1, "top k": 1}.items():
        kinds, told = actual[name]
        assert kinds == {"sync": syncs, "upload": 0, "pinned": 1}, told
    assert len(actual["optimizer"]) == 1, actual["optimizer"]


def refusal(folder: Path, total_memory: int) -> str:
    with simulated_cuda(), mock.patch.object(torch.cuda, "get_device_properties") as properties:
        properties.return_value = SimpleNamespace(total_memory=total_memory)
        try:
            started(folder).get_logprobs(make_batch(2))
        except ConfigError as error:
            return str(error)
    return ""


@pytest.mark.slow
def test_gpu_without_memory_for_all_pairs_is_refused(tiny_model: Path) -> None:
    errors = [run_ranks(refusal, tiny_model, size, world_size=1)[0] for size in (10**9, 10**3)]
    assert errors[0] == ""
    assert "tokens does not fit the GPU" in errors[1]
