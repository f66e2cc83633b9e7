"""The training worker on a simulated CUDA device: results of the CPU, and few waits."""

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl_core.algorithms.distillation.loss import DistillationLossFn
from nemo_rl_core.algorithms.dpo.loss import DPOLossFn
from nemo_rl_core.algorithms.grpo.loss import GRPOLossFn
from nemo_rl_core.algorithms.grpo.loss_config import ClippedLoss, KLInLoss
from nemo_rl_core.algorithms.sft.loss import NLLLoss
from nemo_rl_core.backends.training.base import TrainingSetup
from nemo_rl_core.backends.training.dtensor.attention import PackedAttention
from nemo_rl_core.backends.training.dtensor.backend import DTensorBackend
from nemo_rl_core.config.optimizer import OptimizerConfig
from nemo_rl_core.config.training import DTensorTraining, LoRAConfig
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict, collate
from tests.simulated_cuda import Transfer, count, simulated_cuda

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real device")

SYNCS_A_MICROBATCH = {
    ("sdpa", False): 1,
    ("sdpa", True): 0,
    ("boundaries", False): 0,
    ("boundaries", True): 0,
}
"""Waits for the GPU per micro-batch in both passes, by attention and sharing.

Without a mask, transformers looks for the boundaries of sequences by itself.
"""

LORA = {"lora": LoRAConfig(rank=4, alpha=8.0)}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "packed": ("sdpa", {}),
    "boundaries": ("boundaries", {}),
    "recomputed": ("boundaries", {"activation_checkpointing": True}),
    "shared prefixes": ("sdpa", {"share_prefixes": True}),
    "lora": ("boundaries", LORA),
    "shared prefixes and lora": ("boundaries", {"share_prefixes": True, **LORA}),
}
"""The attention, and the settings of the training."""
DPO, KD = DPOLossFn(), DistillationLossFn()
LOSS = GRPOLossFn(ClippedLoss(kl=KLInLoss(beta=0.1)))
REFERENCE_KERNEL = "packed_attention.py:reference_attention"


@pytest.fixture
def attend(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Returns a function that chooses a mask or boundaries for the CPU kernel."""

    def choose(attention: str) -> None:
        if attention == "boundaries":
            monkeypatch.setattr(
                "nemo_rl_core.backends.training.dtensor.builder.packed_attention",
                lambda model, *_, **__: PackedAttention(model, "reference"),
            )

    return choose


def make_batch(*, num_groups: int = 2) -> BatchedDataDict:
    """Creates groups of three completions of one prompt."""
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
            # Set, so that an operator without a deterministic kernel raises.
            training=DTensorTraining(attention="sdpa", **{"deterministic": True, **training}),
            reference_folder=folder,
        )
    )
    return backend


def plan_of(backend: DTensorBackend) -> Any:
    (plan,) = backend._microbatches._plans.values()
    return plan


def trained(folder: Path, **training: Any) -> dict[str, Any]:
    """Returns the results of a full step, and of one in two halves."""
    backend, batch = started(folder, max_tokens=48, **training), make_batch()
    results: dict[str, Any] = {"before": backend.get_logprobs(batch)}
    results["step"] = backend.train_step(batch, LOSS)
    results["halves"], results["outputs"] = backend.forward_backward(batch, LOSS)
    results["halves"] |= backend.optimizer_step()
    results["after"] = backend.get_logprobs(batch)
    results["weights"] = {name: each.cpu().clone() for name, each in backend.named_weights()}
    results["shared"] = any(part.shared for part in plan_of(backend))
    parameters = backend._policy.model.parameters()
    results["devices"] = {parameter.device.type for parameter in parameters}
    return results


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_training_matches_the_cpu(
    case: str, attend: Callable[[str], None], tiny_model: Path
) -> None:
    attention, training = CASES[case]
    attend(attention)
    results = {}
    for device, context in (("cpu", nullcontext()), ("cuda", simulated_cuda())):
        with context:
            results[device] = trained(tiny_model, **training)
    assert all(one.pop("devices") == {device} for device, one in results.items())
    assert results["cuda"].pop("shared") == results["cpu"].pop("shared") == ("shared" in case)
    assert not torch.equal(results["cpu"]["before"], results["cpu"]["after"])
    torch.testing.assert_close(results["cuda"], results["cpu"], rtol=0, atol=1e-6)


def a_microbatch(
    folder: Path, call: Callable[[DTensorBackend, BatchedDataDict], Any], **training: Any
) -> list[Transfer]:
    """Returns the transfers that each further micro-batch of a call adds."""
    with simulated_cuda() as transfers:
        backend = started(folder, max_tokens=30, **training)
        call(backend, make_batch(num_groups=2))  # may load a reference
        totals, numbers = [], []
        for num_groups in (2, 4):
            batch = make_batch(num_groups=num_groups)
            transfers.clear()
            call(backend, batch)
            totals.append(Counter(transfers))
            numbers.append(len(plan_of(backend)))
    further = numbers[1] - numbers[0]
    assert further > 0
    added = totals[1] - totals[0]
    assert all(number % further == 0 for number in added.values()), added
    return [each for each, number in added.items() for _ in range(number // further)]


def summary(actual: list[Transfer]) -> Counter[str]:
    return Counter(f"{each.kind} {each.operator} {each.location}" for each in actual)


def gradients(loss: Any) -> Callable[[DTensorBackend, BatchedDataDict], Any]:
    return lambda backend, batch: backend.forward_backward(batch, loss, returns_outputs=False)


@pytest.mark.slow
@pytest.mark.parametrize(("attention", "share_prefixes"), SYNCS_A_MICROBATCH)
def test_syncs_and_copies_of_a_microbatch_are_bounded(
    attention: str, share_prefixes: bool, attend: Callable[[str], None], tiny_model: Path
) -> None:
    attend(attention)
    actual = a_microbatch(tiny_model, gradients(LOSS), share_prefixes=share_prefixes)
    syncs = count(actual, "sync", outside=REFERENCE_KERNEL)
    assert syncs == SYNCS_A_MICROBATCH[attention, share_prefixes], summary(actual)
    assert count(actual, "pinned") == 1, "all columns move together"
    assert count(actual, "upload") == 0, summary(actual)


def with_chosen(batch: BatchedDataDict) -> BatchedDataDict:
    """Uses consecutive rows as the completions of pairs."""
    number = torch.arange(batch.size)
    return BatchedDataDict({**batch, "pair_ids": number // 2, "is_chosen": number % 2 == 0})


def with_topk(batch: BatchedDataDict) -> BatchedDataDict:
    shape = (*batch["token_mask"].shape, 2)
    ids = torch.arange(2).expand(shape).clone()
    return BatchedDataDict({**batch, "topk_ids": ids, "topk_logprobs": torch.full(shape, -1.0)})


CALLS: dict[str, tuple[Callable[[DTensorBackend, BatchedDataDict], Any], dict[str, Any], int]] = {
    "sft": (gradients(NLLLoss()), {}, 0),
    "dpo": (lambda backend, batch: gradients(DPO)(backend, with_chosen(batch)), {}, 0),
    "distillation": (lambda backend, batch: gradients(KD)(backend, with_topk(batch)), {}, 0),
    "recomputed": (gradients(LOSS), {"activation_checkpointing": True}, 0),
    "lora": (gradients(LOSS), LORA, 0),
    "logprobs besides": (lambda backend, batch: backend.forward_backward(batch, LOSS), {}, 1),
    "old logprobs": (lambda backend, batch: backend.get_logprobs(batch), {}, 1),
    "reference": (lambda backend, batch: backend.get_reference_logprobs(batch), {}, 1),
    "reference under lora": (lambda backend, batch: backend.get_reference_logprobs(batch), LORA, 1),
    "top k": (lambda backend, batch: backend.get_reference_topk_logprobs(batch, 3), {}, 1),
}  # fmt: skip
"""A call, the settings of the training, and its syncs per micro-batch; results are copied once."""


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_every_loss_and_score_waits_at_most_once(
    name: str, attend: Callable[[str], None], tiny_model: Path
) -> None:
    attend("boundaries")
    call, training, syncs = CALLS[name]
    actual = a_microbatch(tiny_model, call, **training)
    assert count(actual, "sync", outside=REFERENCE_KERNEL) == syncs, summary(actual)
    assert count(actual, "pinned") == 1
    assert count(actual, "upload") == 0, summary(actual)


@pytest.mark.slow
def test_step_waits_for_metrics_and_for_the_norm(
    attend: Callable[[str], None], tiny_model: Path
) -> None:
    attend("boundaries")
    with simulated_cuda() as transfers:
        backend, batch = started(tiny_model, max_tokens=48), make_batch()
        backend.train_step(batch, LOSS)
        transfers.clear()
        backend.forward_backward(batch, LOSS, returns_outputs=False)
        assert count(transfers, "sync", outside=REFERENCE_KERNEL) == 1, summary(transfers)
        transfers.clear()
        backend.optimizer_step()
        # Torch's clipping reads the device in C++, where the simulation has no effect, and
        # therefore moves the factor to the CPU.
        syncs = [each.operator for each in transfers if each.kind == "sync"]
        assert [name for name in syncs if name != "to"] == ["_local_scalar_dense"], summary(
            transfers
        )
        assert syncs.count("to") == 1
        assert count(transfers, "upload") == 0, summary(transfers)
