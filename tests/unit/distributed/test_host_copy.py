"""Many tensors in one copy, to a GPU and from it."""

from collections.abc import Sequence

import torch

from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.distributed.host_copy import move_together, numbers_of, to_host
from tests.simulated_cuda import count, simulated_cuda

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def of_all_kinds() -> list[torch.Tensor]:
    """Returns tensors whose sizes would leave the next one unaligned without padding."""
    return [
        torch.tensor([True, False, True]),
        torch.arange(5),
        torch.rand(2, 3).t(),  # not contiguous
        torch.empty(0, 4, dtype=torch.long),
        torch.tensor(2.5),
        torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    ]


def assert_same(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def test_on_a_cpu_nothing_is_copied() -> None:
    tensors = of_all_kinds()
    assert all(a is b for a, b in zip(move_together(tensors, CPU), tensors, strict=True))


def test_round_trip_uses_one_copy_each_way() -> None:
    tensors = of_all_kinds()
    with simulated_cuda() as transfers:
        moved = move_together(tensors, GPU)
        assert [each.kind for each in transfers] == ["pinned"]
        assert {each.device for each in moved} == {GPU}
        transfers.clear()
        back = to_host(moved)
        assert [each.kind for each in transfers] == ["sync"]
    assert_same(back, tensors)


def test_tensors_already_on_the_device_are_kept() -> None:
    with simulated_cuda() as transfers:
        on_gpu = torch.ones(2, device="cuda")
        transfers.clear()
        (found,) = move_together([on_gpu], GPU)
        assert found is on_gpu
        assert not transfers


def test_batch_moves_in_one_copy_with_lists_and_other_tensors() -> None:
    images = [torch.rand(2, 2), None]
    batch = BatchedDataDict(
        {"input_ids": torch.arange(4).view(2, 2), "pixel_values": images, "id": ["a", "b"]}
    )
    with simulated_cuda() as transfers:
        moved, (other,) = batch.moved_with([torch.tensor([7])], GPU)
        assert count(transfers, "pinned") == len(transfers) == 1
        assert moved["pixel_values"][0].device == moved["input_ids"].device == other.device == GPU
        result = to_host([moved["input_ids"], moved["pixel_values"][0], other])
    assert_same(result, [batch["input_ids"], images[0], torch.tensor([7])])  # type: ignore[list-item]
    assert (moved["pixel_values"][1], moved["id"]) == (None, ["a", "b"])
    assert batch["input_ids"].device == CPU


def test_numbers_equal_item_with_one_wait() -> None:
    values = {"a": torch.tensor(0.1), "b": torch.tensor(2**40 + 1), "c": torch.tensor(True)}
    expected = {name: value.item() for name, value in values.items()}
    assert numbers_of(values) == expected
    assert [type(value) for value in numbers_of(values).values()] == [float, int, int]
    assert numbers_of({}) == {}
    with simulated_cuda() as transfers:
        on_gpu = {name: value.to("cuda") for name, value in values.items()}
        transfers.clear()
        assert numbers_of(on_gpu) == expected
        assert [each.kind for each in transfers] == ["sync"]
