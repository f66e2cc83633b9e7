import json
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
from transformers import AutoModelForCausalLM

from nemo_rl_core.checkpoints.tensors import (
    load_tensors,
    order_metadata,
    save_tensors,
    save_weights,
)
from nemo_rl_core.errors import StoreError


def test_tensors_round_trip_with_shared_sliced_and_empty_ones(tmp_path: Path) -> None:
    base = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    tensors = {
        "embed": base,
        "tied": base,
        "turned": base.T,
        "part": base[1:, ::2],
        "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
        "half": torch.tensor([1.5, 2.5], dtype=torch.bfloat16),
        "count": torch.tensor(7),
        "none": torch.zeros(0, 3),
        "trained": torch.nn.Parameter(torch.ones(2)),
    }
    save_tensors(tmp_path / "t.safetensors", tensors)
    loaded = load_tensors(tmp_path / "t.safetensors")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name].nan_to_num(9), tensor.detach().nan_to_num(9)), name
    assert torch.signbit(loaded["nan"][1])
    assert loaded["embed"].data_ptr() != loaded["tied"].data_ptr()


@pytest.mark.parametrize("damage", ["cut", "garbage", "missing"])
def test_damaged_tensors_are_refused(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "t.safetensors"
    save_tensors(path, {"a": torch.ones(100)})
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-7])
    elif damage == "garbage":
        path.write_bytes(b"\x80\x04pickle?" * 9)
    else:
        path.unlink()
    with pytest.raises(StoreError, match="cannot read tensors"):
        load_tensors(path)


def stream(*sizes: int):
    """float32 tensors `w0`, `w1`, ... of so many elements, each holding its own number."""
    return ((f"w{number}", torch.full((size,), float(number))) for number, size in enumerate(sizes))


def test_weights_are_cut_into_files_by_size(tmp_path: Path) -> None:
    # 40 + 40 bytes fill the first file; the 200 exceed the bound; the rest is the third.
    total = save_weights(tmp_path, stream(10, 10, 50, 5, 5), max_shard_bytes=80)
    assert total == 320
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 320}
    files = [f"model-{number:05d}-of-00003.safetensors" for number in (1, 2, 3)]
    expected = dict(zip(["w0", "w1", "w2", "w3", "w4"], [0, 0, 1, 2, 2], strict=True))
    assert index["weight_map"] == {name: files[number] for name, number in expected.items()}
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *files,
        "model.safetensors.index.json",
    ]
    for name, number in expected.items():
        assert (load_tensors(tmp_path / files[number])[name] == int(name[1])).all()


def test_few_weights_are_one_file_without_index(tmp_path: Path) -> None:
    save_weights(tmp_path / "new", stream(3, 4))
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["model.safetensors"]


def test_no_two_files_are_in_memory_at_once(tmp_path: Path) -> None:
    def written() -> list[int]:
        return [len(load_tensors(path)) for path in tmp_path.iterdir()]

    def watched():
        for number, (name, tensor) in enumerate(stream(10, 10, 10, 10, 10)):
            # Two tensors a file: by the time that one is made, all but the last two are written.
            assert sum(written()) >= number - 2
            yield name, tensor

    save_weights(tmp_path, watched(), max_shard_bytes=80)


def test_a_name_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="two tensors named 'w0'"):
        save_weights(tmp_path, [*stream(1), *stream(1)])


@pytest.mark.parametrize("max_shard_bytes", [4096, 2**30])
def test_transformers_reads_streamed_weights(
    tiny_model: Path, tmp_path: Path, max_shard_bytes: int
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    model.config.save_pretrained(tmp_path)
    save_weights(tmp_path, model.named_parameters(), max_shard_bytes=max_shard_bytes)
    again, report = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values()), report
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name]), name


def test_equal_content_is_equal_bytes_in_any_order_of_metadata(tmp_path: Path) -> None:
    tensors = {"weight": torch.arange(6.0).view(2, 3), "step": torch.tensor(3)}
    metadata = {name: f'value of {name}: äöü \\ "' for name in "abcdefgh"}
    written = set()
    for attempt in range(12):
        path = tmp_path / f"{attempt}.safetensors"
        safetensors.torch.save_file(tensors, path, metadata=metadata)
        order_metadata(path)
        written.add(path.read_bytes())
        with safetensors.safe_open(path, "pt") as file:
            assert file.metadata() == metadata
            assert all(file.get_tensor(name).equal(tensor) for name, tensor in tensors.items())
    assert len(written) == 1
