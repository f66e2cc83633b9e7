"""The training worker on a simulated CUDA device: the numbers of the CPU, and few waits."""

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl_core.algorithms.grpo.loss import GRPOLossFn
from nemo_rl_core.algorithms.grpo.loss_config import ClippedLoss, KLPenalty
from nemo_rl_core.backends.training.base import TrainingSetup
from nemo_rl_core.backends.training.dtensor.attention import PackedAttention
from nemo_rl_core.backends.training.dtensor.backend import DTensorBackend
from nemo_rl_core.config.optimizer import OptimizerConfig
from nemo_rl_core.config.training import DTensorTraining, LoRAConfig
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict, collate
from tests.simulated_cuda import Transfer, count, simulated_cuda

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real device")

SYNCS_A_MICROBATCH = {
    ("sdpa", False): 2,
    ("sdpa", True): 1,
    ("boundaries", False): 2,
    ("boundaries", True): 2,
}
"""By attention and sharing: how often the host waits for the GPU in a micro-batch, both passes.

Once for the number of trained tokens; and, where no mask of shared prefixes is made, once for the
boundaries of sequences, which transformers looks for by itself where it makes the mask.
"""
UPLOADS_BESIDE_COLUMNS = {"sdpa": 1, "boundaries": 2}
"""Copies of pageable memory a micro-batch, without one for each column of the batch."""

LORA = {"lora": LoRAConfig(rank=4, alpha=8.0)}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "packed": ("sdpa", {}),
    "boundaries": ("boundaries", {}),
    "recomputed": ("boundaries", {"activation_checkpointing": True}),
    "shared prefixes": ("sdpa", {"share_prefixes": True}),
    "lora": ("boundaries", LORA),
    "shared prefixes and lora": ("boundaries", {"share_prefixes": True, **LORA}),
}
"""What attends, and the settings of the training."""
LOSS = GRPOLossFn(ClippedLoss(kl=KLPenalty(beta=0.1)))
REFERENCE_KERNEL = "packed_attention.py:reference_attention"


@pytest.fixture
def attend(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Chooses a mask, or the boundaries that kernels of GPUs take, for the kernel of the CPU."""

    def choose(attention: str) -> None:
        if attention == "boundaries":
            monkeypatch.setattr(
                DTensorBackend,
                "_attention_of",
                lambda self, model: PackedAttention(model, "reference"),
            )

    return choose


def make_batch(*, num_groups: int = 2) -> BatchedDataDict:
    """Groups of three completions of one prompt."""
    generator = torch.Generator().manual_seed(2)

    def tokens(number: int) -> list[int]:
        return torch.randint(3, 16, (number,), generator=generator).tolist()

    sequences, masks = [], []
    for _ in range(num_groups):
        prompt = tokens(9)
        for length in (3, 5, 4):
            sequences.append([*prompt, *tokens(length)])
            masks.append([False] * 9 + [True] * length)
    batch = collate(sequences, masks)
    shape = batch["token_mask"].shape
    batch["advantages"] = torch.randn(shape, generator=generator)
    for name in ("prev_logprobs", "reference_logprobs"):
        batch[name] = -3 * torch.rand(shape, generator=generator)
    return batch


def started(folder: Path, *, max_tokens: int, **training: Any) -> DTensorBackend:
    backend = DTensorBackend()
    backend.setup(
        TrainingSetup(
            model_folder=folder,
            optimizer=OptimizerConfig(learning_rate=1e-2, adam_epsilon=1e-3),
            max_tokens_per_microbatch=max_tokens,
            training=DTensorTraining(attention="sdpa", **training),
        )
    )
    return backend


def plan_of(backend: DTensorBackend) -> Any:
    (plan,) = backend._microbatches._plans.values()
    return plan


def trained(folder: Path, **training: Any) -> dict[str, Any]:
    """The results of a step at once, and of one by halves."""
    backend, batch = started(folder, max_tokens=48, **training), make_batch()
    found: dict[str, Any] = {"before": backend.get_logprobs(batch)}
    found["step"] = backend.train_step(batch, LOSS)
    found["halves"], found["outputs"] = backend.forward_backward(batch, LOSS)
    found["halves"] |= backend.optimizer_step()
    found["after"] = backend.get_logprobs(batch)
    found["weights"] = {name: each.cpu().clone() for name, each in backend.named_weights()}
    found["shared"] = any(part.shared for part in plan_of(backend))
    parameters = backend._policy.model.parameters()
    found["devices"] = {parameter.device.type for parameter in parameters}
    return found


@pytest.mark.parametrize("case", CASES)
def test_training_computes_what_the_cpu_does(
    case: str, attend: Callable[[str], None], tiny_model: Path
) -> None:
    attention, training = CASES[case]
    attend(attention)
    found = {}
    for device, place in (("cpu", nullcontext()), ("cuda", simulated_cuda())):
        with place:
            found[device] = trained(tiny_model, **training)
    assert all(one.pop("devices") == {device} for device, one in found.items())
    assert found["cuda"].pop("shared") == found["cpu"].pop("shared") == ("shared" in case)
    assert not torch.equal(found["cpu"]["before"], found["cpu"]["after"])
    torch.testing.assert_close(found["cuda"], found["cpu"], rtol=0, atol=1e-6)


def a_microbatch(folder: Path, **training: Any) -> list[Transfer]:
    """The transfers that each further micro-batch of a step adds."""
    with simulated_cuda() as transfers:
        backend = started(folder, max_tokens=30, **training)
        totals, numbers = [], []
        for num_groups in (2, 4):
            batch = make_batch(num_groups=num_groups)
            transfers.clear()
            backend.forward_backward(batch, LOSS, returns_outputs=False)
            totals.append(Counter(transfers))
            numbers.append(len(plan_of(backend)))
    further = numbers[1] - numbers[0]
    assert further > 0
    added = totals[1] - totals[0]
    assert all(number % further == 0 for number in added.values()), added
    return [each for each, number in added.items() for _ in range(number // further)]


@pytest.mark.parametrize(("attention", "share_prefixes"), SYNCS_A_MICROBATCH)
def test_syncs_and_copies_of_a_microbatch_are_bounded(
    attention: str, share_prefixes: bool, attend: Callable[[str], None], tiny_model: Path
) -> None:
    attend(attention)
    found = a_microbatch(tiny_model, share_prefixes=share_prefixes)
    told = Counter(f"{each.kind} {each.operator} {each.place}" for each in found)
    syncs = count(found, "sync", outside=REFERENCE_KERNEL)
    assert syncs == SYNCS_A_MICROBATCH[attention, share_prefixes], told
    moved = [each for each in found if each.place == "batched_data_dict.py:_moved"]
    assert len(moved) == len(make_batch()), "each column moves once"
    assert count(found, "upload") - len(moved) == UPLOADS_BESIDE_COLUMNS[attention], told
