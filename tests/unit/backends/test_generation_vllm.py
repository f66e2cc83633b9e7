"""The vLLM worker without vLLM."""

import multiprocessing
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemo_rl_core.backends.generation.vllm import (
    _logprobs_mode,
    _refuse_block_size,
)
from nemo_rl_core.backends.generation.vllm_ranks import EngineRank, join_engine, local_ranks
from nemo_rl_core.config.generation import VllmGenerationConfig
from nemo_rl_core.distributed.local_ranks import run_ranks
from nemo_rl_core.distributed.process_group import RECORDS
from nemo_rl_core.distributed.session import gang_environment
from nemo_rl_core.errors import ConfigError


@pytest.mark.slow
def test_ranks_of_an_engine_have_a_separate_rendezvous() -> None:
    def on_rank() -> dict[str, str]:
        join_engine(2)
        return {key: os.environ[key] for key in ("RANK", "WORLD_SIZE", "MASTER_ADDR")} | {
            "port": os.environ["MASTER_PORT"]
        }

    first, second, third, fourth = run_ranks(on_rank, world_size=4)
    assert [actual["RANK"] for actual in (first, second, third, fourth)] == ["0", "1", "0", "1"]
    assert {actual["WORLD_SIZE"] for actual in (first, second, third, fourth)} == {"2"}
    assert first["port"] == second["port"] != third["port"] == fourth["port"]


@pytest.mark.slow
def test_ranks_of_engines_record_their_collectives_in_separate_files(tmp_path: Path) -> None:
    def on_rank() -> tuple[str, str]:
        environment = gang_environment(name="grpo engine", use_gpus=True, folder=tmp_path)
        os.environ.update(environment)
        join_engine(2)
        # Torch appends the rank to this path.
        return environment[RECORDS] + "0", os.environ[RECORDS] + os.environ["RANK"]

    actual = run_ranks(on_rank, world_size=4)
    names = [Path(path).name for _, path in actual]
    assert names == [f"grpo_engine-engine_{each}-rank_{r}" for each in (0, 1) for r in (0, 1)]
    assert {Path(path).name for path, _ in actual} == {"grpo_engine-rank_0"}
    of_trainer = gang_environment(name="grpo policy", use_gpus=True, folder=tmp_path)[RECORDS]
    assert Path(of_trainer).name == "grpo_policy-rank_"


def test_record_path_of_the_user_is_kept() -> None:
    def on_rank() -> str:
        os.environ[RECORDS] = "/tmp/mine_"
        join_engine(1)
        return os.environ[RECORDS]

    assert run_ranks(on_rank, world_size=1) == ["/tmp/mine_"]


@pytest.mark.slow
def test_ranks_of_an_engine_know_each_others_gpus() -> None:
    def on_rank() -> tuple[list[str] | None, str]:
        os.environ["CUDA_VISIBLE_DEVICES"] = "7,5,3,1"
        torch.cuda.is_available = lambda: True
        return join_engine(2), os.environ["LOCAL_RANK"]

    # Without Ray, the GPU of a worker is that at its place on the machine.
    first, second = ["7", "5"], ["3", "1"]
    expected = [(first, "0"), (first, "1"), (second, "0"), (second, "1")]
    assert run_ranks(on_rank, world_size=4) == expected


def test_engine_on_two_machines_counts_ranks_per_machine() -> None:
    ranks = [EngineRank("a", "0"), EngineRank("a", "2"), EngineRank("b", "2"), EngineRank("b", "0")]
    assert [local_ranks(ranks, rank) for rank in range(4)] == [
        (0, ["0", "2"]),
        (1, ["0", "2"]),
        (0, ["2", "0"]),
        (1, ["2", "0"]),
    ]
    assert local_ranks([EngineRank("a", None)], 0) == (0, None)


def ask_peers(visible: str, gpus: list[str] | None) -> list[tuple[int, int]] | str:
    """Returns the pairs of CUDA devices that vLLM's custom all-reduce queries on its first rank.

    Runs vLLM's code on a platform that claims to be CUDA, up to where it allocates memory.
    """
    import torch.distributed as dist
    import vllm.distributed.device_communicators.custom_all_reduce as library
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms.interface import Platform, PlatformEnum, set_assigned_physical_gpu_ids

    class Cuda(Platform):
        _enum = PlatformEnum.CUDA
        device_type = "cuda"
        device_control_env_var = "CUDA_VISIBLE_DEVICES"

        @classmethod
        def is_fully_connected(cls, physical_device_ids: list[int]) -> bool:
            return True

    class ReachedError(Exception):
        pass

    def allocate(*_: Any, **__: Any) -> None:
        raise ReachedError

    queried = []
    os.environ["CUDA_VISIBLE_DEVICES"] = visible
    torch.cuda.can_device_access_peer = lambda one, other: queried.append((one, other)) is None
    engine: Any = SimpleNamespace(device_ids=gpus, distributed_executor_backend="external_launcher")
    physical = EngineArgs._resolve_device_ids(engine)
    if physical is not None:
        set_assigned_physical_gpu_ids(physical)
    library.current_platform, library.custom_ar = Cuda(), True
    library.in_the_same_node_as = lambda group, source_rank: [True, True]
    library.ops.meta_size = lambda: 1
    library.CustomAllreduce.create_shared_buffer = staticmethod(allocate)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    device = Cuda.logical_device_id_to_visible_device_id(0)
    try:
        library.CustomAllreduce(group=dist.group.WORLD, device=torch.device("cuda", device))
    except ReachedError:
        return queried
    except IndexError as error:
        return str(error)
    return "disabled"


def ask_peers_in_forks(*cases: tuple[str, list[str] | None]) -> list[list[tuple[int, int]] | str]:
    """Returns `ask_peers` of each case, from processes that share one import of vLLM."""
    import vllm.distributed.device_communicators.custom_all_reduce
    import vllm.engine.arg_utils  # noqa: F401

    context, answers = multiprocessing.get_context("fork"), []
    for case in cases:
        reader, writer = context.Pipe(duplex=False)
        process = context.Process(target=lambda: writer.send(ask_peers(*case)))  # noqa: B023
        process.start()
        answers.append(reader.recv())
        process.join()
    return answers


@pytest.mark.slow
def test_custom_all_reduce_of_vllm_finds_the_gpus_of_its_ranks() -> None:
    cases = [
        # Ranks of the second engine on a machine, whose bundles Ray has put on GPUs 6 and 4.
        ("0,1,2,3,4,5,6,7", ["6", "4"]),
        # A machine where Ray was given four GPUs.
        ("7,6,5,4", ["6", "4"]),
        # If a rank only sees its own GPU, vLLM does not start; this is why `SEES_ALL_GPUS` exists.
        ("6", None),
    ]
    (answers,) = run_ranks(ask_peers_in_forks, *cases, world_size=1)
    assert answers == [[(6, 4)], [(1, 3)], "list index out of range"]


@pytest.mark.parametrize(
    ("words", "mode"),
    [
        ({}, "processed_logprobs"),
        ({"temperature": 0.7, "top_p": 0.9}, "processed_logprobs"),
        ({"top_p": 0.9}, "raw_logprobs"),
        ({"top_k": 5}, "raw_logprobs"),
        ({"repetition_penalty": 1.2}, "raw_logprobs"),
    ],
)
def test_logprobs_are_of_the_full_distribution_at_temperature_1(words: dict, mode: str) -> None:
    assert _logprobs_mode(VllmGenerationConfig(**words)) == mode


def test_unsupported_cpu_block_size_is_refused_before_the_engine_starts() -> None:
    for size in (None, 32, 96):
        _refuse_block_size(VllmGenerationConfig(block_size=size), has_gpu=False)
    odd = VllmGenerationConfig(block_size=48)
    _refuse_block_size(odd, has_gpu=True)
    with pytest.raises(ConfigError, match="does not support this block size") as refused:
        _refuse_block_size(odd, has_gpu=False)
    assert refused.value.fix == "set it to 64"
