"""The backend `megatron` on a simulated CUDA device: the numbers of the CPU, and few waits."""

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
    """Rows of one length, so that twice as many are twice as many micro-batches."""
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
            # Asked for, so that an operator without such a kernel is found.
            training=MegatronTraining(attention="sdpa", deterministic=True),
            reference_folder=folder,
        )
    )
    return backend


def trained(folder: Path, simulated: bool) -> dict[str, Any]:
    with simulated_cuda() if simulated else nullcontext():
        backend, batch = started(folder), make_batch(6)
        found: dict[str, Any] = {"before": backend.get_logprobs(batch)}
        found["reference"] = backend.get_reference_logprobs(batch)
        found["step"] = backend.train_step(batch, LOSS)
        found["after"] = backend.get_logprobs(batch)
        parameters = backend._models[0].parameters()
        found["devices"] = {parameter.device.type for parameter in parameters}
    return found


def test_training_computes_what_the_cpu_does(tiny_model: Path) -> None:
    # In processes of their own: Megatron is redirected to the CPU for good where it finds no GPU.
    found = {
        simulated: run_ranks(trained, tiny_model, simulated, world_size=1)[0]
        for simulated in (False, True)
    }
    assert found[True].pop("devices") == {"cuda"}
    assert found[False].pop("devices") == {"cpu"}
    assert not torch.equal(found[True]["before"], found[True]["after"])
    torch.testing.assert_close(found[True], found[False], rtol=0, atol=1e-6)


def waits(folder: Path) -> dict[str, Any]:
    """Syncs and copies that a further micro-batch adds, and those of the optimizer's step."""
    calls = {
        "training": lambda backend, batch: backend.forward_backward(
            batch, LOSS, returns_outputs=False
        ),
        "logprobs": lambda backend, batch: backend.get_logprobs(batch),
        "top k": lambda backend, batch: backend.get_reference_topk_logprobs(batch, 3),
    }
    found: dict[str, Any] = {}
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
            added = seen[1] - seen[0]  # of two micro-batches
            assert all(number % 2 == 0 for number in added.values()), added
            each = [one for one, number in added.items() for _ in range(number // 2)]
            kinds = {kind: count(each, kind) for kind in ("sync", "upload", "pinned")}  # type: ignore[arg-type]
            found[name] = kinds, [f"{e.kind} {e.operator} {e.place}" for e in each]
        backend.forward_backward(make_batch(4), LOSS, returns_outputs=False)
        transfers.clear()
        backend.optimizer_step()
        found["optimizer"] = [each.operator for each in transfers if each.kind == "sync"]
    return found


def test_a_microbatch_is_one_copy_and_results_are_one_wait(tiny_model: Path) -> None:
    (found,) = run_ranks(waits, tiny_model, world_size=1)
    for name, syncs in {"training": 0, "logprobs": 1, "top k": 1}.items():
        kinds, told = found[name]
        assert kinds == {"sync": syncs, "upload": 0, "pinned": 1}, told
    assert len(found["optimizer"]) == 1, found["optimizer"]


def refusal(folder: Path, total_memory: int) -> str:
    with simulated_cuda(), mock.patch.object(torch.cuda, "get_device_properties") as properties:
        properties.return_value = SimpleNamespace(total_memory=total_memory)
        try:
            started(folder).get_logprobs(make_batch(2))
        except ConfigError as error:
            return str(error)
    return ""


def test_a_gpu_without_memory_for_all_pairs_is_not_asked_for_it(tiny_model: Path) -> None:
    said = [run_ranks(refusal, tiny_model, size, world_size=1)[0] for size in (10**9, 10**3)]
    assert said[0] == ""
    assert "tokens does not fit the GPU" in said[1]
