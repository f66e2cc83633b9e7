"""Metadata of `torch.distributed.checkpoint` is unpickled with a list of allowed names."""

import pickle
from collections import OrderedDict
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter, save
from torch.distributed.checkpoint.planner import WriteItemType

from nemo_rl_core.checkpoints.dcp_metadata import read_metadata


class ByName(pickle.Pickler):
    """Pickles members of enums as Python before 3.11.4 does, such as that of Debian 12."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Enum):
            return getattr, (type(value), value.name)
        return NotImplemented


class Attribute:
    """Unpickles to an attribute of something else."""

    def __init__(self, owner: object, name: str) -> None:
        self.of = owner, name

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, self.of


def write(folder: Path, value: object) -> None:
    with (folder / ".metadata").open("wb") as file:
        ByName(file).dump(value)


def test_members_of_enums_may_be_pickled_by_their_names(tmp_path: Path) -> None:
    save({"weight": torch.ones(2, 3)}, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    expected = read_metadata(tmp_path)
    write(tmp_path, expected)
    assert b"getattr" in (tmp_path / ".metadata").read_bytes()
    assert read_metadata(tmp_path) == expected


@pytest.mark.parametrize(
    "value",
    [
        Attribute(OrderedDict, "fromkeys"),
        Attribute(WriteItemType, "__init__"),
        Attribute(WriteItemType.TENSOR, "value"),
    ],
    ids=["of a class", "of an enum, no member", "of a member"],
)
def test_no_other_attribute_is_read(tmp_path: Path, value: Attribute) -> None:
    write(tmp_path, value)
    with pytest.raises(pickle.UnpicklingError, match="it reads an attribute"):
        read_metadata(tmp_path)
