"""The simulated CUDA device refuses and counts the same operations as CUDA."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from nemo_rl_core.distributed.process_group import local_device
from tests.simulated_cuda import CudaRuleError, Transfer, simulated_cuda

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real device")


def on_gpu(*values: float) -> torch.Tensor:
    return torch.tensor(values, device="cuda", dtype=torch.float32)


@pytest.mark.parametrize(
    "refused",
    [
        lambda: on_gpu(1, 2) * torch.ones(2),
        lambda: torch.cat([on_gpu(1, 2), torch.ones(2)]),
        lambda: torch.ones(2)[on_gpu(0, 1).long()],
        lambda: on_gpu(1, 2).index_put((on_gpu(0).long(),), torch.ones(1)),
        lambda: torch.rand(2, device="cuda", generator=torch.Generator()),
        lambda: on_gpu(1, 2).normal_(generator=torch.Generator()),
    ],
)
def test_operations_that_cuda_refuses_raise(refused: Callable[[], Any]) -> None:
    with simulated_cuda(), pytest.raises(CudaRuleError):
        refused()


def test_a_tensor_on_the_gpu_does_not_become_an_array() -> None:
    with simulated_cuda(), pytest.raises(TypeError, match="numpy"):
        on_gpu(1).numpy()


def test_an_operator_without_a_deterministic_kernel_raises_on_request() -> None:
    before = torch.are_deterministic_algorithms_enabled()
    try:
        with simulated_cuda():
            torch.use_deterministic_algorithms(False)
            assert on_gpu(1, 2).cumsum(0).tolist() == [1, 3]
            torch.use_deterministic_algorithms(True)
            assert on_gpu(1, 2).long().cumsum(0).tolist() == [1, 3]
            with pytest.raises(CudaRuleError, match="cumsum"):
                on_gpu(1, 2).cumsum(0)
    finally:
        torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (lambda x: x + 1, []),
        (lambda x: x * torch.tensor(2.0), []),
        (lambda x: torch.zeros(3, device="cuda") + x.new_ones(3), []),
        (lambda x: x.to("cuda"), []),
        (lambda x: x.item() if x.dim() == 0 else x.sum().item(), ["sync"]),
        (lambda x: x.tolist(), ["sync"]),
        (lambda x: x.cpu(), ["sync"]),
        (lambda x: torch.zeros(3).copy_(x), ["sync"]),
        (lambda x: x.nonzero(), ["sync"]),
        (lambda x: x[x > 1], ["sync"]),
        (lambda x: x[torch.tensor([0])], ["upload"]),
        (lambda x: torch.ones(3).to("cuda"), ["upload"]),
        (lambda x: torch.tensor([1.0], device=x.device), ["upload"]),
        (lambda x: torch.repeat_interleave(x, x.long()), ["sync"]),
        (lambda x: torch.repeat_interleave(x, x.long(), output_size=6), []),
    ],
)
def test_syncs_and_copies_are_recorded(
    run: Callable[[torch.Tensor], Any], expected: list[str]
) -> None:
    with simulated_cuda() as transfers:
        tensor = on_gpu(1, 2, 3)
        transfers.clear()
        run(tensor)
    assert [each.kind for each in transfers] == expected


def test_a_transfer_names_the_function_of_the_project() -> None:
    from nemo_rl_core.backends.training.packed_attention import segments_of

    with simulated_cuda() as transfers:
        segments_of(torch.zeros(1, 4, dtype=torch.long, device="cuda"))
    assert transfers[0] == Transfer("sync", "to", "packed_attention.py:segments_of")


def test_gradients_cross_between_the_devices() -> None:
    weight = torch.tensor([2.0, 3.0], requires_grad=True)
    with simulated_cuda():
        (weight.to("cuda") ** 2).sum().backward()
        assert weight.grad is not None
        assert weight.grad.device.type == "cpu"
    assert weight.grad.tolist() == [4.0, 6.0]


def test_the_device_is_gone_afterwards() -> None:
    before = torch.cuda.is_available, torch.cuda.device_count, torch.autocast.__init__
    with simulated_cuda():
        assert local_device() == torch.device("cuda", 0)
    assert local_device() == torch.device("cpu")
    assert before == (torch.cuda.is_available, torch.cuda.device_count, torch.autocast.__init__)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
